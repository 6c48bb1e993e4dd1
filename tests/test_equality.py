r"""What is equal and what is not: a table that says what a mathematician would say."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.equality import chosen, equal, gradable
from rewards import accuracy, is_gradable

# A line: the reference = what equals it ! what does not, two blanks between them. An indented line
# goes on with the one before it.
TABLE = r"""
5  =  5.  5.0  +5  x=5  2+3=5  (5)  **5**  $5$  \(5\)  5 apples  $5  €5  5%  \text{5}  005
     5 (cm)  5 J  5 N  5 kJ/mol  5 mol/L  5 kPa  x = 2+3 = 5  !  6  five  5x  5 x  -5  \pm 5  x
-7  =  −7  –7  minus 7  - 7  !  7  7-
132  !  47+85  130 + 2  11 \times 12  1,32  1 32
48500  =  48,500  $48,500.00  48{,}500  48\,500  48 500  48.5 thousand  !  48,50
1234567  =  1,234,567  1\,234\,567  1 234 567  !  1,234,56  12,34,567  802
3000000  =  3 million  3e6  3\times10^6  3 \cdot 10^{6}  3E6  !  3
0.00012  =  1.2e-4  1.2\times 10^{-4}  .00012  !  1.2  1.2e4
6.02\times 10^{23}  =  6.02e23  6.02*10^23  !  6.022\times 10^{23}  6.02e22
100000  =  1e5  10^5  10^{5}  !  1e  15
\frac{14}{3}  =  14/3  \dfrac{14}{3}  \frac{28}{6}  4\frac{2}{3}  4 2/3  !  4.6667
\frac43  =  \tfrac43  4/3  1\frac13  !  43  4.3  1.333333
-\frac{1}{2}  =  -0.5  \frac{-1}{2}  \frac{1}{-2}  -1/2  -½  !  0.5
-1\frac{1}{2}  =  -1.5  -3/2  -1 1/2  !  -0.5  -11/2
\frac{1}{6}  =  0.1\overline{6}  .1\overline{66}  !  0.16  0.\overline{16}
-1.2\overline{34}  =  -\frac{611}{495}  !  1.2\overline{34}  -1.234
\frac{1}{3}  =  1/3  2/6  ⅓  (1)/(3)  {1}/{3}  {1/3}  (1/3)  !  0.333333  0.3333333333333333  3
     0.333
1/3^80  =  \frac{1}{3^{80}}  3/3^81  !  2/3^79  0
45\%  =  45%  45  0.45  45 percent  !  4.5  0.45%  450
0.45  =  45%  .45  !  45
18\text{ cm}  =  18  18 cm  18 centimeters  18\mbox{ cm}  !  18 m  18 kg  19 cm  18 18
90^\circ  =  90  90°  90 degrees  90^{\circ}  !  \frac{\pi}{2}  9
\$32,\!348  =  32348  32,348  $32,348  !  32
11,\! 111,\! 100  =  11111100  11,111,100  !  \frac{1}{2}\pi
52_8  =  52_{8}  52  !  52_9  42  25_8
42  =  52_8  !  42_8  42_5
2\sqrt{3}  =  \sqrt{12}  2√3  2sqrt(3)  2\sqrt3  12^{1/2}  !  2  3  3.4641
2\pi  =  2pi  2π  2 \pi  2 pi  2π cm^2  !  2  6.283185  6.2831853071795865
6 - 5i  =  -5i+6  6-5i  !  6+5i  5i-6
(x+1)^2  =  x^2+2x+1  (1+x)^2  !  x^2+2x+2  (x-1)^2  (y+1)^2
x=5  =  5  x = 5  !  y=5  x=6
2x-5y+11=0  =  4x-10y+22=0  2x = 5y - 11  !  7x+3y+2=0  0
x \in [-2,7]  =  [-2,7]  -2 \le x \le 7  !  (-2,7)  [-2,7)
1,-2  =  -2,1  \{1,-2\}  1 and -2  x=1 or x=-2  (1,-2)  !  1  1,2  (-2,1)  -1
(1,2)  =  (1, 2)  \left(1,2\right)  1,2  (x,y)=(1,2)  !  (2,1)  \{1,2\}  [1,2]  (1,2]  2,1  1
\{1,2\}  =  \{2,1\}  2,1  \{1,1,2\}  1,2,2  \{2,1,1\}  2,1.0,1  {1, 2}  !  (1,2)  [1,2]
     \{1,2,3\}  1,2,3  1
