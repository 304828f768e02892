"""Prompts in, text out: options, ends, stop texts, streams and what a result says of itself."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from conftest import LONGROPE, copied
from fakes import BOS, EOS, LETTERS, MASK, TableModel, saying
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from setblock import generation
from setblock.checkpoint import ModelError
from setblock.decode import Settings
from setblock.generation import (
    Reveal,
    encode,
    ending_at,
    generate,
    settings_for,
    stream,
)
from setblock.loading import load
from setblock.model import Model, _byte_ids
from setblock.roofline import Spending
from setblock.sampling import Sampler
from setblock.solvers import EntropyBound, FixedCount, entropy

MODES = ["sbd", "ntp"]


class WordModel(TableModel):
    """A token is several letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join({3: "one. two. ", 4: "three"}.get(token, "") for token in ids)


def test_seconds_are_not_those_of_the_caller(monkeypatch):
    """The clock moves by a second in each forward, and by an hour between two events."""
    now = 0.0
    step = generation.DecodeState.step

    def timed(self: generation.DecodeState) -> Any:
        nonlocal now
        now += 1
        return step(self)

    monkeypatch.setattr(generation.time, "perf_counter", lambda: now)
    monkeypatch.setattr(generation.DecodeState, "step", timed)
    ended = []
    options: Any = {"mode": "ntp", "max_new_tokens": 6, "ignore_eos": True}
    for reveal in stream(TableModel.random(), [[5, 6], [7]], **options):
        now += 3600
        if reveal.generation is not None:
            ended.append(reveal.generation)
    assert [(one.prefill_s, one.decode_s) for one in ended] == [(1, 5)] * 2


# ------------------------------------------------------------------ options


def test_defaults_come_from_the_checkpoint():
    model = TableModel.random()
    expected = Settings("sbd", EntropyBound(0.1), 16, 256, Sampler(), (), False)
    assert settings_for(model) == expected
    model.defaults = {"mode": "ntp", "solver": "fixed:2", "block_size": 5}
    assert settings_for(model) == dataclasses.replace(
        expected, mode="ntp", solver=FixedCount(2), block_size=5
    )
    assert settings_for(model, mode="sbd", block_size=3, solver=None) == dataclasses.replace(
        expected, solver=FixedCount(2), block_size=3
    )


def test_copies_that_only_the_checkpoint_asks_for_are_left_out_where_they_do_not_pay():
    model = TableModel.random()
    model.drafting = {"lookup": 8}
    found = [settings_for(model, rows, mode="verified").lookup for rows in (1, 3, 4)]
    assert found == [8, 8, 0]
    assert settings_for(model, 4, mode="verified", lookup=5).lookup == 5, "asked for"
    model.drafting = {"lookup": 8, "block_size": 4}
    assert settings_for(model, 4, mode="verified").lookup == 8, "the clock chose it"


@pytest.mark.parametrize("asked", [{"lookup": 2}, {"lenience": 0.5}, {"draft": "branches"}])
def test_what_arithmetic_may_not_choose(asked, monkeypatch):
    """Copies have no form of two forwards; lenience needs drafts."""
    held = {}

    def seen(self, size, rows, **fixed):
        held.update(fixed)
        return Spending(4, 1, 0, 1.0, 1.0)

    monkeypatch.setattr(TableModel, "best_spending", seen)
    settings_for(TableModel.random(), mode="verified", **asked)
    assert held["pairs"] == ("lookup" not in asked)
    assert held["one_forward"] == ("lookup" not in asked)
    model = TableModel.random()
    model.drafting = {"lookup": 8}
    settings_for(model, 4, mode="verified")
    assert not held["pairs"], "nor where the checkpoint's copies are left out"


