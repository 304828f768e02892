"""What a request to the vLLM plugin may ask of its drafts, and the copies among them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from setblock import branches
from setblock.vllm.copies import looked_up
from setblock.vllm.requests import cuts, decoding_of, mask_of

CANVAS = 8
FUSED = {"fused": True, "mode": "verified", "verified": {"lookup": 5}}
SLIDING = {"mode": "sbd", "slide": True, "solver": "prefix:0.9"}


def params(**extra: Any) -> Any:
    """Sampling parameters of vLLM's that ask for nothing but these."""
    return SimpleNamespace(
        extra_args=extra, temperature=0.0, top_p=1.0, top_k=0, seed=None, ignore_eos=False,
        all_stop_token_ids={2}, stop_token_ids=[], n=1, min_p=0.0, min_tokens=0, logit_bias=None,
        bad_words=None, allowed_token_ids=None, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, logprobs=None, prompt_logprobs=None, logprob_token_ids=None,
        structured_outputs=None, repetition_detection=None, bad_words_token_ids=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "defaults", "branches", "size", "lookup"),
    [
        ({}, FUSED, True, 8, 5),
        ({}, {**FUSED, "adaptive": "all"}, True, 8, 5),
        ({}, {**FUSED, "verified": {}}, True, 8, 0),
        ({}, {**FUSED, "verified": {"block_size": 3, "lookup": 5}}, True, 3, 5),
        ({}, {**FUSED, "verified": {"block_size": 99}}, True, 8, 0),
        ({}, {**FUSED, "verified": {"block_size": 1, "lookup": 9}}, True, 1, 7),
        ({"block_size": 4}, FUSED, True, 4, 5),
        ({"block_size": 1}, FUSED, True, 1, 5),
        ({"draft": "branches", "lookup": 0}, FUSED, True, 8, 0),
        ({"lookup": 7}, FUSED, True, 8, 7),
        ({"draft": "solver"}, FUSED, False, 8, 0),
        ({"solver": "entropy:inf"}, FUSED, False, 8, 0),
        ({"mode": "sbd"}, FUSED, False, 8, 0),
        ({"mode": "sbd", "slide": False}, {**FUSED, "slide": True}, False, 8, 0),
        ({"mode": "ntp"}, {**FUSED, "slide": True}, False, 1, 0),
        ({"mode": "ntp"}, FUSED, False, 1, 0),
        ({}, {**FUSED, "fused": False}, False, 8, 0),
        ({"mode": "verified"}, {}, False, 8, 0),
        ({}, {**FUSED, "draft": "solver"}, False, 8, 0),
        ({"draft": "branches"}, {**FUSED, "draft": "solver"}, True, 8, 5),
    ],
)
def test_where_drafts_come_from(extra, defaults, branches, size, lookup):
    found = decoding_of(params(**extra), defaults, CANVAS)
    assert (found.branches, found.block_size, found.lookup) == (branches, size, lookup)


@pytest.mark.parametrize(
    ("extra", "exact"),
    [
        ({"mode": "verified"}, True),
        ({"mode": "verified", "draft": "solver"}, True),
        ({"mode": "verified", "lenience": 0.5}, False),
        ({"mode": "ntp"}, True),
        ({"mode": "sbd"}, False),
        (SLIDING, False),
    ],
)
def test_which_requests_the_load_may_cut(extra, exact):
    """By default none whose text would depend on it."""
    for adaptive, expected in (("exact", exact), ("all", True), (None, False)):
        defaults = {**FUSED, "adaptive": adaptive}
        assert cuts(defaults, decoding_of(params(**extra), defaults, CANVAS)) == expected
    assert not cuts(FUSED, decoding_of(params(**extra), FUSED, CANVAS))