\{1,2,3\}  =  \{1,2\}\cup\{3\}  !  \{1,2\}\cup\{4\}
(2,\infty)  =  x>2  (2,∞)  2<x  !  [2,\infty)  x\ge 2  x<2
(0,9) \cup (9,36)  =  (9,36)\cup(0,9)  !  (0,9]\cup(9,36)  (0,36)
1 \pm \sqrt{19}  =  1-\sqrt{19},1+\sqrt{19}  x=1\pm\sqrt{19}  !  1+\sqrt{19}
\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}  =  \begin{bmatrix}-\frac13\\2\end{bmatrix}  !  2
\text{east}  =  east  East.  \textbf{East}  !  seat  eats  west
stop  =  Stop  \text{stop}  !  pots  s t
\text{Evelyn}  =  Evelyn  !  Eve
no  =  No  \text{no}  !  on
NaCl  =  \text{NaCl}  \mathrm{NaCl}  \ce{NaCl}  !  ClNa  Na
H_2O  =  H2O  \text{H}_2\text{O}  \mathrm{H_{2}O}  !  OH_2  H_2O_2
k  !  K  2k
3R^2  =  3 R^2  !  3r^2
\emptyset  =  \varnothing  ∅  \{\}  !  0
\cot x  =  \cot(x)  \frac{\cos x}{\sin x}  !  \tan x
\text{(C)}  =  C  (C)  \textbf{(C)}  \text{(C) } 5  !  (D)  5
137 \frac{1}{2}  =  137.5  \frac{275}{2}  !  1371/2  137
2^{2^{3}}  =  2^{2^3}  !  64
ab  =  ba  a \cdot b  !  a  a+b
\frac{\sqrt{2}}{4}  =  \frac{\sqrt{0.5}}{2}  0.5\sqrt{0.5}  !  \sqrt{0.5}
x^{0.5}  =  \sqrt{x}  x^{1/2}  x^(1/2)  x^0.5  !  x^5  x
e^{0.25t}  =  e^{t/4}  e^{\frac{t}{4}}  \exp(t/4)  !  e^{4t}
\log 2.5  =  \log\frac52  \log(5/2)  !  \log 25
0.1n+2.5  =  \frac{n}{10}+\frac{5}{2}  2.5+n/10  !  0.1n+2.6
1.5^n  =  (\frac{3}{2})^n  (3/2)^n  !  1.5n
(3,2,3)  =  (3, 2, 3)  3,2,3  !  (3,2,2)  (3,2)  (3,3,2)
[1,1]  =  [1, 1]  !  [1]  1  [1,2]  (1,1)
(1,2),(3,4)  =  (3,4),(1,2)  (1,2), (3,4), (1, 2)  (1,2) and (3,4)  !  (1,2),(4,3)  (1,2)
4d  =  4 d  d*4  !  4
5g  !  5  g
t^2+5t  =  t(t+5)  !  t^2+5  t^2
3mn  =  3nm  !  3  3m
7h  !  7
2l  !  2
9c+6  =  6+9c  3(3c+2)  !  9+6  9c
8  =  8 cm  8cm  8 L  8L  8 hours  8hrs  8 kg  8kg  $8  8 dollars  8/day  $8/hour  8 m/s  8 m
     8 square feet  8 ft^2  8th  €8  8 USD  US$8  8 apples per day  8 people in total  8%
     8\text{ mph}  8\,\text{cm}^2  8 \frac{\text{km}}{\text{h}}  8\text{ km}\,\text{h}^{-1}  8°
     8 °C  ₹8  Rs. 8  8 Rs  £8  \pounds 8  8 kilometers per hour  x = 8 cm  8 cubic meters  8m²
     8 m³  "8"  8.  !  8x  8t  8 x  8 or 9  8 and a half  8 squared  8 hundred  8 thousand
     8 dozen  8c  8g  8ab  8!  8m
8\text{ m/s}  =  8  8 m/s  8 meters per second  !  8 km/h
60\text{ km/h}  =  60 km/h  60 km / h  60 kilometers per hour  60\text{ km/hr}  !  60 mph
     60 m/s