def test_every_option_arrives():
    solver = EntropyBound(0.3, "margin")
    run = settings_for(
        TableModel.random(), mode="ntp", solver=solver, block_size=7, max_new_tokens=9,
        temperature=0.5, top_p=0.9, top_k=4, seed=8, stop=["a", "bc"], ignore_eos=True,
    )  # fmt: skip
    sampler = Sampler(temperature=0.5, top_p=0.9, top_k=4, seed=8)
    assert run == Settings("ntp", solver, 7, 9, sampler, ("a", "bc"), True)
    assert settings_for(TableModel.random(), stop="ab").stop == ("ab",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, r"mode must be one of sbd, ntp, verified, got 'fast'"),
        ({"stop": "d\ufffd"}, "stop text .* holds U.FFFD, which stands for half a"),
        ({"solver": "entropy"}, r"solver must be one of entropy:GAMMA, .*; got 'entropy'"),
        ({"solver": "entropy:-1"}, r"solver must be .* \(gamma must be a number from 0 to inf"),
        ({"block_size": 0}, r"block_size must be an integer of at least 1, got 0"),
        ({"block_size": True}, r"block_size must be an integer of at least 1, got True"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": -5}, r"max_new_tokens must be an integer of at least 1, got -5"),
        (
            {"temperature": -1.0},
            r"temperature must be 0, which is greedy, or lie in .*1e6, got -1.0",
        ),
        (
            {"temperature": math.nan},
            r"temperature must be 0, which is greedy, or lie in .*1e6, got nan",
        ),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\], got 0.0"),
        ({"top_k": -1}, r"top_k must be an integer >= 0 \(0 keeps every token\), got -1"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\*\*63\), got -1"),
        ({"stop": ""}, r"stop must be texts, none of them empty, got \('',\)"),
        ({"stop": ["a", ""]}, r"stop must be texts, none of them empty, got \('a', ''\)"),
        ({"stop": ["a", "b<eos>"]}, r"stop text 'b<eos>' holds the special token '<eos>', which "),
    ],
)
def test_options_out_of_range(options, message):
    model = TableModel.random()
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(model, "a", **options)
    # A stream refuses at once, not when it is first asked for a token.
    with pytest.raises(ValueError, match=f"^{message}"):
        stream(model, "a", **options)
    assert not model.forwards


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"solver": 0.3}, "solver must be a solver or its text, got 0.3"),
        ({"block_size": 2.0}, "block_size must be an integer of at least 1, got 2.0"),
        ({"max_new_tokens": "9"}, "max_new_tokens must be an integer of at least 1, got '9'"),
        ({"stop": (1,)}, r"stop must be texts, none of them empty, got \(1,\)"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"next_token_seed": 1}, "next_token_seed must be True or False, got 1"),
        ({"slide": 1}, "slide must be True or False, got 1"),
        (
            {"slide": True, "fallback": 1.5},
            "fallback is for whole blocks, which blocks that slide never are, got 1.5 with slide",
        ),
    ],
)
def test_settings_of_a_wrong_type(fields, message):
    # Set past the runtime type check of the test run, which would speak first.
    run = Settings("sbd", EntropyBound(0.1), 16)
    for name, value in fields.items():
        object.__setattr__(run, name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        run.__post_init__()


def test_unknown_options():
    options: dict[str, Any] = {"gama": 0.3, "n": 2}
    with pytest.raises(TypeError, match=r"^unknown options \['gama', 'n'\]; known: \['block_size'"):
        generate(TableModel.random(), "a", **options)


@pytest.mark.parametrize("batch_size", [0, -3, True])
def test_batch_size_out_of_range(batch_size):
    message = f"^batch_size must be an integer of at least 1, got {batch_size}"
    with pytest.raises(ValueError, match=message):
        generate(TableModel.random(), [[3]], batch_size=batch_size, max_new_tokens=3)


def test_a_batch_larger_than_the_input():
    model = TableModel.random()
    assert len(generate(model, [[3], [4]], batch_size=50, max_new_tokens=3)) == 2


# ------------------------------------------------------------------ prompts


def test_forms_of_a_prompt():
    model = TableModel.random(vocab_size=31)
    run: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    ids = [[BOS, 3, 4], [BOS, 5]]
    expected = [result.token_ids for result in generate(model, ids, **run)]
    assert [result.token_ids for result in generate(model, ["ab", "c"], **run)] == expected
    assert [result.token_ids for result in generate(model, "ab", **run)] == expected[:1]
    assert [result.prompt_tokens for result in generate(model, ids, **run)] == [3, 2]
    assert generate(model, [], **run) == []
    assert encode(model, tuple(map(tuple, ids))) == ids


def test_an_empty_prompt(checkpoint):
    with_bos, without = load(checkpoint("llama")), load(checkpoint("llama", bos=False))
    (result,) = generate(with_bos, "", max_new_tokens=2)
    assert result.prompt_tokens == 1
    (same,) = generate(with_bos, [[with_bos.bos_token_id]], max_new_tokens=2)  # type: ignore[list-item]
    assert result.token_ids == same.token_ids
    with pytest.raises(ModelError, match="an empty prompt needs a BOS token"):
        generate(without, "", max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt 1 is empty: decoding needs at least one token"):
        generate(with_bos, [[1], []], max_new_tokens=2)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_of_one_token(mode):
    model = TableModel.spelling("abc", start=1)
    (result,) = generate(model, [[BOS]], mode=mode, max_new_tokens=9)
    assert result.text == "abc"
    assert result.prompt_tokens == result.prefill_forwards == 1


@pytest.mark.parametrize("token", [-1, 12])
def test_a_prompt_of_tokens_that_do_not_exist(token):
    model = TableModel.random()
    with pytest.raises(ValueError, match=r"prompt 1 holds a token id outside 0\.\.11"):
        generate(model, [[3], [3, token]], max_new_tokens=2)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_leaves_too_little_room(mode):
    model = TableModel.random(context_length=40)
    run: dict[str, Any] = {"mode": mode, "block_size": 4, "max_new_tokens": 8, "ignore_eos": True}
    message = "^prompt 1 has 33 tokens; with max_new_tokens=8 it exceeds the model's context of 40 "
    message += "tokens"
    most = 4 if mode == "sbd" else 7  # whole blocks
    with pytest.raises(ValueError, match=f"{message}: at most {most} new ones fit behind it$"):
        generate(model, [[3], [3] * 33], **run)
    with pytest.raises(ValueError, match=r"of 40 tokens$"):  # fewer would not help
        generate(model, [[3] * 40], **run)
    assert not model.forwards, "refused before any forward"
    (result,) = generate(model, [[3] * 32], **run)
    assert result.num_tokens == 8
    run["max_new_tokens"] = most
    (result,) = generate(model, [[3] * 33], **run)
    assert result.num_tokens == most


def test_a_last_block_that_sticks_out_of_the_context():
    """Its slots past the limit are part of the input: networks may have no position for them."""
    model = TableModel.random(context_length=40)
    run: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    message = (
        r"^prompt 0 has 30 tokens; with max_new_tokens=9 \(12 in whole blocks of 4\) it exceeds"
    )
    with pytest.raises(ValueError, match=message):
        generate(model, [[3] * 30], block_size=4, **run)
    assert generate(model, [[3] * 28], block_size=4, **run)[0].num_tokens == 9
    assert generate(model, [[3] * 31], mode="ntp", block_size=4, **run)[0].num_tokens == 9


def test_a_model_in_a_mode_that_it_is_not_made_for_says_so_once(checkpoint, caplog):
    run: dict[str, Any] = {"max_new_tokens": 4, "block_size": 4}
    for mode, expect in (("sbd", "poor text"), ("verified", "no speed-up but from copies")):
        model = load(checkpoint("llama"))
        for _ in range(2):
            generate(model, "a", mode=mode, **run)
        [said] = caplog.messages
        assert said.startswith(f"{model.name} was never trained for set block decoding; expect")
        assert expect in said
        caplog.clear()
    model, trained = (
        load(checkpoint("llama")),
        load(checkpoint("llama", settings={"trained": True})),
    )
    copies: dict[str, Any] = {**run, "mode": "verified", "lookup": 4, "block_size": 1}
    for one in (model, trained):
        generate(one, "a", mode="ntp", **run)
        generate(one, "a", **copies)
    for mode in ("sbd", "verified"):
        generate(trained, "a", mode=mode, **run)
    assert not caplog.messages
    copies["block_size"] = 4
    generate(model, "a", **copies)
    assert len(caplog.messages) == 1, "copies alone need no training"


def test_embeddings_that_change_with_the_length_end_texts_where_they_would(checkpoint, tmp_path):
    """Else keys would be of two kinds, and a row's tokens depend on how long its neighbours are."""
    folder = copied(checkpoint("llama"), tmp_path / "a", "config.json", rope_parameters=LONGROPE)
    model = load(folder)
    assert (model.context_length, model.network.config.max_position_embeddings) == (32, 256)
    few: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 24}
    with pytest.raises(ValueError, match="context of 32 tokens, beyond which its longrope embed"):
        generate(model, [[3] * 26], **few)
    with pytest.raises(ValueError, match=r"no room .* of 32 tokens, beyond which its longrope"):
        generate(model, [[3] * 33], **few)
    prompts = [[3, 9, 8], [*range(3, 11)], [*range(3, 31)]]
    few["max_new_tokens"] = 4
    several = [answer.token_ids for answer in generate(model, prompts, mode="ntp", **few)]
    drafted = generate(model, prompts, mode="verified", block_size=8, branches=8, seeds=1, **few)
    assert [answer.token_ids for answer in drafted] == several
    for prompt, ids in zip(prompts, several, strict=True):
        assert generate(model, [prompt], mode="ntp", **few)[0].token_ids == ids
    theirs = model.network.generate(
        torch.tensor(prompts[2:]), attention_mask=torch.ones(1, 28, dtype=torch.long),
        do_sample=False, max_new_tokens=4, min_new_tokens=4,
        suppress_tokens=[model.mask_token_id], pad_token_id=0,
    )  # fmt: skip
    assert tuple(theirs[0, 28:].tolist()) == several[2]


def test_chat(checkpoint):
    model = load(checkpoint("llama"))
    text = "<user>hi</s><model>"
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode(model, "hi", chat=True) == [ids]
    (chat,) = generate(model, "hi", chat=True, max_new_tokens=3)
    assert chat.prompt_tokens == len(ids)
    with pytest.raises(ValueError, match="chat=True needs text prompts"):
        generate(model, [[1, 2]], chat=True)
    with pytest.raises(ModelError, match="has no chat template"):
        generate(TableModel(torch.zeros(9, 9, 9), torch.zeros(9, 9), chat=False), "a", chat=True)


def test_conversations_go_through_the_chat_template(checkpoint):
    model = load(checkpoint("llama"))
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why"},
    ]
    model.tokenizer.chat_template = (
        "{% for turn in messages %}{{ turn.role }}:{{ turn.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<model>{% endif %}"
    )
    text = "system:be brief</s>user:hi</s>assistant:yes</s>user:why</s><model>"
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode(model, talk) == [ids]  # by itself, as a text is
    assert encode(model, [talk, "hi", [3, 4]]) == [ids, model.encode("hi"), [3, 4]]
    assert encode(model, tuple(talk), chat=True) == [ids]
    assert encode(model, talk[1:2]) == encode(model, "hi", chat=True)
    (answer,) = generate(model, talk, max_new_tokens=3)
    assert answer.prompt_tokens == len(ids)


