"""Log-probabilities and perplexity: those of a plain causal forward, however it is cut up."""

import pytest
import torch

from setblock import likelihood
from setblock.loading import load
from setblock.model import Model

IDS = [5, 9, 30, 7, 7, 12, 40, 3 + 50, 8, 21, 33]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(checkpoint, request) -> Model:
    return load(checkpoint(request.param), dtype="float32", device="cpu")


def plain(model: Model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of ids[1:], by transformers' own forward."""
    with torch.no_grad():
        logits = model.network(torch.tensor([ids])).logits.float()
    logits[..., model.mask_token_id] = -torch.inf
    return logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("queries", [1, 3, 256])
@pytest.mark.parametrize("first", [1, 4, len(IDS) - 1])
def test_scores_are_those_of_a_causal_forward(model, monkeypatch, queries, first):
    monkeypatch.setattr(likelihood, "QUERIES", queries)
    found = likelihood.next_tokens(model, IDS, first)
    torch.testing.assert_close(found.logprobs, plain(model, IDS)[first - 1 :], atol=1e-5, rtol=0)
    assert len(found.likeliest) == len(IDS) - first


def test_the_likeliest_token_is_known_as_such(model):
    logits = model.network(torch.tensor([IDS])).logits[0, -1].detach()
    logits[model.mask_token_id] = -torch.inf
    best = int(logits.argmax())
    assert likelihood.next_tokens(model, [*IDS, best], len(IDS)).likeliest.tolist() == [True]
    other = int(logits.argmin()) if int(logits.argmin()) != model.mask_token_id else 0
    assert likelihood.next_tokens(model, [*IDS, other], len(IDS)).likeliest.tolist() == [False]


def test_nothing_to_judge(model):
    assert len(likelihood.next_tokens(model, IDS, len(IDS)).logprobs) == 0


def test_perplexity_of_one_window(model):
    found = likelihood.perplexity(model, IDS)
    mean = float(plain(model, IDS).mean())
    assert found.nats / found.tokens == pytest.approx(-mean, rel=1e-5)
    assert (found.tokens, found.forwards) == (len(IDS) - 1, 1)


def test_perplexity_of_windows(model):
    """Every token but the first is judged once, after at least half a window."""
    found = likelihood.perplexity(model, IDS, window=4)
    nats = -plain(model, IDS[:4]).sum()
    for start in (2, 4, 6):
        nats -= plain(model, IDS[start : start + 4])[1:].sum()
    nats -= plain(model, IDS[8:])[1:].sum()
    assert found.nats == pytest.approx(float(nats), rel=1e-5)
    assert found.tokens == len(IDS) - 1


@pytest.mark.parametrize(
    ("ids", "window", "message"),
    [
        ([5], None, "at least 2 tokens, got 1"),
        (IDS, 1, "window must lie in 2"),
        (IDS, 10**6, "win"),
    ],
)
def test_texts_that_have_none(model, ids, window, message):
    with pytest.raises(ValueError, match=message):
        likelihood.perplexity(model, ids, window)


def test_bad_texts_are_refused(model):
    with pytest.raises(ValueError, match=r"first must lie in 1\.\.11"):
        likelihood.next_tokens(model, IDS, 0)
    with pytest.raises(ValueError, match="exceeds the model's context"):
        likelihood.next_tokens(model, [5] * (model.context_length + 1), 1)