\frac{1}{x}  =  \frac1x  1/x  x^{-1}  x^(-1)  x⁻¹  \frac 1 x  !  x
\frac{x}{2}  =  \frac x2  x/2  0.5x  \frac{1}{2}x  \frac12x  !  2x
\frac{\pi}{2}  =  \frac\pi2  \pi/2  π/2  \frac{1}{2}\pi  0.5π  \frac \pi 2  {\pi}/{2}  !  90
\frac{\sqrt3}{3}  =  \frac{1}{\sqrt{3}}  \frac{\sqrt3}3  √3/3  (√3)/3  1/√3  \frac1{\sqrt3}  !
     \sqrt3
\sqrt{x+1}  =  √(x+1)  sqrt(x+1)  \sqrt(x+1)  (x+1)^{0.5}  (x+1)^(1/2)  !  √x+1
\sqrt{12}  =  √12  2√3  sqrt12  sqrt(12)  !  √1
\sin 30^\circ  =  0.5  \frac12  \sin(30°)  \sin 30 degrees  !  30
\cos 40^\circ  =  \cos(40^\circ)  \sin 50^\circ  !  40
30^\circ, 60^\circ  =  30°, 60°  30 and 60  60 degrees and 30 degrees
     30^\circ \text{ and } 60^\circ  !  30  30,70
m\angle A = 40^\circ  =  40  40°  \angle A=40^\circ  !  50
AB=5  =  5  AB = 5  !  6
A  =  a  (A)  [A]  {A}  'A'  "A"  “A”  A.  A)  a)  A) text  A: text  A. text  A (text)
     A is correct  A is right  Option A  option a  **A**  A because it is so  A - text here
     A, since  a) weak  \text{A}  A) A base  A: X rays  \textbf{A}  A. A strong acid  Choice A
     A) N,N-dimethyl  A) (S)-butanol  (A) 5  A) 5  !  B  A or B  A and B  A, B  A/B  A & B
     (A) or (B)  A strong acid  a strong acid  A, B, C  (A), (B)  B (A)  AB  A;B  Acid
     A or maybe B  either A or B  not A
C  =  c  c)  C carbon dioxide  C) C6H12O6  C. H bonds  C: A dog  !  C or D  c, d  D
(-\infty,-2]\cup[2,\infty)  =  x\le-2 or x\ge 2  x \leq -2 \text{ or } x \geq 2
     [2,\infty)\cup(-\infty,-2]  x ≤ -2 or x ≥ 2  x<=-2 or x>=2  !  x<-2 or x>2
     (-\infty,-2)\cup(2,\infty)  x\le 2 or x \ge 2  [2,\infty)
x<1 \text{ or } x>3  =  (-\infty,1)\cup(3,\infty)  x>3 or x<1  !  x>3  1<x<3
(1,2]  =  1<x\le 2  1 < x \leq 2  !  1<x<2  1\le x\le 2  (1,2)
(\sqrt3,1),(-\sqrt3,1)  =  (\pm\sqrt3,1)  (-\sqrt3,1),(\sqrt3,1)  (±√3, 1)  !  (\sqrt3,\pm 1)
     (\sqrt3,1)
\pm 3  =  3,-3  x=3, x=-3  -3 and 3  x=\pm 3  ±3  -3, 3  {-3, 3}  !  3  -3  {3}
-2,-2  =  a=-2, b=-2  -2, -2  !  -2,2
3,4  =  x=3,y=4  x=3, y=4  4,3  !  3
(3,4)  =  x=3,y=4  !  x=4,y=3  (4,3)
-\frac{1}{8}  =  -(1/8)  (-1)/8  -1/8  -⅛  -0.125  (-1)/(8)  \frac{-1}{8}  -{1}/{8}  !  1/8
x^{10}  =  x¹⁰  x^10  x**10  x^(10)  !  x^1  x^100
10^{-3}  =  10⁻³  10^(-3)  0.001  1/1000  1e-3  1\times10^{-3}  !  10^3
a_1+a_2  =  a₁+a₂  a_{1}+a_{2}  !  a_1+a_3
2112_6  =  2112_{6}  2112  x=2112_6  2112₆  N = 2112_{6}  !  2112_7  2113_6
1.01_2  =  1.01_{2}  1.01  !  1.01_3
A3_{16}  =  A3  !  A3_{12}  A4_{16}  163
1-\frac{1}{e}  =  1-\frac{1}{\mathrm{e}}  1-1/e  1-\mathrm{e}^{-1}  !  1-e  1+1/e
\arctan 3  =  \operatorname{arctan} 3  \arctan(3)  \tan^{-1}(3)  \text{arctan}(3)  !  \arctan 4
\overline{AB}  !  \overline{AC}
125\text{ miles}  =  125  125\textnormal{ miles}  125\textit{ miles}  125\mathrm{~miles}
     125 \mathrm{miles}  !  126
