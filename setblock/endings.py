"""What an answer ends in: a number, in any of the ways of writing one, or else words."""

import re
import string
from collections.abc import Iterable
from fractions import Fraction


def final_number(text: str) -> Fraction | None:
    """The number that an answer ends in.

    That behind the last "####", else in the last \\boxed, else behind the last "answer is",
    "Answer:" or line "Final Answer" with a number in the line that follows, else that of a heading,
    else the last number of the text; None if there is none. A heading is what begins in words
    behind "####" and has more text behind it; "#### Step 2" is none, and "this answer is" no mark.
    Behind a mark it is the first one, of an equation the first behind the last "="; what
    parentheses with a "=" explain has no say.
    """
    text = _plain(text)
    number = _number_behind((*_marked(text), *_answers(text), *_marked(text, headings=True)))
    return _last_number(text) if number is None else number


def final_answer(text: str) -> Fraction | str:
    """The number that a worked answer ends in, or what it says in words.

    The words are those behind a mark of final_number but a heading, "answer is" at the end of the
    text alone, unless one of its kind holds a number: "####" and \\boxed are one kind, the last
    "answer is" is another. Without such words it is final_number, or the whole text if that holds
    no number.
    """
    plain = _plain(text)
    answers = _answers(plain)
    marked = _marked(plain)
    for numbers, words in (
        (marked, marked),
        (answers[:1], _closing(plain)),
        (answers, []),
        (_marked(plain, headings=True), []),
    ):
        if (number := _number_behind(numbers)) is not None:
            return number
        if said := _words_behind(words):
            return said
    number = _last_number(plain)
    return _whole(text) if number is None else number


def answers_alike(text: str, target: Fraction | str) -> bool:
    """Whether a text ends in the final_answer of a worked one; words in whatever case, and those
    behind "####" also where more follows.
    """
    if not isinstance(target, str):
        return final_number(text) == target
    plain = _plain(text)
    said = [_words_behind((*_marked(plain, more), *_closing(plain))) for more in (True, False)]
    return target in (*said, _whole(text))


# Marks

HASHES = re.compile(r"####(?![ \t*]*step\b)(?:\s*\n- |\s*)([^\n#]*)", re.I)
HEADING = re.compile(r"[* ]*(?:[^\W\d_]|\d+[.)] +[^\W\d_])")
ANSWER_IS = re.compile(
    r"(?<!this )answer\**(?: is|:)|^[#* \t]*(?:the )?(?:final )?answer[:* \t]*\n", re.I | re.M
)
SAYING = re.compile(r"(?!\s*```).*\w")  # a line that is no fence and no formula's bracket
INTRODUCED = re.compile(r"\A\W*(?:[a-z]+ ){0,3}answer\**(?: is|:)", re.I)
BRACES = re.compile(r"\\boxed *\{|[{}]|\\boxed *(-?\d(?:[\d.,]*\d)?|[^\s{}\\])")


def _marked(text: str, headings: bool = False) -> list[str]:
    """What stands behind the last "####", and in the last \\boxed, as far as there are any.

    What begins in words behind "####" and has more text behind it is a heading: no mark, unless
    asked for. Behind "####" a box counts, and what "answer is" says.
    """
    hashes = [found for found in HASHES.finditer(text) if found[1].strip()][-1:]
    said = [
        found[1]
        for found in hashes
        if headings or not (HEADING.match(found[1]) and text[found.end() :].strip())
    ]
    said = [last_box(one) or one for one in said]
    if (boxed := last_box(text)) is not None:
        said.append(boxed)
    return [re.sub(r"(^\W*|= *)- (?=[\d.$\\])", r"\1-", INTRODUCED.sub("", one)) for one in said]


def _answers(text: str) -> list[str]:
    """What the line behind each "answer is" says up to the next one, the last first."""
    said = ANSWER_IS.split(text)[:0:-1]
    return [next(filter(SAYING.match, one.split("\n")), "") for one in said]


def _closing(text: str) -> list[str]:
    """What stands behind the last "answer is" if it is one line, and the text's last one."""
    said = [one.strip(" *:\t\n") for one in ANSWER_IS.split(text)[1:][-1:]]
    return [one for one in said if "\n" not in one]


def last_box(text: str) -> str | None:
    """What stands in the \\boxed that begins last, braces within it included."""
    begin, end, opened = -1, -1, []  # of braces: where a \boxed begins to say something
    for brace in BRACES.finditer(text):
        if brace[1]:
            begin, end = brace.span(1)
        elif brace[0] != "}":
            opened.append(brace.end() if brace[0] != "{" else -1)
        elif opened and (first := opened.pop()) > begin:
            begin, end = first, brace.start()
    return text[begin:end] if end >= 0 else None


# Numbers

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
PART = r"/([1-9]\d*)(?![\w/]|\.\d)"
WRITTEN_NUMBER = re.compile(
    rf"""
    ((?<![\w.])-)?
    (?:(?<![\w.])(\d+)\ (?=\d+{PART.replace("(", "(?:", 1)}))?  # of a whole number and a part
    ((?:(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\w))?)
    (?:{PART})?
    """,
    re.VERBOSE,
)


def _plain(text: str) -> str:
    """Without the spaces of LaTeX, and with a comma wherever else thousands are parted."""
    text = text.replace("\\!", "")
    parted = r"(?<=\d)(?:\{,\}|\\[,;: ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"
    return re.sub(r"\\[,;: ]", " ", re.sub(parted, ",", text))


def _number_behind(marks: Iterable[str]) -> Fraction | None:
    numbers = map(_number_of, marks)
    return next((number for number in numbers if number is not None), None)


def _number_of(said: str) -> Fraction | None:
    """The number of what stands behind a mark."""
    # Not what parentheses explain, unless there is no number outside of them.
    bare = re.sub(r"(?<!\\)\([^()=]*=[^()]*\)", "", said)
    for part in (bare.rpartition("=")[2], bare, said.rpartition("=")[2], said):
        if numbers := _numbers(re.sub(r"(?<=\d) (?=\d{3}\b)", ",", part)):
            return numbers[0]
    return None


def _last_number(text: str) -> Fraction | None:
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


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


# Words


def _words_behind(marks: Iterable[str]) -> str:
    return next(filter(None, map(_words, marks)), "")


def _whole(text: str) -> str:
    return _words(_plain(text)) or text.strip()


def _words(text: str) -> str:
    """Without what may stand around an answer in words, in lower case."""
    bare = re.sub(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf) ?\{([^{}]*)\}", r"\1", text)
    around = string.whitespace + "\u00a0.,!:;*$\"'`\u201c\u201d\u2018\u2019()[]"
    return bare.strip(around).casefold() or text.strip()
