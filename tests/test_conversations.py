"""Prompts of every form: token ids, texts, conversations, and what is refused."""

from typing import Any

import pytest
import torch
from fakes import BOS, TableModel

from setblock.generation import encode, generate, settings_for
from setblock.loading import load
from setblock.names import ModelError


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


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
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


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
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
