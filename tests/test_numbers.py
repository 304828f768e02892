"""Numbers that answers end in, in all ways of writing them."""

from fractions import Fraction

import pytest

from setblock.numbers import final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("#### 41\nno: #### 42", "42"),
        ("#### $1,234.50 per week", "1234.50"),
        ("#### -7", "-7"),
        ("3 + 4 = 7\n#### seven", "7"),
        ("so \\boxed{12} of 30", "12"),
        ("The answer is 8. That took 3 minutes.", "8"),
        ("Answer: 1,000,000", "1000000"),
        ("1, 2, and then 3", "3"),
        ("between 10-12", "12"),
        ("it is .5", "0.5"),
        ("5.", "5"),
        ("The answer is 5 x 3 = 15", "15"),
        ("#### 2 + 3 = 5", "5"),
        ("#### 10 000", "10000"),
        ("so \\boxed{1{,}234}", "1234"),
        ("\\boxed{1\\,234}", "1234"),
        ("\\boxed{\\text{about }{12}}", "12"),
        ("\\boxed{5", "5"),
        ("#### 1/2", "0.5"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("on 1/2/2024 it was 7", "7"),
        ("it is 1/0", "0"),
        ("The answer is x = ", None),
        ("#### 7 = x", "7"),
        ("1.50 dollars", "1.5"),
        ("12%", "12"),
        ("about 1e3", "1000"),
        ("2.5E-2 m", "0.025"),
        ("#### -1e+2", "-100"),
        ("3 eggs, 4e", "4"),
        ("#### -$5", "-5"),
        ("a loss of -\\$1,250.50", "-1250.5"),
        ("from $9-$5", "5"),
        ("#### \u20133", "-3"),
        ("pages 4\u20139", "9"),
        ("\\boxed{\\frac34}", "0.75"),
        ("\\boxed{-\\dfrac{1}{2}}", "-0.5"),
        ("\\boxed{\\frac{-3}{4}}", "-0.75"),
        ("\\boxed{1\\frac{1}{2}}", "1.5"),
        ("#### 2 1/2", "2.5"),
        ("#### -2 1/2", "-2.5"),
        ("#### 2 1/0", "2"),
        ("about 10^3", "1000"),
        ("it is 2.5 \\times 10^{-2}", "0.025"),
        ("#### 3 x 10^4", "30000"),
        ("#### 20 (= 5 x 4)", "20"),
        ("The answer is \\(5 \\times 4 = 20\\).", "20"),
        ("The answer is \\(2x = 20\\)", "20"),
        ("#### (10 + 8 = 18)", "18"),
        ("\\boxed{(2+3=5)}", "5"),
        ("Answer: $\\left(3+4=7\\right)$", "7"),
        ("Answer: 5 10/2", "5"),
        ("answer is 24 24/7", "24"),
        ("it was 24 24/7", "24/7"),
        ("I paid 3 \u20135", "5"),
        ("so x is \u20133", "-3"),
        ("#### 7 = seven (28 / 2 = 14 halves)", "7"),
        ("#### 4 + 16 = 20 (16 = 2 x 8)", "20"),
        ("\\boxed{" * 3000 + "7", "7"),
        ("no number", None),
        ("", None),
        ("####", None),
        ("1" * 500, "1" * 500),
    ],
)
def test_the_number_that_an_answer_ends_in(text, number) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


def test_signs_several_marks_and_loops() -> None:
    assert final_number("#### \u22123") == Fraction(-3)
    assert final_number("#### 5 #### 6") == Fraction(6)
    assert final_number("#### " + "1" * 5000) is None, "a loop, more than Python reads as a number"
    assert final_number("It is 7, and 1/" + "1" * 5000) == 7
