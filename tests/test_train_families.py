"""Families of networks that train: a step of a small one of each, against forwards of a block."""

from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from datasets import Dataset
from families import WHAT_PEFT_SAYS, known, made
from layouts import decoding_layout
from trainers import RECOMPUTING, config, samples
from transformers import AutoConfig, AutoModelForCausalLM

from setblock import adapters, gated
from setblock.architectures import TESTED, attention_mask
from setblock.model import Model
from setblock.train import SBDTrainer
from setblock.views import label_scores

pytestmark = [
    *WHAT_PEFT_SAYS,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
]
ROWS = samples(3)


@pytest.fixture(scope="module", params=known(TESTED))
def random_model(request, tmp_path_factory) -> Model:
    return made(request.param, tmp_path_factory.mktemp(request.param))


def trained(model: Model, folder: Any, method: str, **changes: Any) -> Any:
    """(a trainer of it, without dropout and noise; the batches of a step)."""
    base = str(model.name)
    settings = AutoConfig.from_pretrained(base)
    for name, value in settings.to_dict().items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(settings, name, 0.0)
    network: Any = AutoModelForCausalLM.from_pretrained(base, config=settings, dtype=torch.float32)
    if method == "gated":
        width = 0 if adapters.no_chain(network.config) else 8
        mask: Any = model.mask_token_id
        network = adapters.attach(network, base, method, mask, rank=4, alpha=8, chain_width=width)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.3)
    run = SBDTrainer(
        network,
        config(folder, max_block_size=4, min_block_size=4, **changes),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=make_tokenizer(mask_token="<mask>"),
    )
    step, _ = run.get_batch_samples(iter(run.get_train_dataloader()), 1, torch.device("cpu"))
    return run, step


def alone(network: Any, text: list[int], start: int) -> torch.Tensor:
    """Logits [length, vocab] of a row in which a block begins at `start`, by a forward of it alone.

    Unlike decoding's they hold the mask token's.
    """
    end = len(text)
    layout = decoding_layout(torch.arange(end)[None], torch.tensor([start]), torch.tensor([end]))
    mask = attention_mask(network, layout, layout)
    given = {"input_ids": torch.tensor([text]), "position_ids": layout.position}
    with gated.opened(network, layout, layout) as told:
        return network(**given, attention_mask=mask, **told).logits[0]


@pytest.mark.parametrize("method", ["full", "gated"])
def test_a_step_scores_what_forwards_of_a_block_predict(random_model, tmp_path, method) -> None:
    """Labels of both halves, of an adapter that of masks, of rows of several lengths."""
    run, [batch] = trained(random_model, tmp_path, method)
    view = batch["view"]
    place, block = view.layout.position, view.layout.block
    expected, kinds = [], []
    with torch.no_grad():
        nats = label_scores(view, None, run.model, run.model, 64).nats
        for row, column in view.supervised.nonzero().tolist():
            mine, last = block[row] == block[row, column], int(place[row, column])
            clean = view.tokens[row, : view.num_clean].tolist()
            if column < view.num_clean:
                text, start = clean[: last + 1], last + 1
            else:
                start = int(place[row][mine].min())
                text = clean[:start] + view.tokens[row][mine].tolist()
            said = alone(run.model, text, start)[last].log_softmax(-1)
            expected.append(-said[view.labels[row, column]])
            kinds.append(column < view.num_clean)
    torch.testing.assert_close(nats, torch.stack(expected), atol=1e-3, rtol=1e-3)
    assert 5 <= len(kinds) - sum(kinds)
    assert (sum(kinds) >= 5) == (method == "full"), (
        "the clean half of a gated adapter is its base's"
    )


def gradients(run: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    run.model.zero_grad()
    run.model.train()  # else nothing is recomputed
    run.compute_loss(run.model, batch).backward()
    return {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}


def test_a_gated_adapters_step_is_the_same_in_every_way(random_model, tmp_path) -> None:
    """Over a clean half without gradient; of all at once; recomputed; taught by the clean half."""
    run, [batch] = trained(random_model, tmp_path, "gated")
    other, [again] = trained(random_model, tmp_path, "gated", **{RECOMPUTING: True})
    found, whole = gradients(run, batch), gradients(other, again)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert any(gradient.any() for name, gradient in found.items() if "lora_A" in name)
    run.args.self_distill = other.args.self_distill = 0.5
    taught, recomputed = gradients(run, batch), gradients(other, again)
    assert any(not torch.equal(taught[name], found[name]) for name in found)
    for one, same in ((found, whole), (taught, recomputed)):
        assert one.keys() == same.keys()
        for name, gradient in one.items():
            torch.testing.assert_close(gradient, same[name], atol=1e-3, rtol=1e-3)