4:30 \text{ p.m.}  =  4:30 pm  4:30 p.m.  4:30 PM  4:30  !  4:30 a.m.  4:31 p.m.  5:30 pm
\text{9 a.m.}  =  9 am  9 a.m.  !  9 p.m.  8 am
2\frac{1}{2}  =  2.5  5/2  2 1/2  2½  !  1
\begin{pmatrix}1&2\\3&4\end{pmatrix}  =  \begin{bmatrix}1&2\\3&4\end{bmatrix}
     \begin{pmatrix} 1 & 2.0 \\ 3 & 4 \\ \end{pmatrix}
     \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
     \begin{smallmatrix}1&2\\3&4\end{smallmatrix}
     \left(\begin{matrix}1&2\\3&4\end{matrix}\right)  !  \begin{pmatrix}1&2\\4&3\end{pmatrix}
     \begin{pmatrix}1&2&3&4\end{pmatrix}  \begin{vmatrix}1&2\\3&4\end{vmatrix}  1,2,3,4
y=2x+3  =  2x+3  y = 3+2x  y-2x-3=0  !  y=2x-3  2x-3  2x
\text{two}  =  two  Two  !  2
\frac{1}{2}\text{ hour}  =  0.5  1/2 hours  0.5 hr  !  2
\mathbb{R}\setminus\{1\}  =  \mathbb{R} \setminus \{1\}  (-\infty,1)\cup(1,\infty)  !
     \mathbb{R}  \mathbb{R}\setminus\{2\}
[0,\infty)  =  x\ge 0  x \geq 0  [0, +\infty)  !  x>0  (0,\infty)
12  =  12^{th}  12th  12^\text{th}  12元  12 mètres  12 yuan  !  1
n!  !  n
1,000,000  =  1000000  1 million  10^6  !  1
\frac{x+2}{7}  =  (x+2)/7  \frac17(x+2)  \frac{1}{7}x+\frac27  !  x+2/7
5\sqrt{3}\text{ cm}  =  5√3  5√3 cm  5\sqrt3\,cm  !  5√3 m
\mathbb{R}  =  \mathbb R  (-\infty,\infty)  ℝ  \R  x\in\mathbb{R}  !  (0,\infty)  R  \mathbb{Z}
\vec{v}  =  \vec v
\hat i+\hat j  =  \hat{i}+\hat{j}
10  =  10\,\mathrm{cm^{3}}  10\ \mathrm{m/s^2}  10 sq cm
москва  =  Москва
東京  =  東京。
11  =  x \approx 11  ~11  \approx 11  about 11  11=11.0  5+6=11  !  5+6
|AB|=1  =  1  !  2
S_{MBCN}:S=7:32  =  7:32  !  7:31
\frac{NO}{BO}=\frac{1}{\sqrt{6}}  =  \frac{1}{\sqrt{6}}  \frac{\sqrt6}{6}  !  \sqrt 6
(p,q)=(3,2)  =  (3,2)  (3, 2)  !  (2,3)
x_{1}=2+\sqrt{3},\quadx_{2}=2-\sqrt{3}  =  2\pm\sqrt3  2-\sqrt3, 2+\sqrt3  !  2+\sqrt3
p=5,q=2;p=7,q=2  =  (5,2),(7,2)  (7,2); (5,2)  !  (5,2),(2,7)
xy=1  =  yx=1  !  1  y=1/x
2x=6  =  x=3  !  6
\tan\theta=\frac{3}{4}  =  0.75  !  3
x=11  =  x=5+5+1=11  x\approx 11  11  x = 5+6 = 11 \approx 11.0  !  x=11=12  y=11
F_n=\sum_{k=0}^{n-1} F_k  !  F_n=\sum_{k=0}^{n-2} F_k  F_{n-1}
-12;-11;-10  =  -10, -11, -12  \{-12,-11,-10\}  -12; -10; -11  !  -12;-11
(0;0;6),(4;-2;0)  =  (4,-2,0), (0,0,6)  !  (4,0,-2),(0,0,6)
(11,7)or(7,11)  =  (7,11), (11,7)  (7,11) and (11,7)  !  (7,11)
a=4,-8,-10  =  -10,-8,4  !  -10,8,4
2,3,5  =  {2, 3, 5}  2; 3; 5  2, 3, and 5  2, 3, \text{ and } 5  !  (2,3)  {2,3}
x \ne 3  =  x != 3  x \neq 3  x\not=3  2x\ne 6  \mathbb{R}\setminus\{3\}
     (-\infty,3)\cup(3,\infty)  !  x=3  x \ne 4  3
