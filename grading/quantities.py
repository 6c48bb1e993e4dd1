r"""Plain numbers, exactly, and the units behind them.

    number("1 1/2")                    # Fraction(3, 2)
    number("47+85")                    # None: work is no number
    split_unit("60 km/h")              # ("60", "km/h")
    split_unit(r"12\pi square cm")     # (r"12\pi", "cm^2")

A number is what a reader copies without computing: digits, a decimal, a fraction of those, a mixed
number, a power of ten, a number in another base. Units are cut off and compared with their powers,
never converted; words that are no units (apples) are cut off and mean nothing.
"""

import re
from fractions import Fraction

DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?")
SCIENTIFIC = re.compile(  # 10^5, 6.02 \times 10^{23}
    r"(?:(-?[\d.]+) ?(?:\\times|\\cdot|\*|x) ?|(-?))10\^ ?(?:\{ ?([-+]?\d{1,3}) ?\}|([-+]?\d{1,3}))"
)
LATEX_FRACTION = re.compile(r"\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}")
IN_BRACKETS = re.compile(r"^([-+]?) ?[({]([^(){}]*)[)}]$")
PART = r"(-?[\d.]+|\(-?[\d.]+\)|\{-?[\d.]+\})"
MIXED = re.compile(rf"([-+]?)(?:(\d+) )?{PART}/{PART}")  # 1/2, 3 1/2, (3)/(4)
REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
BASED = re.compile(r"((?=[A-F]*\d)[\dA-F]+(?:\.[\dA-F]+)?)_\{?(\d{1,2})\}?")


def number(text: str) -> Fraction | None:
    """The exact value of a normalised text that is one plain number, or None."""
    text = LATEX_FRACTION.sub(r" \1/\2", text).replace("- ", "-").strip()
    text = IN_BRACKETS.sub(lambda inside: (inside[1] + inside[2]).replace("--", ""), text)
    if DECIMAL.fullmatch(text):
        return Fraction(text)
    if (power := SCIENTIFIC.fullmatch(text)) and DECIMAL.fullmatch(power[1] or "1"):
        return Fraction(f"{power[1] or power[2] + '1'}e{power[3] or power[4]}")
    if (based := BASED.fullmatch(text)) and "." not in text and 2 <= int(based[2]) <= 16:
        base = int(based[2])
        return Fraction(int(based[1], base)) if int(max(based[1]), 16) < base else None
    if repeating := REPEATING.fullmatch(text):  # 0.1\overline{6} = 0.1 + 6/90
        sign, whole, before, cycle = repeating.groups()
        nines = 10 ** len(before) * (10 ** len(cycle) - 1)
        value = Fraction(f"{whole or 0}.{before or 0}") + Fraction(int(cycle), nines)
        return -value if sign else value
    mixed = MIXED.fullmatch(text)
    parts = [part.strip("(){}") for part in mixed.group(3, 4)] if mixed else []
    if not mixed or not all(map(DECIMAL.fullmatch, parts)) or not Fraction(parts[1]):
        return None
    value = Fraction(mixed[2] or 0) + Fraction(parts[0]) / Fraction(parts[1])
    return -value if mixed[1] == "-" else value