def test_the_model_goes_on_with_a_last_message_of_its_own(checkpoint):
    model = load(checkpoint("llama"))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, "}]
    text = "<user>hi</s><user>yes, "  # the test checkpoints' template knows no roles
    assert encode(model, talk) == [model.tokenizer(text, add_special_tokens=False)["input_ids"]]
    for blank in ("", " \n"):  # where a template trims, a cue would be cut short
        talk[1]["content"] = blank
        assert model.in_template(talk) == model.in_template(talk[:1]) == "<user>hi</s><model>"
    model.tokenizer.chat_template = "{{ messages[0].content }}"
    lost = r"refuses the messages: .*the final message does not app[^:]*compatible\.$"
    with pytest.raises(ModelError, match=lost):  # without all of the messages
        model.in_template([talk[0], {"role": "assistant", "content": "lost"}])


def test_blocks_of_a_model_never_trained_for_them_only_if_asked_for(checkpoint):
    model = load(checkpoint("llama"))
    assert settings_for(model).mode == "ntp"
    asked: list[dict[str, Any]] = [
        {"solver": "fixed:2"}, {"block_size": 4}, {"next_token_seed": True}, {"fallback": 1.0},
        {"slide": True},
    ]  # fmt: skip
    for option in asked:
        assert settings_for(model, **option).mode == "sbd"
        assert settings_for(model, mode="ntp", block_size=4).mode == "ntp"
    twin = load(checkpoint("llama", settings={"mode": "ntp"}))
    with pytest.raises(
        ValueError, match=r"block_size is for decoding in blocks, and .* mode ntp un"
    ):
        settings_for(twin, block_size=4)  # it says itself that it has none
    assert settings_for(twin, mode="sbd", block_size=4).mode == "sbd"
    assert "mode" not in {name for name, value in model.settings.items() if value is not None}
    assert (twin.settings["mode"], model.settings["mode"]) == ("ntp", None)


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ([{"role": "user"}], r"prompt 0: message 0 must have a role and a content, both text, and"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 5}], "prompt 0: message 1"),
        ([{"role": "user", "content": "a", "name": "b"}], r"nothing else, got \{'role': 'user', "),
        (["a", [{"role": "user", "content": "a"}, 5]], "prompt 1 must be a text, a list of messa"),
        ([{"role": "User", "content": "a"}], "message 0 has the role 'User', which is none of sys"),
        (["a", 5], "prompt 1 must be a text, a list of messages or a list of token ids, got 5"),
        (["a", None], "prompt 1 must be a text, .* or a list of token ids, got None"),
        ([5, 6], "got 5; one prompt of ids goes in a list too"),
        (5, "prompts must be texts, or lists of messages or of ids, got 5"),
        ({"role": "user", "content": "a"}, "prompts must be texts, or lists of messages or of"),
    ],
)
def test_what_is_no_conversation_is_refused(checkpoint, talk, message):
    with pytest.raises(ValueError, match=message):
        unchecked(encode)(load(checkpoint("llama")), talk)


