"""Answers of a given form: what next-token decoding says within it, in fewer forwards."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import plain
from test_engine import PENALISED, WAYS, Request, agree, answers, counter, mixed, prompts
from test_fused import BRANCHES, FUSED, SLIDING, steps
from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

from setblock.vllm.forms import fitted, only_end

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "total": {"type": "integer"},
        "unit": {"enum": ["apples", "pears"]},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
    },
    "required": ["total", "unit", "steps"],
    "additionalProperties": False,
}
SAID = r"The answer is (yes|no), which follows from what was given: [0-9]{1,4} and [a-z]{2,20}\."
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": SAID},
    {"json": SCHEMA},
    {"choice": ["forty-two", "forty-three", "none of these"]},
    {"grammar": 'root ::= "say " [a-z]+ (" and " [a-z]+){1,3} "!"'},
    # What these force begins and ends within characters, of which a token may be a part.
    {"regex": "日本(人|語)は(好き|嫌い)です[。!]"},
    {"choice": ["un thé", "un thè", "un thê"]},
    {
        "json": {
            "type": "object",
            "properties": {
                "性别": {"enum": ["男", "女"]},
                "姓名": {"type": "string", "maxLength": 6},
            },
            "required": ["性别", "姓名"],
            "additionalProperties": False,
        }
    },
)
BY_BRANCHES = ({}, *BRANCHES)
VERIFIED = (*BY_BRANCHES, {"mode": "verified", "draft": "solver"}, {"mode": "ntp"})


@dataclass(frozen=True)
class Formed(Request):
    form: Any = None

    def params(self) -> Any:
        params = super().params()
        params.structured_outputs = StructuredOutputsParams(**self.form)
        return params


def formed(
    model: Any, count: int, ways: Sequence[dict[str, Any]] = VERIFIED, greedy: bool = False
) -> list[Formed]:
    """Requests of all these kinds and forms, drawn by a fixed seed."""
    draw = random.Random(1)
    made = []
    for number, ids in enumerate(prompts(model, count)):
        sampling = draw.choice([more for more in PENALISED if not (greedy and "seed" in more)])
        most, form = draw.choice((5, 37, 60, 60)), FORMS[number % len(FORMS)]
        made.append(Formed(ids, draw.choice(ways), most, sampling, form=form))
    return made


def next_tokens(engine: Any, requests: Sequence[Formed]) -> list[tuple[int, ...]]:
    """What the same engine says to these, one token a forward and one after the other."""
    single = [replace(one, way={"mode": "ntp"}) for one in requests]
    return [found for one in single for found in answers(engine, [one])]


def of_plain(folder: Path, requests: Sequence[Formed], **settings: Any) -> list[tuple[int, ...]]:
    """What vLLM as it is says to these."""
    asked = [
        (one.ids, {**one.sampling, "max_tokens": one.max_tokens, "form": one.form})
        for one in requests
    ]
    return [one.ids for one in plain(folder, asked, **settings)]


@pytest.mark.parametrize("kind", ["nano", "llama", "qwen3"])
def test_what_vllm_says_itself(engine, model, folder, kind):
    requests = formed(model(kind), 32, greedy=True)
    assert answers(engine(kind, **FUSED), requests) == of_plain(folder(kind), requests)


def test_a_model_that_thinks_first(engine, model, folder):
    """A form begins behind that."""
    settings = {"structured_outputs_config": {"reasoning_parser": "deepseek_r1"}}
    served = engine("thinking", **FUSED, **settings)
    form = {"regex": SAID}
    requests = [
        Formed(ids, VERIFIED[number % len(VERIFIED)], 100, form=form)
        for number, ids in enumerate(prompts(model("nano"), 24))
    ]
    found = answers(served, requests)
    assert found == of_plain(folder("thinking"), requests, **settings)
    assert found == next_tokens(served, requests)
    thought = [ids.index(6) for ids in found if 6 in ids]
    assert len(thought) > 12
    assert max(thought) > 16
    texts = [model("nano").decode(ids[ids.index(6) + 1 : -1]) for ids in found if 6 in ids]
    assert sum(bool(re.fullmatch(SAID, text)) for text in texts) > len(texts) / 2


@pytest.mark.parametrize("kind", ["nano", "llama", "chained:llama"])
def test_mixed_with_others(engine, model, kind):
    served = engine(kind, **FUSED)
    requests = formed(model(kind), 32)
    others = mixed(model(kind), 16, WAYS + BRANCHES + SLIDING)
    found = answers(
        served, [one for pair in zip(requests, others * 2, strict=True) for one in pair]
    )
    assert found[::2] == next_tokens(served, requests)
    assert found[1::2] == 2 * [one.reference(model(kind)) for one in others]


def test_texts_are_of_their_forms(engine, model):
    served = engine("nano", **FUSED)
    for ids in prompts(model("nano"), 5):
        for form in ({"regex": SAID}, {"choice": ["forty-two", "forty-three"]}):
            asked = Formed(ids, {}, 200, form=form)
            [found] = served.generate(
                [{"prompt_token_ids": list(ids)}], asked.params(), use_tqdm=False
            )
            wanted = form.get("regex") or "|".join(form["choice"])
            assert re.fullmatch(wanted, found.outputs[0].text)
            assert found.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_what_a_form_leaves_no_choice_of_takes_few_forwards(engine, model, backend):
    """Whatever a model knows of it: this one is random."""
    served = engine("llama", **FUSED, structured_outputs_config={"backend": backend})
    for ids in prompts(model("llama"), 5):
        asked = Formed(ids, {"mode": "verified"}, 60, form={"regex": SAID})
        [found] = answers(served, [asked])
        single = steps(served, replace(asked, way={"mode": "ntp"}))
        assert single == len(found)
        assert steps(served, asked) < 0.6 * single
        copies = {"mode": "verified", "block_size": 1, "lookup": 15}
        assert steps(served, replace(asked, way=copies)) < 0.6 * single
        # A draft of one token is none.
        one = {"mode": "verified", "block_size": 1, "lookup": 0}
        assert steps(served, replace(asked, way=one)) == single
    requests = [one for one in formed(model("llama"), 16) if "grammar" not in one.form]
    assert answers(served, requests) == next_tokens(served, requests)


@pytest.mark.parametrize("kind", ["nano", "chained:llama"])
def test_at_widths_drawn_for_every_step(engine, model, kind, width):
    draw = random.Random(2)
    width(lambda: draw.choice((1, 2, 3, 5, 8, 11, 16, 32, (16, False))))
    served = engine(kind, adaptive="all", **FUSED)
    requests = formed(model(kind), 24)
    assert answers(served, requests) == next_tokens(served, requests)


def test_prompts_in_chunks_and_blocks_cut_by_the_budget(engine, model):
    served = engine("nano", max_num_batched_tokens=60, max_num_seqs=8, block_size=32, **FUSED)
    requests = formed(model("nano"), 24)
    assert answers(served, requests) == next_tokens(served, requests)


def test_requests_that_lose_their_cache(engine, model):
    served = engine(
        "nano", num_gpu_blocks_override=10, max_model_len=208, block_size=32, max_num_seqs=8,
        max_num_batched_tokens=60, **FUSED,
    )  # fmt: skip
    form = {"regex": r"[a-z ]{100}( so be it)+"}
    ids = [one for one in prompts(model("nano"), 20) if len(one) < 90]
    ways = [VERIFIED[number % len(VERIFIED)] for number in range(len(ids))]
    requests = [Formed(*one, 100, form=form) for one in zip(ids, ways, strict=True)]
    found = answers(served, requests)
    assert counter(served, "vllm:num_preemptions") > 10
    assert found == next_tokens(served, requests)


def test_the_end_of_the_context(engine, model):
    served = engine("nano", max_model_len=64, **FUSED)
    [ids] = [one for one in prompts(model("nano"), 5) if len(one) < 40][:1]
    for way in VERIFIED:
        asked = Formed(ids, way, 64 - len(ids), form={"regex": "(and so on, )+"})
        [found] = answers(served, [asked])
        assert len(found) == 64 - len(ids)
        assert [found] == next_tokens(served, [asked])


@pytest.mark.parametrize(
    ("settings", "way", "fields", "message"),
    [
        (FUSED, {"mode": "sbd"}, {}, "structured_outputs are for modes ntp and verified, in which"),
        (FUSED, {}, {"ignore_eos": True}, "structured_outputs can't be used with ignore_eos"),
        ({}, {"mode": "verified"}, {}, "they can't be had with --no-fused"),
        (FUSED, {}, {"form": {"regex": "(unclosed"}}, "regex"),
        (
            {**FUSED, "structured_outputs_config": {"backend": "outlines"}},
            {},
            {"form": {"regex": "[a-z]{100}"}},
            "structured_outputs need the backend xgrammar or guidance, which take back",
        ),
    ],
)
def test_what_is_refused(engine, model, settings, way, fields, message):
    asked = Formed((5, 6), way, 4, **{"form": FORMS[0], **fields})
    with pytest.raises((VLLMValidationError, ValueError), match=message):
        answers(engine("nano", **settings), [asked])
    agree(engine("nano", **settings), model("nano"), [Request((5, 6), {})])  # it still answers


class Words:
    """A grammar of vLLM's form, by words for tokens: one of these texts."""

    def __init__(self, *texts: str, jump: bool = True) -> None:
        self.texts, self.said = [text.split() for text in texts], []
        self.matcher = self if jump else None

    def following(self) -> set[str]:
        count = len(self.said)
        on = [text for text in self.texts if text[:count] == self.said and len(text) > count]
        return {text[count] for text in on}

    def find_jump_forward_string(self) -> str:
        before, found = list(self.said), []
        while len(self.following()) == 1 and not self.is_terminated():
            self.said += [found.append(*self.following()) or found[-1]]
        self.said = before
        return " ".join(found)

    def validate_tokens(self, tokens: list[str]) -> list[str]:
        return [one for one in tokens[:1] if one in self.following()]

    def accept_tokens(self, name: str, tokens: list[str]) -> bool:
        self.said += tokens
        return True

    def rollback(self, count: int) -> None:
        del self.said[len(self.said) - count :]

    def is_terminated(self) -> bool:
        return self.said[-1:] == ["."]


