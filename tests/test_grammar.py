"""Answers that follow a JSON Schema or a regular expression, in modes ntp and verified."""

import copy
import json
import math
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jaxtyping
import numpy as np
import pytest
import reference
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import SLOW
from test_verified import assert_lossless, options, pair

import setblock
from setblock import grammar as module
from setblock import verified
from setblock.generation import generate, settings_for
from setblock.settings import FORMATS

PATTERNS = [
    r"(yes|no|maybe)", r"[a-f]{3,9}(, [a-f]{3,9})*\.", r"-?[0-9]+(\.[0-9]{2})?", r"a*b?", r"(ab)*",
    r"The answer is [0-9]{1,3}, and that is (true|false)\.",
]  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


# Sums, in which parts may be bracketed; and an expression for the same.
SUMS = """
start: sum
sum: part ("+" part)*
part: DIGIT | "(" sum ")"
DIGIT: /[1-9]/
"""
SUM = r"(?P<sum>(?:[1-9]|\((?&sum)\))(?:\+(?:[1-9]|\((?&sum)\)))*)"


class Slow:
    """A tokenizer in Python."""

    eos_token_id = 1


@pytest.fixture(scope="module")
def networks(checkpoint):
    """Random float32 networks of two families with a token for each byte."""
    return {kind: setblock.load(checkpoint(kind), device="cpu") for kind in ("llama", "qwen3")}


def slowly(model, prompt: list[int], pattern: str, most: int, sampler) -> list[int]:
    """Next-token decoding of row 0, in which every token is tried by a matcher of another kind."""
    answer: list[int] = []
    ends = model.eos_token_ids
    pieces = [model.tokenizer.decode([token]) for token in range(len(model.tokenizer))]
    while len(answer) < most and not (answer and answer[-1] in ends):
        text = model.tokenizer.decode(answer)
        layout = reference._layout(len(prompt) + len(answer), len(prompt) + len(answer))
        logits = model.forward(torch.tensor([prompt + answer]), layout)[:, -1:]
        for token in range(logits.shape[-1]):
            piece = pieces[token] if token < len(pieces) else ""
            if token in ends:
                allowed = regex.fullmatch(pattern, text)
            else:
                plain = piece and token not in model.tokenizer.all_special_ids
                allowed = plain and regex.fullmatch(pattern, text + piece, partial=True)
            if not allowed:
                logits[..., token] = -torch.inf
        place = torch.tensor([[len(prompt) + len(answer)]])
        answer.append(int(sampler.pick(logits, torch.tensor([0]), place)))
    return answer


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_equals_the_slow_oracle(networks, pattern, temperature) -> None:
    for model in networks.values():
        prompt = model.encode("say")
        found = settings_for(model, mode="ntp", regex=pattern, temperature=temperature, seed=3)
        expected = slowly(model, prompt, pattern, 24, found.sampler)
        for mode in ("ntp", "verified"):
            asked: Any = {"mode": mode, "temperature": temperature, "seed": 3}
            [one] = generate(model, [prompt], regex=pattern, max_new_tokens=24, **asked)
            assert list(one.token_ids) == expected
            assert one.finish_reason in ("eos", "length")
            assert regex.fullmatch(pattern, one.text, partial=one.finish_reason == "length")


@pytest.mark.parametrize("mode", ["ntp", "verified"])
def test_a_grammar_that_is_no_expression(networks, mode) -> None:
    """Brackets may be as deep as the answer is long, and are closed in the end."""
    ended = 0
    for model in networks.values():
        how: Any = {"mode": mode, "temperature": 0.7, "max_new_tokens": 40, "grammar": SUMS}
        for one in generate(model, ["a", "b", "c"] * 4, seed=5, **how):
            if one.finish_reason == "eos":
                ended += 1
                assert regex.fullmatch(SUM, one.text)
            else:
                assert set(one.text) <= set("123456789()+")
        grammar = module.compiled(model, settings_for(model, mode="ntp", grammar=SUMS))
        assert grammar is not None
        ids = model.tokenizer("1+((2+3)+4))", add_special_tokens=False)["input_ids"]
        grammar.say(ids[:-1])
        with pytest.raises(ValueError, match="grammar can't be followed"):
            grammar.say(ids[-1:])
    assert ended >= 4