def test_half_of_a_surrogate_pair_is_no_text(checkpoint):
    model = load(checkpoint("llama"), device="cpu")
    with pytest.raises(ModelError, match=r"Unicode text, got the lone surrogate '\\ud800'"):
        encode(model, "a\ud800b")
    model.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ModelError, match=r"prompt 1: .*lone surrogate '\\udfff'"):
        encode(model, ["a", [{"role": "user", "content": "\udfff"}]])


def unchecked(function: Any) -> Any:
    """Without the tests' type checks, as users call it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def test_a_template_may_refuse_a_conversation(checkpoint):
    model = load(checkpoint("llama"))
    model.tokenizer.chat_template = "{{ raise_exception('no system\nhere') }}"
    message = "prompt 0: the chat template of .* refuses the messages: no system here"
    with pytest.raises(ModelError, match=message):
        generate(model, [{"role": "system", "content": "a"}])


# ------------------------------------------------------------------ ends


@pytest.mark.parametrize("mode", MODES)
def test_finish_reasons(mode):
    model = TableModel.spelling("hello world. bye.", start=1)
    run: dict[str, Any] = {"mode": mode, "block_size": 7, "max_new_tokens": 30}
    full, cut, short, past = (
        generate(model, [[BOS]], **dict(run, **options))[0]
        for options in (
            {},
            {"stop": [". ", "x"]},
            {"max_new_tokens": 5},
            {"ignore_eos": True, "max_new_tokens": 20},
        )
    )
    assert (full.finish_reason, full.text) == ("eos", "hello world. bye.")
    assert full.token_ids[-1] == EOS
    assert full.num_tokens == 18
    assert (cut.finish_reason, cut.text) == ("stop", "hello world")
    assert model.decode(list(cut.token_ids)) == "hello world. "
    assert (short.finish_reason, short.text, short.num_tokens) == ("length", "hello", 5)
    assert (past.finish_reason, past.text) == ("length", "hello world. bye.")
    assert past.token_ids[-3:] == (EOS, EOS, EOS)


@pytest.mark.parametrize("mode", MODES)
def test_which_end_comes_first(mode):
    model = TableModel.spelling("abcd", start=1)

    def end(**options) -> tuple[str, str, int]:
        options = {"max_new_tokens": 20, **options}
        (result,) = generate(model, [[BOS]], mode=mode, block_size=8, **options)
        return result.finish_reason, result.text, result.num_tokens

    assert end(stop="d") == ("stop", "abc", 4)
    assert end(stop="cd", max_new_tokens=4) == ("stop", "ab", 4)
    assert end(stop="cd", max_new_tokens=3) == ("length", "abc", 3)
    assert end(max_new_tokens=5) == ("eos", "abcd", 5)
    assert end(stop=["bcd", "bc"]) == ("stop", "a", 3)
    assert end(stop=["c", "abc"]) == ("stop", "", 3)
    assert end(stop="a") == ("stop", "", 1)
    assert end(stop="dx") == ("eos", "abcd", 5)


@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_holds_the_stop_text_twice(mode):
    model = saying([4, 3, 4], model_class=WordModel)
    (result,) = generate(model, [[BOS]], mode=mode, stop=". ", max_new_tokens=9)
    assert (result.text, result.token_ids) == ("threeone", (4, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", [EOS, 9, 14])
def test_each_of_several_eos_tokens_ends_a_row(mode, end):
    model = saying([3, 4, end, 5])
    model.eos_token_ids = frozenset([EOS, 9, 14])
    (result,) = generate(model, [[BOS]], mode=mode, max_new_tokens=9)
    assert (result.token_ids, result.finish_reason) == ((3, 4, end), "eos")


@settings(deadline=None, max_examples=30)
@given(
    answer=st.lists(st.integers(3, 5), min_size=1, max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    block_size=st.integers(1, 9),
    limit=st.integers(1, 25),
)
def test_equal_tokens_end_alike_in_both_modes(answer, stop, block_size, limit):
    model = saying(answer)
    sbd, ntp = (
        generate(model, [[BOS]], mode=mode, stop=stop, block_size=block_size, max_new_tokens=limit)[
            0
        ]
        for mode in MODES
    )
    for field in ("token_ids", "text", "finish_reason"):
        assert getattr(sbd, field) == getattr(ntp, field)
    assert sbd.nfe <= ntp.nfe == ntp.num_tokens


# ------------------------------------------------------------------ streams


def watch(model, prompts, **options) -> dict[int, list[Reveal]]:
    """Each row's reveals, in their order."""
    rows: dict[int, list[Reveal]] = {}
    for reveal in stream(model, prompts, **options):
        rows.setdefault(reveal.row, []).append(reveal)
    return rows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 2, None])
