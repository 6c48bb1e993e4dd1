r"""One way to write what can be written in many.

    normalise(r"\$1{,}500.")              # "1500"
    normalise(r"\dfrac12\text{ hours}")   # r"\frac{1}{2} hours"
    plain("x⁴ ≤ √2")                      # r"x^{4} \le \sqrt{2}"

Two answers that are spelled alike need no arithmetic, and what comes after this file has one
notation to know. Nothing here changes a value: no rounding, no converting, no evaluating. Rewrites
are applied in order; each stands with an example, which a test runs.
"""

import functools
import re
import unicodedata

# Text inside LaTeX, with braces inside it at most once: \mathrm{H_{2}O}.
TEXT = re.compile(
    r"\\(?:text[a-z]*|mbox|hbox|math(?:rm|bf|it|sf|tt|normal)|operatorname\*?|emph|boldsymbol|ce)"
    r"\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)

CHARACTERS = str.maketrans(  # what people type, as LaTeX spells it
    dict.fromkeys("\u2212\u2013\ufe63\uff0d\u2010\u2011\u207b", "-")
    | dict.fromkeys("\u200b\u2061\u2062", "")
    | dict.fromkeys("£¥€" + "".join(map(chr, range(0x20A0, 0x20C1))), "")  # currencies
    | dict.fromkeys("\u201c\u201d\u201e", '"')
    | dict.fromkeys("\u2018\u2019", "'")
    | {"¢": " cents", "°": r"^\circ ", "\u2044": "/", "÷": "/", "⟨": "(", "⟩": ")", "。": "."}
    | {"∞": r"\infty ", "∅": r"\emptyset ", "\u00d7": r"\times ", "·": r"\cdot ", "±": r"\pm "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in "}
    | {"\u222a": r"\cup ", "\u2229": r"\cap ", "\u2216": r"\setminus "}
)
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
VULGAR_FRACTION = re.compile("[¼½¾⅐-⅞]")
NUMBER_SET = re.compile("[\u2102\u2115\u211a\u211d\u2124]")
GREEK = re.compile("(?<![\u0370-\u03ff])[\u03b1-\u03c9](?![\u0370-\u03ff])")  # one letter, no word


def plain(text: str) -> str:
    r"""The text with LaTeX and ASCII for what Unicode can write: x⁴ is x^{4}, ⅓ is \frac{1}{3}."""
    if text.isascii():
        return text
    compatible = functools.partial(unicodedata.normalize, "NFKC")  # "％" is "%", "𝑥" is "x"
    text = SUPERSCRIPTS.sub(lambda run: f"^{{{compatible(run[0])}}}", text)
    text = SUBSCRIPTS.sub(lambda run: f"_{{{compatible(run[0])}}}", text)
    text = VULGAR_FRACTION.sub(
        lambda half: r"\frac{{{}}}{{{}}}".format(*compatible(half[0]).split("\u2044")), text
    )
    text = NUMBER_SET.sub(lambda letter: rf"\mathbb{{{compatible(letter[0])}}}", text)
    text = GREEK.sub(lambda letter: rf"\{unicodedata.name(letter[0]).split()[-1].lower()} ", text)
    text = text.replace(r"\lamda ", r"\lambda ")  # as Unicode spells it
    text = re.sub(r"√ *(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"√ *(?=[a-zA-Z(\\{])", r"\\sqrt ", text)
    return compatible(text).translate(CHARACTERS)


COMMANDS = "(?:[dt]?frac|sqrt|left|right|l?g?eq?|infty|pi|text|cup|pm|cdot|times)(?![a-z])"
ABOUT = r"about|approximately|approx\.|roughly|circa|ca\."
POWERS = {"thousand": "e3", "million": "e6", "billion": "e9"}
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|log|ln|exp|gcd|lcm"

# What is searched for, what stands in its place, and an example before and after all rewrites.
REWRITES = [
    # escaped once too often; in a matrix the two mean a new row
    (rf"(?<!\\)\\\\(?={COMMANDS})", r"\\", r"\\frac{1}{2}", r"\frac{1}{2}"),
    (r",\\!\s*|\{,\}", ",", r"11,\! 111", "11111"),
    (r"\\!|\\(?:left|right|displaystyle|limits|[Bb]igg?[lrm]?)(?![a-zA-Z])", "", r"\left(1", "(1"),
    (r"(?<!\\)\\[()\[\]]", "", r"\(1,2]\)", "1,2]"),
    (r"\\(?:simeq|sim|thickapprox)(?![a-z])", r"\\approx", r"x\sim 2", r"x\approx 2"),
    (rf"^ ?(?:~|\\approx|(?:{ABOUT})(?![a-z])) *(?=[-+.$\\\d])", "", "about 11", "11"),
    (r"(?<!\\)\\(?:[,;:> ]|q?quad)|~|\s", " ", r"5\,\text{m}", "5 m"),
    (r"(?:\b(?:US|CA|AU))?\\?\$|\\pounds|\\euro(?![a-z])|\bRs\b\.?", "", "US$20", "20"),
    (r"\\?%|\b(?:percent|percentage)\b", " %", r"45\%", "45 %"),
    (r"\*\*", "^", "x**2", "x^2"),
    (r"\\[dtc]frac(?![a-z])", r"\\frac", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\\frac\s*(\d)", r"\\frac{\1}", r"\frac1{2}", r"\frac{1}{2}"),
    (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", r"\frac12", r"\frac{1}{2}"),
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree", r"^\\circ ", r"90^{\circ}", r"90^\circ"),
    (r"\\(?:mathbf|mathrm|boldsymbol|bf|rm)(?![a-z{])", " ", r"\mathbf v", "v"),
    (TEXT.pattern, r" \1 ", r"18\mbox{ cm}", "18 cm"),
    (TEXT.pattern, r" \1 ", r"\textbf{\text{(C)} 5}", "(C) 5"),  # the inner one
    (r"(?<=[\d)}])(or|and)(?=[-\\(\[\d ]|[A-Za-z](?![a-z]))", r" \1 ", "1or x", "1 or x"),
    (r"(?<=[\d})]) *deg(?:rees?)?\b", r"^\\circ ", "sin(30) degrees", r"\sin (30)^\circ"),
    (r"(?<=\d) *([AaPp])\.? ?[Mm]\b\.?", lambda at: f" {at[1].lower()}m", "9 A.M.", "9 am"),
    (r"\bm ?(?=\\angle)", "", r"m\angle A=5", r"\angle A=5"),
    (r"(?<=\d) ?\^? ?(?:\{ ?)?(?:st|nd|rd|th)\b(?: ?\})?", "", r"12^{\text{th}}", "12"),
    (r"(?<![\\a-zA-Z])sqrt ?(\d+)", r"\\sqrt{\1}", "2sqrt12", r"2\sqrt{12}"),
    (r"(?<![\\a-zA-Z])(sqrt|pi(?![a-zA-Z]))", r"\\\1", "pi*sqrt(x)", r"\pi*\sqrt(x)"),
    (rf"(?<![\\a-zA-Z])({FUNCTIONS})(?![a-zA-Z])", r"\\\1 ", "2sin(x)", r"2\sin (x)"),
    # sec and min are units, too, unless something that they can be taken of follows
    (r"(?<![\\a-zA-Z])(sec|min|max)(?= ?[({^\\x])", r"\\\1 ", "sec(x)", r"\sec (x)"),
    (r"(?<![\\a-zA-Z])inf(?:inity|ty)?(?![a-zA-Z])", r"\\infty ", "(2,inf)", r"(2,\infty )"),
    (r"\\mathbb ?R(?![a-z])|\\(?:R|Reals)(?![a-z])", r"\\mathbb{R}", r"\R", r"\mathbb{R}"),
    (r"(?<=[)\]]) ?[uU] ?(?=[(\[])", r"\\cup ", "(1,2)U(3,4)", r"(1,2)\cup (3,4)"),
    (r"\\varnothing|\\\{ *\\\}|^\{ *\}$", r"\\emptyset", r"\{\}", r"\emptyset"),
    (r"\\(?:langle|lparen)(?![a-z])", "(", r"\langle 1,2)", "( 1,2)"),
    (r"\\(?:rangle|rparen)(?![a-z])", ")", r"(1,2\rangle", "(1,2)"),
    (r"\\[lr]?vert(?![a-z])|\\mid(?![a-z])", "|", r"\lvert x\rvert", "| x|"),
    (r"\\leq(?:slant)?(?![a-z])|<=", r"\\le ", r"x\leq 2", r"x\le 2"),
    (r"\\geq(?:slant)?(?![a-z])|>=", r"\\ge ", "x>=2", r"x\ge 2"),
    (r"\\neq?(?![a-z])|\\not ?=|!=", r"\\ne ", "x!=2", r"x\ne 2"),
    (r"\\lt(?![a-z])", "<", r"x\lt 2", "x< 2"),
    (r"\\gt(?![a-z])", ">", r"x\gt 2", "x> 2"),
    (r"\b(?:[Mm]inus|[Nn]egative)\s+(?=[\d.])", "-", "minus 7", "-7"),
    (r"\s+per\s+", "/", "5 miles per hour", "5 miles/hour"),
    (r" *(?<!\\)/ *", "/", "60 km / h", "60 km/h"),
    (r" +", " ", "1  1/2", "1 1/2"),
    (r"(?<![\\ ])\{ | (?=[}^])", lambda at: at[0].strip(), r"2^{ \pi }", r"2^{\pi}"),
    (r"\^\(([^()]*)\)", r"^{\1}", "x^(1/2)", "x^{1/2}"),
    (r"([_^])\{(\w)\}(?!\d)", r"\1\2", "x^{2}", "x^2"),
    (r"^ ?([-+]) ", r"\1", "- 7", "-7"),
    (r"(?<=\d)E(?=[-+]?\d)", "e", "1.2E5", "1.2e5"),
    (r"(?<=\d) (thousand|million|billion)\b", lambda at: POWERS[at[1]], "5.5 million", "5.5e6"),
]
PATTERNS = [(re.compile(pattern), replacement) for pattern, replacement, *_ in REWRITES]
GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+(?!,?\d)|(?: \d{3})+(?! ?[\d,/]))")
IN_BRACKETS = re.compile(r"[(\[]|\\\{|^\{")


@functools.lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    """The text in the spelling that `grading.equality` reads, without decoration around it."""
    if text.isascii() and text.isdecimal():
        return text  # as most answers to word problems are
    text = plain(text).strip().strip('`*_"')
    if len(text) > 2 and text[0] == text[-1] == "'":
        text = text[1:-1]
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    text = text.strip(' ,;"')
    text = text[:-1].rstrip() if text.endswith(".") else text
    if not IN_BRACKETS.search(text):  # there a comma separates: (1,234) is a pair
        text = GROUPS.sub(lambda group: re.sub("[ ,]", "", group[0]), text)
    return text