def test_a_grammar_with_thoughts_before_the_answer(networks) -> None:
    """As the docs have it."""
    model = networks["llama"]
    text = (Path(__file__).parents[1] / "docs" / "lossless.md").read_text(encoding="utf-8")
    [thinking] = re.findall(r"(?s)```lark\n(.*?)```", text)
    grammar = module.compiled(model, settings_for(model, mode="ntp", grammar=thinking))
    assert grammar is not None
    said = "<think>12 or 13?\n12 < 13</think>\n12"
    grammar.say(model.tokenizer(said, add_special_tokens=False)["input_ids"])
    letter, digit, end = [
        *model.tokenizer("a1", add_special_tokens=False)["input_ids"], *model.eos_token_ids
    ]  # fmt: skip
    [bits] = grammar.allowed()
    allowed = np.unpackbits(bits, bitorder="little")
    assert [allowed[token] for token in (letter, digit, end)] == [0, 1, 1]


@given(data=st.data())
@settings(max_examples=40, **SLOW)
def test_verified_says_what_next_token_decoding_says(networks, data) -> None:
    model = networks[data.draw(st.sampled_from(["llama", "qwen3"]))]
    chosen = {**data.draw(options(30)), "ignore_eos": False}
    form: dict[str, Any] = {"regex": data.draw(st.sampled_from(PATTERNS))}
    form = data.draw(st.sampled_from([form, {"json_schema": PERSON}, {"grammar": SUMS}]))
    count = data.draw(st.integers(1, 3))
    texts = [model.encode(text) for text in ("a", "some longer prompt", "b c")[:count]]
    exact, drafted = pair(model, texts, data.draw(st.integers(1, 3)), **form, **chosen)
    assert_lossless(exact, drafted, chosen["draft"] == "branches")


@pytest.mark.parametrize(
    "how", [{}, {"block_size": 16, "seeds": 1}, {"draft": "solver", "solver": "entropy:inf"}]
)
def test_a_trained_model_needs_fewer_forwards(nano, how) -> None:
    texts = [nano.encode(text, chat=True) for text in ("What is 384 + 767?", "Who?")]
    form: Any = {"json_schema": PERSON, "max_new_tokens": 60}
    exact, drafted = pair(nano, texts, None, **form, **how)
    assert_lossless(exact, drafted, False)
    for one in drafted:
        found = json.loads(one.text)
        assert list(found) == ["name", "age", "tags"]
        assert regex.fullmatch("[A-Z][a-z]{1,8}", found["name"])
        assert 1 <= found["age"] <= 120
        assert set(found["tags"]) <= {"a", "b"}
        assert one.nfe < one.num_tokens or "draft" in how  # whose drafts have forwards of their own


def test_what_has_no_alternative_takes_no_forward_of_its_own(networks) -> None:
    """26 tokens, each a byte, and the end: nine a forward with drafts of eight."""
    model, text = networks["llama"], "abcdefghijklmnopqrstuvwxyz"
    how: Any = {"mode": "verified", "block_size": 1, "lookup": 8}
    [one] = generate(model, "a", regex=text, **how)
    assert (one.text, one.nfe, one.finish_reason) == (text, 3, "eos")
    assert one.reveal_step == (1,) * 9 + (2,) * 9 + (3,) * 9
    assert set(one.entropy) == {0.0}
    [alone] = generate(model, "a", regex=text, mode="ntp")
    assert (alone.token_ids, alone.nfe) == (one.token_ids, 27)


def test_drafts_are_fitted(networks) -> None:
    model = networks["llama"]
    ids = model.tokenizer("ab12xyz9", add_special_tokens=False)["input_ids"]
    [end] = model.eos_token_ids
    grammar = module.compiled(model, settings_for(model, regex="ab[0-9]{2}(xyz)?", mode="ntp"))
    assert grammar is not None
    assert grammar.fitted(ids, 3) == (ids[:3], [True, True, False])
    # Behind two figures the answer may end, or go on with x and what has to follow that.
    drafted = [*ids[:7], end], [True, True, False, False, False, True, True, True]
    assert grammar.fitted(ids, 20) == drafted
    assert grammar.fitted([*ids[:4], end, *ids], 20) == (
        [*ids[:4], end],
        [True, True] + [False] * 3,
    )
    assert grammar.fitted([], 20) == (ids[:2], [True, True])
    # Instead of what is not allowed the first of the others in its place that is, never a mask.
    letter, mask = ids[5], model.mask_token_id
    others = [[], [], [mask, letter, ids[3]], [letter], [mask]]
    drafted = [*ids[:2], letter, letter, letter]
    assert grammar.fitted(drafted, 20, others) == ([*ids[:2], ids[3]], [True, True, False])
    others[3], others[4] = [letter, mask, ids[2], end], [ids[4]]
    found = [*ids[:2], ids[3], ids[2], *ids[4:7], end]
    assert grammar.fitted(drafted, 20, others)[0] == found
    assert [len(grammar.allowed(draft)) for draft in ([], ids[:4], ids, [end], ids[1:])] == [
        1, 5, 8, 1, 1,
    ]  # fmt: skip
    other = grammar.copy()
    grammar.say([*ids[:4], end, 7])  # what comes behind the end is no part of the answer
    assert other.fitted([], 1) == ([ids[0]], [True])
    with pytest.raises(ValueError, match="regex can't be followed"):
        other.say([ids[5]])