@pytest.mark.parametrize("stop", [(), ("ab", "ccc", "e")])
def test_a_stream_tells_everything_once(mode, batch_size, stop):
    model = TableModel.random(seed=7)
    prompts = [[3 + i] * (1 + i % 3) for i in range(5)]
    run: dict[str, Any] = {
        "mode": mode,
        "solver": "entropy:0.5",
        "block_size": 6,
        "max_new_tokens": 20,
    }
    run |= {"stop": stop, "temperature": 0.7, "seed": 1}
    results = generate(model, prompts, **run)
    rows = watch(model, prompts, batch_size=batch_size, **run)
    assert sorted(rows) == list(range(5))
    for row, reveals in rows.items():
        *earlier, last = reveals
        assert not any(reveal.generation for reveal in earlier)
        assert last.generation is not None
        for field in ("text", "token_ids", "finish_reason", "nfe", "reveal_step", "entropy"):
            assert getattr(last.generation, field) == getattr(results[row], field)
        assert "".join(reveal.text for reveal in reveals) == last.generation.text
        # Every forward of the row brought something.
        assert [reveal.nfe for reveal in reveals] == list(range(1, last.generation.nfe + 1))
        drafts = [(offset, token, r.nfe) for r in reveals for offset, token in r.drafts]
        assert len({offset for offset, _, _ in drafts}) == len(drafts)
        kept = sorted(draft for draft in drafts if draft[0] < last.generation.num_tokens)
        steps = zip(last.generation.token_ids, last.generation.reveal_step, strict=True)
        assert kept == [(offset, token, step) for offset, (token, step) in enumerate(steps)]