METRIC_WORDS = {"meter": "m", "metre": "m", "gram": "g", "liter": "L", "litre": "L"}
UNITS = (  # spellings of a unit, and the one it is compared by; an s behind it is a plural
    {"percent": "%", "percentage": "%", "pct": "%", "pound": "lb", "ounce": "oz", "year": "yr"}
    | {"inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi"}
    | {"sec": "s", "second": "s", "minute": "min", "hr": "h", "hour": "h", "ml": "mL", "l": "L"}
    | {
        prefix + word: prefix[:1] + unit
        for prefix in ("", "milli", "centi", "kilo")
        for word, unit in METRIC_WORDS.items()
    }
)
OTHERS = ("day", "week", "month", "dollar", "cent", "am", "pm", "mph", "degree")
OTHERS += ("degreeC", "degreeF", "degreeK")
UNITS |= {unit: unit for unit in (*UNITS.values(), *OTHERS)}
METRIC = r"[kMGmµncd](?:[mgsJNWVAL]|Hz|Pa|eV|mol|cal)|[kMG]?(?:Hz|Pa|eV|mol|cal)"
SYMBOL = re.compile(rf"[JNWVAKCF]|{METRIC}")  # behind a blank these are units, too
POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}  # in front of a unit
_WORD = r"[^\W\d_](?:[^\W\d_]|['-])*\.?"
UNIT_WORD = re.compile(rf"%|/?{_WORD}(?:/{_WORD})?(?:\^\{{?-?[1-3]\}}?)?")
IN_BRACKETS_BEHIND = re.compile(
    rf"(?: [(\[]|(?<=\d)\((?=\w{{3}})) ?(%|{_WORD}(?:[ /]{_WORD})*(?:\^\d)?) ?[)\]]$"
)  # 5 (cm)
DEGREE = re.compile(r"^(?!.*\\(?:sin|cos|tan|cot|sec|csc))(.*)\^\\circ ?([CFK]?)$")
_LONG = "|".join(word for word in UNITS if len(word) > 1 and word not in ("in", "mi", "mg"))
_POWER = r"(?:\^\{?[23]\}?)?(?:/[A-Za-z]+)?"
GLUED_UNIT = re.compile(  # also 18/day and 12元
    rf"(?<=[\d}}])(?=(?:(?:{_LONG}|dm)s?{_POWER}|/[A-Za-z]{{2,}}|[^\W\d_A-Za-z]+)$)"
)
GLUED_TO_NUMBER = re.compile(rf"(?<=\d)(?=(?:L|in|mi|m(?=\^)|{METRIC}){_POWER}$)")
UNIT_FRACTION = re.compile(r" ?\\frac\{([A-Za-z]{2,})\}\{([A-Za-z]+)\}$")  # \frac{km}{h}
VARIABLES = re.compile(r"(?!of$|on$|at$|to$|by$)[A-Za-z]{0,2}|[abc]+|[xyz]+")  # 5 x, 3 ab/c
# Behind a number these change its value: 5 squared, 2 thirds, 9 or 10.
NUMBER_WORD = re.compile(
    r"(?:and|or|not|plus|minus|times|over|squared|cubed|factorial|dozen|hundred|hal(?:f|ves)"
    r"|thirds?|fourths?|fifths?|quarters?)"
)


def split_unit(text: str, letters: bool = False) -> tuple[str, str | None]:
    """The value without the words behind it, and the unit with its power if it is a known one.

    Args:
        letters: a number is wanted, so L, m^2 or in glued to digits are units and no variables.
    """
    cut = IN_BRACKETS_BEHIND.sub(r" \1", UNIT_FRACTION.sub(r" \1/\2", text))
    cut = GLUED_UNIT.sub(" ", DEGREE.sub(r"\1 degree\2", cut))
    words = (GLUED_TO_NUMBER.sub(" ", cut) if letters else cut).split(" ")
    kept = len(words)
    while kept and UNIT_WORD.fullmatch(words[kept - 1]):
        kept -= 1
    value, names = " ".join(words[:kept]), [re.sub(r"[.{}]", "", word) for word in words[kept:]]
    few = 0 < len(names) <= 6 and not any(map(NUMBER_WORD.fullmatch, names))
    if not few or not re.search(r"(?:[\d})]|\\pi)$", value):
        return text, None
    for part in re.sub(r"\^-?\d", "", names[0]).strip("/").split("/"):
        if VARIABLES.fullmatch(part) and not _unit(part) and part not in POWERS:
            return text, None
    power = ""
    for name in names:
        if unit := _unit(name):
            return value, unit + power
        power = POWERS.get(name, "")
    return value, None


def _unit(name: str) -> str | None:
    """The unit that a word such as km/h or cm^2 stands for, or None; 18/day has none."""
    units = []
    for part in name.split("/"):
        base, hat, power = part.partition("^")
        if base not in UNITS and len(base) > 2:
            base = base.removesuffix("s")
        if base not in UNITS and not SYMBOL.fullmatch(base):
            return None
        units.append(UNITS.get(base, base) + hat + power)
    return "/".join(units)