def told(grammar, draft) -> int:
    """How many places of a draft are looked at."""
    return len(grammar.allowed(draft)) - 1


def test_a_likely_token_that_is_allowed_is_drafted(nano, monkeypatch) -> None:
    """Which takes fewer forwards than to draft nothing where the likeliest is not."""
    texts = [nano.encode(text, chat=True) for text in ("What is 384 + 767?", "Who?", "Sort: 3, 1")]
    found = {}
    for count in (16, 0):
        monkeypatch.setattr(verified, "LIKELY", count)
        exact, drafted = pair(nano, texts, None, json_schema=PERSON, max_new_tokens=60)
        assert_lossless(exact, drafted, False)
        found[count] = sum(one.nfe for one in drafted)
    assert found[16] < found[0]


def test_dead_ends_in_a_draft_are_no_errors(checkpoint, tmp_path) -> None:
    """A vocabulary without the second byte of an e with an accent, whose first may be drafted."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "lacking")
    file = folder / "tokenizer.json"
    tokens = json.loads(file.read_text(encoding="utf-8"))
    first, second = (tokens["model"]["vocab"][letter] for letter in "Ã©")
    del tokens["model"]["vocab"]["©"]
    file.write_text(json.dumps(tokens), encoding="utf-8")
    model = setblock.load(folder, device="cpu")
    letters = model.tokenizer("abcdef", add_special_tokens=False)["input_ids"]
    prompt = [token for letter in letters for token in (letter, first)] * 3
    assert second not in model.tokenizer.get_vocab().values()
    form: dict[str, Any] = {"regex": "[a-f]é|[a-f]x"}
    grammar = module.compiled(model, settings_for(model, mode="ntp", **form))
    assert grammar is not None
    assert [told(grammar, draft) for draft in ([], letters[:1], [letters[0], first])] == [0, 1, 1]

    def outcome(**how: Any) -> Any:
        try:
            return generate(model, [prompt], temperature=1.5, **form, **how)[0].token_ids
        except ValueError as error:
            return str(error)

    exact = [outcome(mode="ntp", seed=seed) for seed in range(30)]
    how: Any = {"mode": "verified", "block_size": 1, "lookup": 4}
    assert exact == [outcome(seed=seed, **how) for seed in range(30)]
    assert "regex can't be followed: no token can come next, as llguidance has it" in exact
    assert any(type(one) is tuple for one in exact)


@pytest.mark.parametrize(
    "how", [{"lookup": 8, "block_size": 1}, {"block_size": 4}, {"draft": "solver"}]
)
@pytest.mark.parametrize("stop", ["a", "b", "c"])
def test_a_dead_end_behind_the_end_is_no_error(networks, how, stop) -> None:
    """That is reached only where the answer has to go on."""
    model = networks["llama"]
    dead = f'start: "abc" <[{model.mask_token_id}]>'
    told: Any = {"grammar": dead, "stop": stop, "max_new_tokens": 9}
    exact, drafted = pair(model, [[65, 66], [67]], None, **told, **how)
    assert [one.text for one in exact] == ["abc".partition(stop)[0]] * 2
    assert [one.token_ids for one in drafted] == [one.token_ids for one in exact]
    with pytest.raises(ValueError, match="grammar can't be followed: no token can come next"):
        generate(model, [[65]], grammar=dead, mode="verified", **how)


@pytest.mark.parametrize("lenience", [1, 0.5])
def test_the_mask_token_is_never_said(checkpoint, lenience) -> None:
    model = setblock.load(checkpoint("llama"), device="cpu")
    [mask] = model.tokenizer("b", add_special_tokens=False)["input_ids"]
    model = setblock.load(checkpoint("llama"), device="cpu", mask_token_id=mask)
    how: Any = {"mode": "verified", "block_size": 4, "lookup": 4, "lenience": lenience}
    with pytest.raises(ValueError, match="regex can't be followed: no token can come next"):
        generate(model, "a", regex="abc", **how)
    for seed in range(5):
        [one] = generate(model, "a", regex="a[bc]c", temperature=1.5, seed=seed, **how)
        assert one.text == "acc"


def test_end_tokens_end_nothing_else(networks) -> None:
    model = copy.copy(networks["llama"])
    model.eos_token_ids |= {*model.tokenizer("x", add_special_tokens=False)["input_ids"]}
    for mode in ("ntp", "verified"):
        [one] = generate(model, "a", regex="(ab|xa){2}c", mode=mode)
        assert one.text.removesuffix("x") == "ababc"


def test_rows_leave_the_batch_with_their_grammar(networks) -> None:
    model = networks["qwen3"]
    texts = ["a", "some longer prompt", "b c", "dd"]
    how: Any = {"regex": PATTERNS[1], "temperature": 1.3, "max_new_tokens": 50}
    for mode in ("ntp", "verified"):
        together = generate(model, texts, mode=mode, **how)
        assert len({one.num_tokens for one in together}) > 1
        for batch_size in (1, 3):
            found = generate(model, texts, mode=mode, batch_size=batch_size, **how)
            assert [one.token_ids for one in found] == [one.token_ids for one in together]


def test_lenience_keeps_the_format(nano) -> None:
    texts = ["What is 384 + 767?", "Sort: 5, 3, 9"]
    how: Any = {"chat": True, "mode": "verified", "lenience": 1e-3, "block_size": 16}
    form = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
    for one in generate(nano, texts, json_schema=form, max_new_tokens=60, **how):
        assert list(json.loads(one.text)) == ["name", "age", "tags"]


def test_the_mode_of_a_format(nano, networks) -> None:
    assert settings_for(nano).mode == "sbd"
    forms: list[Any] = [{"json_schema": PERSON}, {"regex": "a"}, {"grammar": SUMS}]
    for form in forms:
        assert settings_for(nano, **form).mode == "verified"
        assert settings_for(nano, mode="ntp", **form).mode == "ntp"
        assert settings_for(networks["llama"], **form).mode == "ntp"
    kept = settings_for(nano, json_schema={"b": 1, "a": "é"}).json_schema
    assert kept == '{"b": 1, "a": "é"}'
    assert settings_for(nano, json_schema=kept).json_schema == kept
    assert settings_for(nano, json_schema=kept).described["json_schema"] == kept
    assert not settings_for(nano).described.keys() & set(FORMATS)


def test_schemas_that_are_large_or_no_dict(networks) -> None:
    large = {"properties": {f"key{number}": {"type": "string"} for number in range(600)}}
    for schema in ({"type": "object", **large}, MappingProxyType({"type": "integer"})):
        how: Any = {"max_new_tokens": 20, "json_schema": schema}
        exact, drafted = pair(networks["llama"], [[65, 66]], None, **how)
        assert [one.token_ids for one in exact] == [one.token_ids for one in drafted]


def test_a_schema_of_many_references_ends_no_process(networks) -> None:
    """Of which each leads to the next, further than a thread's usual stack goes."""
    names = [f"d{number}" for number in range(4000)]
    defined: dict[str, Any] = {
        one: {"properties": {"a": {"$ref": f"#/$defs/{other}"}}} for one, other in pairwise(names)
    }
    schema = {"$defs": {**defined, names[-1]: {"type": "integer"}}, "$ref": "#/$defs/d0"}
    model = networks["llama"]
    assert module.compiled(model, settings_for(model, json_schema=schema, mode="ntp"))
    schema["$defs"][names[-1]] = {"const": "a" * 10**5}
    with pytest.raises(
        ValueError, match=r"json_schema must have at most 250,000 characters, got 3"
    ):
        generate(model, "a", json_schema=schema)