def test_text_is_handed_out_as_soon_as_it_is_sure():
    # "b" may start the stop text; after "bx" it does not.
    model = saying([3 + LETTERS.index(letter) for letter in "abxabcab"])
    reveals = watch(model, [[BOS]], mode="ntp", stop=["bcd", "xx"], max_new_tokens=20)[0]
    assert [reveal.text for reveal in reveals] == ["a", "", "b", "xa", "", "", "bca", "", "b"]
    assert reveals[-1].generation is not None
    assert reveals[-1].generation.text == "abxabcab"


def test_special_tokens_that_the_tokenizer_has_no_name_for(checkpoint) -> None:
    """decode() leaves them out like the others: none can be part of a text, all can end one."""
    plain = load(checkpoint("llama"), device="cpu")
    plain.tokenizer.add_tokens([AddedToken("<|call|>", special=True), AddedToken("<|seen|>")])
    model = Model(plain.network, plain.tokenizer)
    call: Any = model.tokenizer.convert_tokens_to_ids("<|call|>")
    assert call not in model.tokenizer.all_special_ids
    assert model.decode([call]) == ""
    assert model.special_token_ids == plain.special_token_ids | {call}
    assert set(model.special_tokens) == {*plain.special_tokens, "<|call|>"}
    with pytest.raises(ValueError, match=r"holds the special token '<\|call\|>'"):
        generate(model, [[5]], mode="ntp", stop="<|call|>")
    mask = str(model.tokenizer.convert_ids_to_tokens(model.mask_token_id))
    ending, stop = ending_at(model, ["<|call|>", "x", mask])
    assert ending.eos_token_ids == model.eos_token_ids | {call}
    assert stop == ["x"] + [mask] * (mask not in model.special_tokens)
    assert model.eos_token_ids == plain.eos_token_ids


