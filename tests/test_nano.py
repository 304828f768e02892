"""The bundled model's tasks: the same problems for ever, splits that never meet, exact checkers."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from setblock import nano
from setblock.execution import calls_agree

FAMILIES = sorted(nano.FAMILIES)
# Of prompts and answers: training_stream(0), test, validation in held-out wordings with seed 3.
# Models were trained and scored on these very problems: a change makes their records wrong.
GOLDEN = {
    "arithmetic": ("995dcbe778a42bad", "f16262bc3f20fe70", "8c5766069cd4bb77"),
    "word": ("158000451fb6db04", "d0cce00dc836d1bb", "d8757deae0ecbb36"),
    "json": ("0b442c73bb15b0eb", "d41fa5c4d6ff43e4", "d0b90c9c868f7c42"),
    "code": ("266f1c51d0606671", "fef4612e1dad5c14", "15e5d6468b5934b2"),
    "lists": ("a429e85a52173c6f", "5368f27cca2b76bd", "42b2903a54cf711b"),
}


def digest(problems: Iterable[nano.Problem]) -> str:
    text = "\n".join(f"{problem.prompt}\n{problem.answer}" for problem in problems)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def one(family: str, kind: str) -> nano.Problem:
    """The first test problem of a kind."""
    return next(p for p in nano.problems(family, "test", 20) if p.kind == kind)


@pytest.fixture(scope="module")
def trained() -> list[nano.Problem]:
    return list(itertools.islice(nano.training_stream(0), 1500))


# Which problems


def test_the_training_stream_never_changes(trained):
    """300 of each family, which come in turn."""
    for index, family in enumerate(nano.FAMILIES):
        problems = trained[index :: len(nano.FAMILIES)]
        assert {problem.family for problem in problems} == {family}
        assert digest(problems) == GOLDEN[family][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scored_problems_never_change(family):
    assert digest(nano.problems(family, "test", 200)) == GOLDEN[family][1]
    held_out = nano.problems(family, "validation", 200, seed=3, held_out=True)
    assert digest(held_out) == GOLDEN[family][2]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_arguments_give_the_same_problems(family):
    """More of them begin with the same ones; every other argument changes them."""
    first = nano.problems(family, "test", 10)
    assert nano.problems(family, "test", 20)[:10] == first
    keys = {problem.key for problem in first}
    for other in (
        nano.problems(family, "test", 10, seed=1),
        nano.problems(family, "test", 10, held_out=True),
        nano.problems(family, "validation", 10),
    ):
        assert keys != {problem.key for problem in other}


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        nano.problems("json", "test", 1, seed=-1)


def test_streams_of_two_seeds_differ():
    first, second = (
        [problem.key for problem in itertools.islice(nano.training_stream(seed), 20)]
        for seed in (0, 1)
    )
    assert first != second


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_are_distinct_and_of_every_kind_and_wording(family):
    problems = nano.problems(family, "test", 100)
    assert len({problem.key for problem in problems}) == 100
    kinds = {kind.__name__.removeprefix("_") for kind in nano.FAMILIES[family]}
    seen = {(problem.kind, problem.wording) for problem in problems}
    assert seen == set(itertools.product(kinds, range(nano.HELD_OUT_WORDING)))
    assert not any(problem.held_out for problem in problems)
    held_out = nano.problems(family, "test", 20, held_out=True)
    assert {problem.kind for problem in held_out} == kinds
    assert all(problem.held_out for problem in held_out)


def test_every_kind_has_five_wordings_that_name_all_its_fields(trained):
    wordings = nano.texts()["wordings"]
    assert set(wordings) == {problem.kind for problem in trained}
    for kind, texts in wordings.items():
        assert len(set(texts)) == nano.NUM_WORDINGS
        fields = set(fields_of(next(problem for problem in trained if problem.kind == kind)))
        for text in texts:
            assert set(re.findall(r"{(\w+)}", text)) == fields


def fields_of(problem: nano.Problem) -> dict[str, str]:
    kind, fields = problem.key.split(" ", 1)
    assert kind == problem.kind
    return json.loads(fields)


def test_held_out_wordings_are_never_trained_on(trained):
    assert not any(problem.held_out for problem in trained)
    assert {problem.wording for problem in trained} == set(range(nano.HELD_OUT_WORDING))


def in_every_wording(problem: nano.Problem) -> Iterator[str]:
    for wording in nano.texts()["wordings"][problem.kind]:
        yield wording.format(**fields_of(problem))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_question_of_one_split_occurs_in_another_in_any_wording(family, trained):
    index = list(nano.FAMILIES).index(family)
    splits = {
        "train": trained[index :: len(nano.FAMILIES)] + nano.problems(family, "train", 200),
        "validation": nano.problems(family, "validation", 100)
        + nano.problems(family, "validation", 50, held_out=True),
        "test": nano.problems(family, "test", 100) + nano.problems(family, "test", 50, seed=1),
    }
    for split, problems in splits.items():
        assert {nano.split_of(problem.key) for problem in problems} == {split}
        assert all(problem.prompt in in_every_wording(problem) for problem in problems)
    asked = [
        {text for problem in problems for text in in_every_wording(problem)}
        for problems in splits.values()
    ]
    for one_split, another in itertools.combinations(asked, 2):
        assert not one_split & another


def test_a_twentieth_of_the_questions_goes_to_each_scored_split():
    splits = [nano.split_of(f"question {number}") for number in range(4000)]
    assert set(splits) == set(nano.SPLITS)
    for split in ("validation", "test"):
        assert 0.04 < splits.count(split) / 4000 < 0.06


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("poetry", "test", 1), "family must be one of arithmetic, word, .*, got 'poetry'"),
        (("json", "all", 1), "split must be one of train, validation, test, got 'all'"),
        (("json", "test", 5001), "each family has at most 5000 problems of a split, not 5001"),
        (("json", "train", 1, 0, True), "held_out wordings are never part of the split 'train'"),
    ],
)
def test_wrong_arguments(words, message):
    with pytest.raises(ValueError, match=message):
        nano.problems(*words)


# Which answers


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "code"])
@given(seed=st.integers(0, 2**32), held_out=st.booleans())
@settings(max_examples=20, deadline=None)
def test_worked_answers_are_right(family, seed, held_out):
    for problem in nano.problems(family, "test", 10, seed, held_out):
        assert nano.check(problem, problem.answer)
        assert problem.answer == problem.answer.strip()


@given(seed=st.integers(0, 2**32), held_out=st.booleans())
@settings(max_examples=10, deadline=None)  # each starts an interpreter
def test_worked_functions_are_right(seed, held_out):
    (problem,) = nano.problems("code", "test", 1, seed, held_out)
    assert calls_agree(problem.answer, *problem.target)  # type: ignore[misc]
    assert nano.check(problem, problem.answer + "\n"), "the same function, so it is run"


@pytest.mark.parametrize("kind", ["numbers", "strings", "words"])
def test_functions_of_each_kind_and_their_mistakes(kind):
    problem = one("code", kind)
    name = fields_of(problem)["f"]
    assert nano.check(problem, problem.answer)
    for wrong in (
        problem.answer.replace("return", "print"),
        problem.answer.replace(f"def {name}", "def other"),
        problem.answer[: len(problem.answer) // 2],
        "```python\n" + problem.answer + "\n```",
    ):
        assert not nano.check(problem, wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_answer_is_wrong(family):
    problem = nano.problems(family, "test", 1)[0]
    for text in ("", "\n", "I do not know.", problem.prompt):
        assert not nano.check(problem, text)


def off_by_one(code: str) -> Iterator[str]:
    """The code with one number, letter or comparison changed."""
    comparisons = {"<": "<=", ">": ">=", "==": "!=", "!=": "=="}
    for found in re.finditer(r"\d+|'(\w)'|[<>](?!=)|[=!]=", code):
        word = found.group()
        if word.isdigit():
            others = [str(int(word) + 1), str(int(word) - 1)]
        elif found.group(1):
            others = ["'b'" if word == "'a'" else "'a'"]
        else:
            others = [comparisons[word]]
        for other in others:
            yield code[: found.start()] + other + code[found.end() :]


def results(code: str, name: str, arguments: list) -> list:
    """Of functions that this test made from worked answers; errors count as a result."""
    scope = {}
    exec(code, scope)
    found = []
    for argument in arguments:
        try:
            found.append(scope[name](argument))
        except (ZeroDivisionError, ValueError):  # text[::0]
            found.append(None)
    return found


def test_code_with_one_wrong_constant_is_wrong():
    """In 200 functions, run in this process: what passes gives the same on every short list."""
    tried = 0
    for problem in nano.problems("code", "test", 200):
        name, cases = problem.target  # type: ignore[misc]
        arguments = [argument for argument, _ in cases]
        expected = [result for _, result in cases]
        assert results(problem.answer, name, arguments) == expected
        for code in off_by_one(problem.answer):
            tried += 1
            if results(code, name, arguments) == expected:
                assert problem.kind == "numbers", code
                other = [[x, y] for x in range(60) for y in range(60)]
                assert results(code, name, other) == results(problem.answer, name, other), code
    assert tried > 800


@pytest.mark.parametrize("family", ["arithmetic", "word"])
def test_a_number_off_by_one_is_wrong(family):
    for problem in nano.problems(family, "test", 20):
        head, number = problem.answer.rsplit("Answer: ", 1)
        for wrong in (int(number) + 1, int(number) - 1, f"{number}0", f"{number}.", f"0{number}"):
            assert not nano.check(problem, f"{head}Answer: {wrong}")


@pytest.mark.parametrize("kind", ["sort", "unique", "later"])
def test_a_list_or_date_with_one_wrong_item_is_wrong(kind):
    problem = one("lists", kind)
    head, answer = problem.answer.rsplit("Answer: ", 1)
    assert isinstance(problem.target, str)
    for wrong in (
        answer[:-1],
        answer + "1",
        answer[::-1],
        answer.replace(", ", ","),
        f"[{answer}]",
    ):
        if wrong != answer:
            assert not nano.check(problem, f"{head}Answer: {wrong}")


def test_only_the_last_answer_line_counts():
    problem = nano.problems("arithmetic", "test", 1)[0]
    right, wrong = f"Answer: {problem.target}", "Answer: none"
    assert nano.check(problem, f"{wrong}\n{right}")
    assert not nano.check(problem, f"{right}\n{wrong}")
    assert nano.check(problem, f"{right}\nThat was easy.")
    assert nano.check(problem, f"{right}  ")


@pytest.mark.parametrize("text", ["{}", "The Answer: {}", " Answer: {}", "Answer:{}", "answer: {}"])
def test_the_answer_line_has_one_form(text):
    problem = nano.problems("arithmetic", "test", 1)[0]
    assert not nano.check(problem, text.format(problem.target))


def without_last_key(target: dict) -> dict:
    return dict(list(target.items())[:-1])


@pytest.mark.parametrize("kind", ["person", "order", "event"])
def test_json_must_be_the_very_value(kind):
    problem = one("json", kind)
    target: Any = problem.target
    text = problem.answer
    many = isinstance(target, list)
    first = target[0] if many else target
    assert isinstance(first, dict)
    assert nano.check(problem, json.dumps(target, indent=1))
    changed = [
        {**first, "note": None},
        without_last_key(first),
        {key: str(value) for key, value in first.items()},
        {key: value + 1 if isinstance(value, int) else value for key, value in first.items()},
        {key.upper(): value for key, value in first.items()},
    ]
    wrong = [json.dumps([other, *target[1:]] if many else other) for other in changed]
    wrong += [text[:-1], text + text[-1], text.replace('"', "'"), f"JSON: {text}", f"[{text}]"]
    for answer in wrong:
        assert not nano.check(problem, answer), answer


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "NaN", "null"])
def test_absurd_json_is_wrong(text):
    assert not nano.check(one("json", "event"), text)


def test_small_talk_is_pairs_of_texts():
    for pair in nano.texts()["small_talk"]:
        assert len(pair) == 2
        assert all(isinstance(text, str) and text for text in pair)