@pytest.mark.parametrize(
    ("extra", "defaults", "message"),
    [
        ({"draft": "best"}, FUSED, "draft must be one of branches, solver, got 'best'"),
        (
            {"draft": "branches"},
            {"mode": "verified"},
            "must be solver on a server with --no-fused, got branches",
        ),
        (
            {"draft": "solver", "mode": "sbd"},
            FUSED,
            "draft is for mode verified, got solver with mode sbd",
        ),
        (
            {"draft": "branches", "mode": "ntp"},
            FUSED,
            "draft is for mode verified, got branches with mod",
        ),
        ({"draft": "branches", "solver": "fixed:2"}, FUSED, "solver is for draft solver, got 'fix"),
        ({"draft": None}, FUSED, "draft must be one of branches, solver, got None"),
        ({"lookup": 2, "draft": "solver"}, FUSED, "got 2 with mode verified and draft solver"),
        ({"lookup": 2, "solver": "fixed:2"}, FUSED, "got 2 with mode verified and draft solver"),
        ({"lookup": 2, "mode": "sbd"}, FUSED, r"\(not with --no-fused\), got 2 with mode sbd"),
        ({"lookup": 2}, {"mode": "verified"}, "lookup is for mode verified with draft branches"),
        ({"lookup": -1}, FUSED, r"lookup must lie in 0\.\.7, got -1"),
        ({"lookup": 2.0}, FUSED, r"lookup must lie in 0\.\.7, got 2\.0"),
        ({"lookup": "2"}, FUSED, r"lookup must lie in 0\.\.7, got '2'"),
        ({"lookup": None}, FUSED, r"lookup must lie in 0\.\.7, got None"),
        ({"lookup": 8}, FUSED, r"lookup must lie in 0\.\.7, got 8"),
        ({"lookup": 8, "block_size": 3}, FUSED, r"lookup must lie in 0\.\.7, got 8"),
        ({"seeds": 1}, FUSED, "is not one of mode, solver, block_size, slide, draft, lookup, len"),
        ({"slide": True}, FUSED, "slide is for mode sbd, got True with mode verified"),
        ({"slide": 2}, FUSED, "slide must be 0 or 1, got 2"),
        ({"slide": "1"}, FUSED, "slide must be 0 or 1, got '1'"),
        ({"slide": None}, FUSED, "slide must be 0 or 1, got None"),
        ({**SLIDING, "solver": "fixed:2"}, FUSED, r"slide must be 0 on vLLM with solver fixed:2, "),
        (SLIDING, {}, "slide must be 0 on vLLM with --no-fused, got True$"),
        ({"mode": "sbd"}, {**FUSED, "slide": True}, "entropy:0.1.* True, as the server has it"),
        ({"lenience": 0}, FUSED, r"lenience must be a number in \(0, 1\], .* lossless, got 0"),
        ({"lenience": 1.5}, FUSED, r"lenience must be a number in \(0, 1\], .*, got 1\.5"),
        ({"lenience": "0.5"}, FUSED, r"lenience must be a number in \(0, 1\], .*, got '0\.5'"),
        ({"lenience": True}, FUSED, r"lenience must be a number in \(0, 1\], .*, got True"),
        ({"lenience": 0.5, "mode": "sbd"}, FUSED, "mode verified .* got 0.5 with mode sbd and"),
        ({"lenience": 0.5, "mode": "ntp"}, FUSED, "of more than one token, got 0.5 with mode ntp"),
        ({"lenience": 0.5, "block_size": 1}, FUSED, "with mode verified and block_size 1"),
    ],
)
def test_what_no_draft_can_be_is_named(extra, defaults, message):
    with pytest.raises(ValueError, match=message):
        decoding_of(params(**extra), defaults, CANVAS)


@pytest.mark.parametrize(
    ("extra", "defaults", "slides"),
    [
        (SLIDING, FUSED, True),
        ({**SLIDING, "slide": 1}, FUSED, True),
        ({**SLIDING, "slide": 0}, FUSED, False),
        ({"mode": "sbd"}, {**SLIDING, "fused": True}, True),
        ({"solver": "entropy:0.1", "slide": 0}, {**SLIDING, "fused": True}, False),
        ({"mode": "verified"}, {**SLIDING, "fused": True}, False),
        ({"slide": 0}, SLIDING, False),
    ],
)
def test_blocks_that_slide(extra, defaults, slides):
    found = decoding_of(params(**extra), defaults, CANVAS)
    assert (found.slide, found.block_size) == (slides, CANVAS)
    assert found.commits is (slides or found.branches)


@pytest.mark.parametrize("extra", [{}, {"draft": "solver"}])
def test_lenience_is_the_requests_own(extra):
    assert decoding_of(params(**extra), FUSED, CANVAS).lenience == 1
    assert decoding_of(params(lenience=0.25, **extra), FUSED, CANVAS).lenience == 0.25


def test_a_checkpoint_without_a_mask_token():
    config = SimpleNamespace(
        hf_config=SimpleNamespace(), try_get_generation_config=lambda: {"setblock": {}}
    )
    with pytest.raises(ValueError, match="names no mask token: export it"):
        mask_of(config)
    config.try_get_generation_config = lambda: {"setblock": {"mask_token_id": 7}}
    assert mask_of(config) == 7
    config.hf_config.mask_token_id = 9
    assert mask_of(config) == 9


@pytest.mark.parametrize("words", [1, 2, 3, 20])
def test_copies_are_those_of_verified_decoding(words):
    """Of texts that repeat themselves much and little. Nothing behind their ends is read."""
    draw = np.random.default_rng(words)
    for length in (1, 2, 3, 9, 40, 100):
        tokens = draw.integers(words, size=(7, length))
        end = draw.integers(1, length + 1, size=7)
        count = int(draw.integers(1, 30))
        copied, run = looked_up(torch.from_numpy(tokens), torch.from_numpy(end), count)
        theirs, matched = branches.looked_up(tokens, end, count)
        assert run.tolist() == matched.tolist()
        assert copied[run > 0].tolist() == theirs[matched > 0].tolist()
        assert words > 2 or length < 9 or run.max() > 2