def test_bytes_of_a_vocabulary(checkpoint) -> None:
    tokenizer = load(checkpoint("llama"), device="cpu").tokenizer
    assert _byte_ids(tokenizer) == frozenset()
    tokenizer.add_tokens(["<0x0A>", "<0xF0>", "<0xZZ>"])
    expected: Any = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xF0>"])
    assert _byte_ids(tokenizer) == set(expected)


# ------------------------------------------------------------------ results


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_results_come_in_the_order_of_the_prompts(batch_size):
    model = TableModel.random(seed=2)
    lengths = [5, 1, 9, 3, 1, 7]
    prompts = [[3 + i] * length for i, length in enumerate(lengths)]
    results = generate(model, prompts, batch_size=batch_size, max_new_tokens=6, ignore_eos=True)
    assert [result.prompt_tokens for result in results] == lengths
    alone = [generate(model, [p], max_new_tokens=6, ignore_eos=True)[0] for p in prompts]
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop", [(), ("a", "cc")])
def test_numbers_of_a_result(mode, stop):
    model = TableModel.random(seed=8)
    prompts = [[4], [3, 5], [7, 6, 8]]
    run = settings_for(
        model, mode=mode, solver="entropy:0.6", block_size=5, max_new_tokens=22,
        temperature=1.0, top_k=5, stop=stop,
    )  # fmt: skip
    results = generate(
        model, prompts, mode=mode, solver="entropy:0.6", block_size=5, max_new_tokens=22,
        temperature=1.0, top_k=5, stop=stop,
    )  # fmt: skip
    for prompt, result in zip(prompts, results, strict=True):
        assert result.settings == run
        assert result.num_tokens == len(result.token_ids) == len(result.reveal_step)
        assert result.num_tokens == len(result.entropy)
        assert result.nfe == max(result.reveal_step)
        assert set(result.reveal_step) <= set(range(1, result.nfe + 1))
        assert result.tokens_per_forward == result.num_tokens / result.nfe
        assert result.prefill_forwards == 1
        assert result.wall_s == result.prefill_s + result.decode_s
        assert result.prefill_s > 0
        assert result.decode_s >= 0
        assert MASK not in result.token_ids
        if mode == "ntp":
            assert result.tokens_per_forward == 1
            assert result.reveal_step == tuple(range(1, result.num_tokens + 1))
        # The model's own entropy: neither temperature nor top-k changes it.
        text = [*prompt, *result.token_ids]
        for i, nats in enumerate(result.entropy, start=len(prompt)):
            table = model.noisy[i] if mode == "sbd" else model.next_token[i - 1, text[i - 1]]
            logits = table.clone()
            logits[MASK] = -torch.inf
            assert nats == pytest.approx(float(entropy(logits[None, None])), abs=1e-6)


@given(st.sets(st.integers(0, 11), min_size=1))
def test_rows_that_leave_are_filled_up_from_the_end(going):
    slots = sorted(going)
    found = generation._closed_up(slots)
    assert sorted(found) == slots
    moved = [slot for place, slot in enumerate(found) if place != slot]
    assert len(moved) == sum(slot >= len(slots) for slot in slots), "no more than must"
