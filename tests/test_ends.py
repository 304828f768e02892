"""Where an answer ends, and how it is handed out as it grows."""

from typing import Any

import pytest
from fakes import BOS, EOS, LETTERS, TableModel, saying
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from setblock.generation import ending_at, generate, stream
from setblock.loading import load
from setblock.model import Model, _byte_ids
from setblock.results import Reveal


class WordModel(TableModel):
    """A token is several letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join({3: "one. two. ", 4: "three"}.get(token, "") for token in ids)


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
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


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
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


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
def test_a_token_that_holds_the_stop_text_twice(mode):
    model = saying([4, 3, 4], model_class=WordModel)
    (result,) = generate(model, [[BOS]], mode=mode, stop=". ", max_new_tokens=9)
    assert (result.text, result.token_ids) == ("threeone", (4, 3))


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
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
        for mode in ("sbd", "ntp")
    )
    for field in ("token_ids", "text", "finish_reason"):
        assert getattr(sbd, field) == getattr(ntp, field)
    assert sbd.nfe <= ntp.nfe == ntp.num_tokens


def watch(model, prompts, **options) -> dict[int, list[Reveal]]:
    """Each row's reveals, in their order."""
    rows: dict[int, list[Reveal]] = {}
    for reveal in stream(model, prompts, **options):
        rows.setdefault(reveal.row, []).append(reveal)
    return rows


@pytest.mark.parametrize("mode", ["sbd", "ntp"])
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
