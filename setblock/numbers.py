"""What an answer ends in: a number, in any of the ways of writing one, or else words."""

import re
import string
from fractions import Fraction


def final_number(text: str) -> Fraction | None:
    """The number that an answer ends in.

    That behind the last "####", else in the last \\boxed, else behind the last "answer is" or
    "Answer:", else the last number of the text; None if there is none. Behind such a mark it is the
    first one, of an equation the first behind the last "="; what parentheses explain has no say.
    """
    text = re.sub(r"\{,\}|\\[,!;: ]", ",", text)  # LaTeX's ways of parting thousands
    if (number := _marked_number(text)) is not None:
        return number
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


ANSWER_IS = r"(?i)answer\**(?: is|:)\s*([^\n]*)"


def _marked(text: str) -> list[str]:
    """What stands behind the last "####", and in the last \\boxed, as far as there are any."""
    kinds = (re.findall(r"####\s*([^\n#]*)", text), boxes(text))
    return [kind[-1] for kind in kinds if kind]


def _marked_number(text: str) -> Fraction | None:
    """final_number's behind a mark."""
    for said in (*_marked(text), *re.findall(ANSWER_IS, text)[-1:]):
        # Not what parentheses explain, unless there is no number outside of them.
        bare = re.sub(r"(?<!\\)\([^()=]*=[^()]*\)", "", said)
        for part in (bare.rpartition("=")[2], bare, said.rpartition("=")[2], said):
            line = re.sub(r"(?<=\d)[ \u00a0\u202f](?=\d{3}\b)", ",", part)
            if numbers := _numbers(line):
                return numbers[0]
    return None


def boxes(text: str) -> list[str]:
    """What stands in each \\boxed, braces within it included."""
    found, opened = [], []  # of each brace that is open: where its \\boxed begins to say something
    for brace in re.finditer(r"\\boxed\{|[{}]", text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] != "{" else None)
        elif opened and (first := opened.pop()) is not None:
            found.append((first, brace.start()))
    return [text[first:end] for first, end in sorted(found)]


MOST_DIGITS = 1000  # of a number; what loops may repeat a digit, and Python reads 4,300 at most


# Ways of writing a number -> the one that is read.
TIMES_TEN = (
    r"(?:(\d) ?(?:x|\*|\u00d7|\\times|\\cdot) ?|(?<![\w.]))10\^(?:\{(-?\d{1,3})\}|(\d{1,3}))"
)
WRITTEN = (
    (r"\u2212|(?<!\d )(?<![\w.])\u2013(?=[\d.$])", "-"),
    (r"-\\?[$\u20ac\u00a3](?=[\d.])", "-"),
    (r"(\d) ?\\([dt]?frac)", r"\1 \\\2"),
    (r"\\[dt]?frac *(?:\{(-?\d+)\}|(\d)) *(?:\{(\d+)\}|(\d))", r"\1\2/\3\4"),
    (TIMES_TEN, lambda found: f"{found[1] or 1}e{found[2] or found[3]}"),
)
PART = r"/([1-9]\d*)(?![\w/.])"
WRITTEN_NUMBER = re.compile(
    rf"""
    ((?<![\w.])-)?
    (?:(?<![\w.])(\d+)\ (?=\d+{PART.replace("(", "(?:", 1)}))?  # of a whole number and a part
    ((?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\w))?)
    (?:{PART})?
    """,
    re.VERBOSE,
)


def _numbers(text: str) -> list[Fraction]:
    for form, plain in WRITTEN:
        text = re.sub(form, plain, text)
    numbers: list[Fraction] = []
    for minus, whole, over, under in WRITTEN_NUMBER.findall(text):
        if max(len(whole), len(over), len(under)) > MOST_DIGITS:
            continue
        part, ones = Fraction(over.replace(",", "")) / int(under or 1), Fraction(whole or 0)
        found = [ones, part] if whole and part >= 1 else [ones + part]  # 5 10/2 are two numbers
        numbers += [-found[0] if minus else found[0], *found[1:]]
    return numbers


def final_answer(text: str) -> Fraction | str:
    """The number that a worked answer ends in, as final_number; else what it says in words.

    That is what stands behind the mark where that is no number, or the whole text if it holds none.
    """
    words = _in_words(text)
    number = _marked_number(text) if words else final_number(text)
    return (words or _words(text)) if number is None else number


def answers_alike(text: str, target: Fraction | str) -> bool:
    """Whether a text ends in the final_answer of a worked one; words in whatever case."""
    if isinstance(target, str):
        return target in (_in_words(text), _words(text))
    return final_number(text) == target


def _in_words(text: str) -> str:
    """What stands behind a mark of final_number, "answer is" in the last line alone, or nothing."""
    last_line = text.rstrip().rpartition("\n")[2]
    return next(map(_words, (*_marked(text), *re.findall(ANSWER_IS, last_line)[-1:])), "")


def _words(text: str) -> str:
    """Without what may stand around an answer in words, in lower case."""
    return text.strip(string.whitespace + "\u00a0.!:;*\"'`()[]").casefold() or text.strip()