def test_white_space_is_the_schema_s_or_bounded(networks) -> None:
    model = networks["llama"]
    schema = {"type": "array", "items": {"type": "integer"}}
    for guidance, text, fits in (
        ({}, "[1, 2,\n    3]", True),
        ({}, "[1,  2]", False),
        ({}, "[1,\n\n2]", False),
        ({"whitespace_flexible": False}, "[1,2]", True),
        ({"whitespace_flexible": False}, "[1, 2]", False),
    ):
        form: Any = {**schema, "x-guidance": guidance} if guidance else schema
        grammar = module.compiled(model, settings_for(model, json_schema=form, mode="ntp"))
        assert grammar is not None
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (grammar.fitted(ids, len(ids))[0] == ids) == fits


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex exclude each other"),
        ({"json_schema": {}, "mode": "sbd"}, "json_schema is for modes ntp and verified"),
        (
            {"regex": "a", "mode": "sbd"},
            "regex is for modes ntp and verified, .*, got 'a' in mode sbd",
        ),
        ({"regex": "a", "ignore_eos": True}, "regex can't be used with ignore_eos"),
        ({"regex": 3}, "regex must be a text, got 3"),
        ({"grammar": 3}, "grammar must be a text, got 3"),
        ({"grammar": "start: a", "regex": "a"}, "regex and grammar exclude each other: give one"),
        ({"grammar": "start: a"}, 'grammar can\'t be used: unknown name: "a"'),
        ({"grammar": "a: b"}, "grammar can't be used: "),
        (
            {"grammar": 'start: a\n  a[max_tokens=3] : "b"'},
            r"grammar can't be used: attributes of rules are not supported, got a\[max_tokens=3\]",
        ),
        ({"grammar": "start: " + "(" * 10**5}, "grammar can't be used: .*too deeply nested"),
        ({"grammar": "/" * 250_001}, "grammar must have at most 250,000 characters, got 250,001"),
        ({"json_schema": 3}, "json_schema must be an object or its JSON text, got 3"),
        ({"json_schema": "[]"}, r"json_schema must be an object or its JSON text, got '\[\]'"),
        ({"json_schema": "{"}, "json_schema must be JSON: "),
        ({"json_schema": {"a": {1}}}, "json_schema must be JSON: .*set"),
        ({"json_schema": {"const": math.nan}}, "json_schema must be JSON: Out of range"),
        ({"json_schema": '{"const": NaN}'}, "json_schema must be JSON: NaN is no JSON"),
        (
            {"json_schema": {"x-guidance": [1]}},
            r"can't be used: x-guidance must be an object",
        ),
        ({"json_schema": {"type": "foo\nbar"}}, "can't be used: Invalid type: foo bar$"),
        ({"json_schema": {"type": "foo"}}, "json_schema can't be used: Invalid type: foo"),
        ({"json_schema": {"not": {}}}, r'json_schema can\'t be used: Unimplemented keys: \["not"'),
        ({"json_schema": '{"a": ' + "[" * 300 + "]" * 300 + "}"}, "can't be used: recursion"),
        ({"json_schema": '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}"}, "json_schema must be JSON"),
        ({"regex": "a(b"}, "regex can't be used: unclosed group$"),
        ({"regex": "(?=a)b"}, "regex can't be used: look-around, .* not supported"),
        ({"regex": r"[^\s\S]"}, "regex can't be followed: no token can come next, as llg"),
        (
            {"regex": "a", "solver": "fixed:2"},
            "solver is for mode sbd, in which regex can't be used",
        ),
    ],
)
def test_refusals(nano, monkeypatch, asked, message) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run it
    monkeypatch.setattr(nano, "forward", None)  # none of them before the first forward
    with pytest.raises(ValueError, match=message):
        generate(nano, "a", **asked)


def test_what_a_grammar_needs(networks, monkeypatch) -> None:
    endless = copy.copy(networks["llama"])
    endless.eos_token_ids = frozenset()
    with pytest.raises(ValueError, match=r"regex needs an end-of-text token, and .* has none"):
        generate(endless, "a", regex="a")
    other = copy.copy(networks["llama"])
    other.tokenizer = Slow()
    with pytest.raises(ValueError, match=r"regex can't be used with the tokenizer of .*: Only f"):
        module.compiled(other, settings_for(other, regex="a", mode="ntp"))
    monkeypatch.setattr(module, "version", lambda name: "1.7.6")
    with pytest.raises(ImportError, match=r"regex needs llguidance 1\.8 or newer, got 1\.7\.6"):
        generate(networks["llama"], "a", regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"json_schema needs llguidance: pip install '\.\[struct"):
        generate(networks["llama"], "a", json_schema={})
    with pytest.raises(ImportError, match=r"a schema needs llguidance: pip install '\.\[struct"):
        module.check_schema({})