x<2  =  x\lt 2  2>x  2\gt x  (-\infty,2)  !  x>2  x\le 2
0<f(x)<1  =  (0,1)  1>f(x)>0  !  [0,1)  (1,0)
-2\le x\le 7  =  x\in[-2,7]  -2\\le x\\le 7  7\ge x\ge -2  !  -2<x<7
(0,2)  !  (0,1)\cup(1,2)  (0,1]\cup(1,2)
\mathbb{R}\setminus\{-2,2\}  =  (-\infty,-2)\cup(-2,2)\cup(2,\infty)
     \mathbb{R} \setminus \{2, -2\}  (2,\infty)\cup(-2,2)\cup(-\infty,-2)  !
     (-\infty,-2)\cup(2,\infty)
(-\infty,a)\cup(b,\infty)  =  (b,\infty)\cup(-\infty,a)  !  (-\infty,b)\cup(a,\infty)
3  =  \gcd(18,3)  \operatorname{gcd}(18,3)  \max(1,3,2)  \min(3,4)  \operatorname{lcm}(1,3)  !
     \gcd(18,9)  \operatorname{lcm}(2,3)
20  =  20in  20ft  20mi  20L  20 J  20 sq ft  20 (apples)  20 of them  20kJ  !  20x  20t
1000  =  1 000  1,000  1 000 km  !  1,00  10 00
12 345 678  =  12345678  !  12345
x=12000  =  12 000  !  12
1.22  !  1,22
10\text{ cm}^2  =  10  10 square cm  10 cm^2  10 sq cm  !  10 cm  10 cm^3  10 m^2
5 J  =  5  5J  !  5 N
\alpha+1  =  α+1  1+α  !  a+1
30  =  30 min  30min  30 (minutes)  30(minutes)  30 [%]  !  30x
\mathbb{Z}  =  ℤ  \mathbb Z  !  Z
f^{-1}(3)=12  =  12  !  3
\mathbf{v}  =  v  \mathbf v  !  w
(-\infty,2)\cup(3,\infty)  =  (-inf, 2) U (3, inf)  (-\infty,2) \text{ or } (3,\infty)
x \approx 5  =  ≈ 5  approx. 5  x = 5  ca. 5  !  6
2\pi r+\lambda  =  2πr + λ  \lambda+2r\pi  !  2r+λ
"""
ROWS = re.sub(r"\n {5}", "  ", TABLE.strip()).split("\n")


@pytest.mark.parametrize("row", ROWS)
def test_what_is_equal(row):
    equals, _, differs = row.partition("  !  ")
    gold, _, equals = equals.partition("  =  ")
    assert is_gradable(gold)
    for answer in [gold, *filter(None, equals.split("  "))]:
        assert accuracy(f"<answer>{answer}</answer>", gold) == 1, f"{answer} is {gold}"
    for answer in filter(None, differs.split("  ")):
        assert accuracy(f"<answer>{answer}</answer>", gold) == 0, f"{answer} is not {gold}"
    for completion in (rf"so \boxed{{{gold}}}.", f"#### {gold}", f"<answer>#### {gold}</answer>"):
        assert accuracy(completion, gold) == 1


@pytest.mark.parametrize(
    "reference", [r"\boxed{5}", "The answer is 5.", "Answer: 5", "so\n#### 5", "<answer>5</answer>"]
)
def test_a_reference_is_read_as_an_answer_is(reference):
    assert is_gradable(reference)
    for completion in ("<answer>5</answer>", r"so \boxed{5}", reference):
        assert accuracy(completion, reference) == 1
    assert accuracy("<answer>6</answer>", reference) == 0


@given(st.integers(), st.integers(min_value=0, max_value=999))
def test_thousands_separators_do_not_change_a_number(n, thousandths):
    number = f"{n}.{thousandths:03}"
    for text in (f"{n:,}.{thousandths:03}", f"${n:,}.{thousandths:03}0", number):
        assert equal(text, number)
    assert equal(f"{n:,}".replace(",", " "), str(n))
    assert not equal(f"{n + 1:,}.{thousandths:03}", number)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=5), st.randoms())
def test_brackets_keep_order_and_repeats_and_sets_do_not(items, random):
    def written(numbers, brackets):
        return brackets[0] + ",".join(map(str, numbers)) + brackets[1]

    other = random.sample(items, len(items)) + random.sample(items, 1) * random.randint(0, 1)
    ordered, sets = ("()", "[]"), ((r"\{", r"\}"), ("", ""))
    for brackets in ordered:
        assert equal(written(other, brackets), written(items, brackets)) == (other == items)
    for brackets in sets:
        assert equal(written(other, brackets), written(items, brackets))
        assert not equal(written([*other, 9], brackets), written(items, brackets))


@given(st.sampled_from("ABCDEFGH"), st.sampled_from("ABCDEFGH"))
def test_every_letter_is_chosen_alike_and_never_by_a_hedge(letter, other):
    forms = ("{}", "({})", "[{}]", '"{}"', "{}.", "{}) text", "{}: text", "{}. A text", "{} (text)")
    forms += ("Option {}", "{} is correct", "{} because", "{} - the text", "{}, since")
    forms += ("{}) X rays", "{} and I balanced it twice.", "{} and the rest is wrong")
    for form in forms:
        assert chosen(form.format(letter)) == letter
    hedges = ("{} or {}", "{}, {}", "{} and {}", "{}/{}", "({}) ({})", "{}; {}", "{} & {}")
    hedges += ("{} and maybe {}", "({}) or ({})", "{} and I think also {}")
    for hedge in hedges:
        assert chosen(hedge.format(letter, other)) is None


def test_what_no_rule_reads_is_right_only_if_it_is_spelled_alike():
    assert equal(r"a\equiv 3\pmod 5", r"a \equiv 3 \pmod 5") is True
    assert equal(r"\sum_{k=1}^n a_k", r"\sum_{j=1}^n a_j") is False
    assert equal(r"\sum_{k=0}^{3} k", "6") is False  # work that is not done
    assert equal("(x+y)^{900}", r"(9!)^{9^{9}}") is False
    assert equal("1)(2", "3)(4") is False
    assert equal("x" * 1001, "x" * 1001) is False  # too long


UNSOUND = ["", " ", "$", "...", r"\frac{3", r"\frac{", "x" * 2000, r"\sqrt{}+", "(1,2", "3+", "x^"]
UNSOUND += [r"\frac{1}", r"\frac{}{2}", "5="]
UNSOUND += [r"\boxed{}", r"so \boxed{5", "####", r"\boxed{\frac{1}}"]
SOUND = r"""
2007 + \frac\pi 2  \frac \pi4 + 2 - \sqrt2  \frac{1+a+b+c}c  [0,1)  3:4  \$5  f(x)=x^2  10^{100}
4\!:\!51\!:\!06 \text{ p.m.}  \text{4:30 p.m.}  81 \mathrm{~km} / \mathrm{hr}  \ln|x|+C  \vec{v}
x\in\mathbb{R}  \frac{dy}{dx}=2x  \sum_{n=1}^\infty \frac{1}{n^2}  \{x : x>2\}  a \equiv 3 \pmod 5
A\cup B
"""


def test_a_reference_that_cannot_be_compared_with_is_named():
    assert [gold for gold in UNSOUND if is_gradable(gold)] == []


def test_a_sound_reference_is_kept_and_equals_itself():
    golds = re.split(r"\n|  ", SOUND.strip())
    assert [gold for gold in golds if gradable(gold) and equal(gold, gold)] == golds