@pytest.mark.parametrize(
    ("texts", "held", "most", "expected"),
    [
        (["a b c ."], "a", 9, "a b c ."),  # all of it is known
        (["a b c ."], "a", 2, "a b"),
        (["a b c ."], "a x x x x", 9, "a b c ."),  # in place of what was drafted
        (["a b c .", "a b d ."], "a b d x", 9, "a b d ."),
        (["a b c .", "a b d ."], "a b x d", 9, "a b"),  # as far as it is allowed
        (["a b c .", "a b d ."], "a b", 9, "a b"),
        (["a b c ."], "z b", 9, "z"),  # what the answer has already is not judged
    ],
)
def test_fitted(texts, held, most, expected):
    grammar: Any = Words(*texts)
    encode: Any = str.split
    found = fitted(grammar, encode, lambda: None, held.split(), most)
    assert (found, grammar.said) == (expected.split(), [])


class Bytes(Words):
    """As xgrammar, whose forced text must be of whole characters."""

    def find_jump_forward_string(self) -> str:
        return (super().find_jump_forward_string().encode() + "é".encode()[:1]).decode()


def test_fitted_to_a_text_that_ends_within_a_character():
    grammar: Any = Bytes("a b c d", "a b c e")
    encode: Any = str.split
    assert fitted(grammar, encode, lambda: None, ["a", "x"], 9) == ["a", "b", "c"]
    grammar = Bytes("a b", "a c")  # it begins within one
    assert fitted(grammar, encode, lambda: None, ["a", "x"], 9) == ["a"]


def test_of_a_long_text_only_the_beginning_is_encoded():
    lengths: list[int] = []

    def encode(text: str) -> Any:
        lengths.append(len(text))
        return text.split()

    words = ["on"] * 50_000
    grammar: Any = Words(" ".join(words))
    assert fitted(grammar, encode, lambda: None, ["on"], 8) == words[:8]
    assert max(lengths) < 500


def test_fitted_without_a_backend_that_tells():
    grammar: Any = Words("a b c .", jump=False)
    encode: Any = str.split
    assert fitted(grammar, encode, lambda: None, ["a", "b", "x"], 9) == ["a", "b"]
    ends: Any = lambda: "c" if grammar.said == ["a", "b"] else None  # noqa: E731
    assert fitted(grammar, encode, ends, ["a", "b", "x"], 9) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("allowed", "expected"), [([2], 2), ([40, 2], 2), ([40], 40), ([2, 7], None), ([7], None)]
)
def test_the_end_alone(allowed, expected):
    class Bits:
        def fill_bitmask(self, bits: Any, line: int) -> None:
            for token in allowed:
                bits[line, token // 32] |= 1 << token % 32

    assert only_end(Bits(), torch.zeros(1, 2, dtype=torch.int32), [2, 40, 99]) == expected
