"""What answers end in: numbers, in all ways of writing them, or words."""

from fractions import Fraction

import pytest

from setblock.endings import answers_alike, final_answer, final_number, last_box

NUMBERS = [
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
    ("#### (5) of 6", "5"),
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
    ("#### " + "$ " * 9000 + "7", "7"),
    ("#### " + "ab " * 9000 + "answer", None),
    ("no number", None),
    ("", None),
    ("####", None),
    ("1" * 500, "1" * 500),
    ("The answer is 1/2.", "0.5"),
    ("So she ate 2 1/2.", "2.5"),
    ("It is 1/2.5", "2.5"),
    ("1/2a", "2"),
    ("1/2/x", "2"),
    ("\\boxed{5}\n#### 6", "6"),
    ("it is 10\\,080", "10080"),
    ("it is 10\u2009080", "10080"),
    ("it is 10\u202f080", "10080"),
    ("#### 10{,}0000", "10"),
    ("\\boxed{2\\ 3}", "2"),
    ("\\boxed{1\\tfrac{1}{2}}", "1.5"),
    ("\\boxed{10,\\!080}", "10080"),
    ("\\boxed{10\\ 080}", "10080"),
    ("\\boxed{1\\;234}", "1234"),
    ("\\boxed{1\\ \\frac{1}{2}}", "1.5"),
    ("it costs 10\u2009000 or 10\u00a0000", "10000"),
    ("10\u202f000 of 10{,}0000", "0"),
    ("\\boxed 2", "2"),
    ("\\boxed 27 of 8", "27"),
    ("$\\boxed-1,234.5.$", "-1234.5"),
    ("\\boxed{\\frac12} or \\boxed 3", "3"),
    ("\\boxed {27} of 8", "27"),
    ("\\boxed{\\boxed{3} of 4}", "3"),
    ("#### 6, or \\boxed{5}; the answer is 4, not 3", "5"),
    ("\\boxed{5}; the answer is 4, not 3", "5"),
    ("The answer is 4, not 3", "4"),
    ("I thought the answer is 4, but the answer is 5.", "5"),
    ("The answer is 5. Final Answer: 6", "6"),
    ("The answer is 5. It took 3 steps.\nI hope this answer is helpful!", "5"),
    ("The answer is five, of 8 eggs\nor 9", "8"),
    ("####\n12\nof 13", "12"),
    ("Answer:\n\n12\nof 13", "12"),
    ("**Answer:** **12** of 13", "12"),
    ("#### Answer: 12", "12"),
    ("#### The final answer is 12, not 13", "12"),
    ("#### 5 (not 6, the answer is 7)", "5"),
    ("#### Step 2: Double\n5 x 2 = 10\n\\boxed{10}", "10"),
    ("####  **Step 2**\nThe answer is 10.", "10"),
    ("#### 3\n#### Final answer:\nis 10, not 11", "10"),
    (
        "#### 1. Eggs\n16 - 7 = 9\n\n#### 2. Money\n9 x 2\n\n#### Final Answer\n\n**$18**, not 2",
        "18",
    ),
    ("#### 2. Money\n9 x 2 = 18\n\n\\[\\boxed{18}\\]", "18"),
    ("#### Part 2: Money\n...\n**Answer: 18**", "18"),
    ("#### Double of 2 years\n5 x 2 = 10\n\nThe answer is 10.", "10"),
    ("#### 3/4, not 9\n####", "0.75"),
    ("The answer is 5 of 8.\nThe answer is yes.\nRight?", "5"),
    ("#### 18\nThe answer is in dollars, \\boxed{5} of them", "18"),
    ("#### In all 18\nSo 19", "18"),
    ("**Final Answer**\n18 of 20", "18"),
    ("The answer is not 20.\nIt is 18.\nLet me know if this answer is clear.", "20"),
    ("The answer is 5, thus prime.\nThe answer is yes.", "5"),
    ("#### - 5", "-5"),
    ("\\boxed{- \\frac{1}{2}}", "-0.5"),
    ("a * 10^2", "100"),
    ("3 \u00d7 10^2", "300"),
    ("3 \\cdot 10^2", "300"),
    ("3 * 10^2", "300"),
    ("$x10^2", "2"),
    ("\\boxed{\\tfrac {1} {4}}", "0.25"),
    ("-\u20ac5", "-5"),
    ("-\u00a35", "-5"),
    ("-$.5", "-0.5"),
    ("#### 1 000 000", "1000000"),
    ("it is 1e5x", "5"),
    ("it is v2 1/2", "0.5"),
    ("#### 2 2/2", "2"),
    ("#### " + "1" * 1001, None),
    ("It is 7, " + "1" * 1001 + " 1/2", "7"),
    ("#### Step 1\n16 - 7 = 9\n#### Step 2\n9 x 2 = 18\n\nIn all 18", "18"),
    ("So \\boxed{18}.\n\n#### Step 3: Check\n9 x 2 = 18", "18"),
    ("The answer is 18.\n\n#### **step 3** Check\n9 x 2 = 18", "18"),
    ("The answer is 18.\n\n#### Check of the 2 steps\n9 x 2 = 18", "18"),
    ("#### 18\n\n#### Step 1: Eggs\nShe eats 3 and bakes 4.", "18"),
    ("#### Janet makes $18\n\nI hope the answer is clear!", "18"),
    ("#### _18_\n\nThe answer is for 9 eggs", "18"),
    ("#### $18\n\nThe answer is for 9 eggs", "18"),
    ("#### 1.5x\n\nThe answer is for 9 eggs", "1.5"),
    ("#### 12) Money\n9 x 2 = 18\nThe answer is 18", "18"),
    ("####\n- 18 eggs", "18"),
    ("#### x = - 5", "-5"),
    ("\\boxed{x = - \\frac{1}{2}}", "-0.5"),
    ("#### - $5 and 6", "-5"),
    ("#### $- 5 and 6", "-5"),
    ("#### - .5 and 6", "-0.5"),
    ("so \\boxed -7 of 8", "-7"),
    ("The capital is the\nanswer.\nIt has 5 parts, 8 in all", "8"),
    ("The answer is:\n\n\\[\n18\n\\]\n\nThat's 2 nines.", "18"),
    ("Answer:\n```python\n18\n```\nThat's 2 nines.", "18"),
    ("Answer:\n```\n18\n```\nThat's 2 nines.", "18"),
    ("#### 46,2004", "46"),
    ("1999,200", "200"),
    ("#### 5 1000", "5"),
    ("#### 2 x 9 = 16 + 2 = 18", "18"),
    ("They answer 5 of 8", "8"),
    ("my answer\n5 of 8", "8"),
    ("The answer\n5 of 8", "5"),
    ("Answer\n5 of 8", "5"),
    ("#### **The answer**: 5 of 8", "5"),
    ("## 5 parts\nIt is 7", "7"),
    ("10^{3}", "1000"),
    ("about 10^12", "1" + "0" * 12),
    ("about 1e12", "1" + "0" * 12),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_number_that_an_answer_ends_in(text, number) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


def test_signs_several_marks_and_loops() -> None:
    assert final_number("#### \u22123") == Fraction(-3)
    assert final_number("#### 5 #### 6") == Fraction(6)
    assert final_number("#### " + "1" * 5000) is None, "a loop, more than Python reads as a number"
    assert final_number("It is 7, and 1/" + "1" * 5000) == 7


WORDS = [
    ("#### Paris", "paris"),
    ("The answer is Paris.", "paris"),
    ("#### The answer is Paris", "paris"),
    ("#### Answer: Paris", "paris"),
    ("#### \\boxed{no}", "no"),
    ("\\boxed{\\text{no}}", "no"),
    ("\\boxed{$x$}", "x"),
    ("Answer: \u201cParis\u201d,", "paris"),
    ("Answer:\nParis", "paris"),
    ("**Answer:**\n\nParis\n", "paris"),
    ("Answer: `[Paris]`", "paris"),
    ("The answer is more than 3.\n#### Yes", "yes"),
    ("Answer: 5 is prime.\n#### Yes", "yes"),
    ("2 + 2 = 4, so \\boxed{no}. The answer is yes", "no"),
    ("The answer is yes.\nOr is it?", "the answer is yes.\nor is it?"),
    ("a\u00a0", "a"),
    ("\\boxed{no}\n#### Remarks\nNone", "no"),
    ("\\mbox {Saturday}", "saturday"),
    ("The answer is 5, thus prime.\nThe answer is yes.", "yes"),
    ("#### Reasoning\nIt is warm.\n\nThe answer is yes.", "yes"),
    ("#### Pros\nCheap\n#### Cons\nSlow", "#### pros\ncheap\n#### cons\nslow"),
    ("#### Final Answer\n\n**Paris**\n", "paris"),
    ("\\,", "\\,"),
    ("...", "..."),
    ("#### \nThe answer is no", "no"),
    ("#### b\n\nBecause it is cold.", "#### b\n\nbecause it is cold"),
    ("#### (b)\n\nBecause 3 < 5.", "b"),
    ("\\boxed{\\textbf{no}}", "no"),
    ("\\boxed{\\textit{no}}", "no"),
    ("\\boxed{\\mathrm{no}}", "no"),
    ("\\boxed{\\mathbf{no}}", "no"),
    ("Answer: **'no';**!", "no"),
    ('Answer: "no"', "no"),
]


@pytest.mark.parametrize(("text", "words"), WORDS)
def test_the_words_that_an_answer_ends_in(text, words) -> None:
    assert final_answer(text) == words


@pytest.mark.parametrize("text", [text for text, _ in NUMBERS + WORDS])
def test_a_worked_answer_is_right_by_itself(text) -> None:
    assert answers_alike(text, final_answer(text))


def test_a_number_behind_a_mark_goes_before_words_behind_one_of_its_kind() -> None:
    assert final_answer("#### no, \\boxed{3}") == 3
    assert final_answer("The answer is 5 of 8.\nThe answer is yes.\nRight?") == 5
    assert final_answer("The answer is 3.\nI hope this answer is helpful!") == 3
    assert final_answer("The answer is no: 3 < 5") == 3, "documented: the line holds a number"


def test_an_answer_in_words_is_what_follows_a_mark_or_the_whole_text() -> None:
    assert answers_alike("The answer is (b)", "b")
    assert answers_alike("The answer is no.\n#### Yes", "yes")
    assert not answers_alike("The answer is no.\n#### Yes", "no")
    assert answers_alike("Answer: yes or no", "answer: yes or no")


def test_words_behind_hashes_may_have_more_behind_them_in_what_is_compared() -> None:
    text = "#### Paris\n\nI hope this answer is helpful!"
    assert answers_alike(text, "paris")
    assert final_answer(text) != "paris", "it may be a heading"


def test_the_box_that_begins_last() -> None:
    assert last_box("\\boxed{a} \\boxed{b {c}} } \\boxed{d") == "b {c}"
    assert last_box("\\boxed{a \\boxed{b} c}") == "b"
    assert last_box("\\boxed{a} \\boxed 2") == "2"
    assert last_box("\\boxed 2 \\boxed{}") == ""
    assert last_box("{a} \\boxed") is None
    assert last_box("\\boxed{" * 9000 + "}" * 9000) == ""  # in little memory
