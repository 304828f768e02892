"""Train by the set block objective in a loop of your own: no trainer, plain torch.

    python examples/own_loop.py --output-dir runs/loop

`step_loss` is the loss that `setblock train` has for the same rows, seed and step. All of it but
the network's forward is setblock.objective; the mask is the one that this network's attention
takes, where a boolean tensor would be misread by some without a word.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import setblock
from setblock import objective
from setblock.architectures import attention_mask
from setblock.batches import Collator, fill_behind_end
from setblock.checkpoint import write_settings

BLOCK_SIZE = 16  # the largest; each step draws one from 2 on
PAIRS = [("Greet Anna.", " Hello, Anna!"), ("Greet Ben.", " Hello, Ben!")]


def step_loss(
    network: Any,
    batch: dict[str, torch.Tensor],
    mask_token_id: int,
    ends: Sequence[int],
    step: int,
    seed: int = 42,
    epoch: int = 0,
) -> torch.Tensor:
    """Nats per label of one optimizer step, eq. 14 of arXiv:2509.04185.

    batch: as Collator makes it. ends: tokens that end an answer.
    """
    tokens, block_size = batch["input_ids"], objective.draw_block_size(seed, step, high=BLOCK_SIZE)
    documents = batch["sample_id"].tolist(), batch["lengths"].tolist()
    masked = objective.draw_batch_noise(seed, epoch, *documents, tokens.shape[1])
    view = objective.noisy_view(
        tokens,
        batch["labels"],  # of the same places, not of the next ones
        batch["position_ids"],
        batch["document"],
        masked,
        block_size,
        mask_token_id,
        ends=ends,
        end_fill=BLOCK_SIZE - 1,
    ).without_next(ends)
    logits = network(
        input_ids=view.tokens,
        position_ids=view.layout.position,
        attention_mask=attention_mask(network, view.layout, view.layout),
        use_cache=False,
    ).logits
    where = view.supervised
    nats = torch.nn.functional.cross_entropy(logits[where], view.labels[where], reduction="none")
    found = objective.losses(nats, view)
    return (found.ntp_sum + found.matp_sum) / (found.ntp_count + found.matp_count)


def main(output_dir: Annotated[Path, typer.Option()], steps: int = 3) -> None:
    """Train `nano` on two rows, all weights, and save a MODEL."""
    model = setblock.load("nano", dtype="float32", device="cpu", pack=False)
    network, ends = model.network, sorted(model.eos_token_ids)
    rows = []
    for number, (prompt, completion) in enumerate(PAIRS):
        asked = model.encode(prompt)
        said = [*model.tokenizer(completion, add_special_tokens=False)["input_ids"], ends[0]]
        row = {"input_ids": asked + said, "labels": [objective.IGNORE] * len(asked) + said}
        rows.append(fill_behind_end(row, ends, BLOCK_SIZE - 1) | {"sample_id": number})
    batch = Collator(model.pad_token_id)(rows)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    network.train()
    for step in range(steps):
        loss = step_loss(network, batch, model.mask_token_id, ends, step, epoch=step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        typer.echo(f"step {step + 1}: {loss.item():.3f} nats per label")
    network.save_pretrained(output_dir)
    model.tokenizer.save_pretrained(output_dir)
    settings = {"mask_token_id": model.mask_token_id, "block_size": BLOCK_SIZE}
    # What the checkpoint says of the weights that it had before is not true of these.
    measured = {"slide": None, "acceptance": None, "verified": None}
    write_settings(output_dir, mode="sbd", trained=True, **settings, **measured)
    typer.echo(f"saved to {output_dir}")


if __name__ == "__main__":
    typer.run(main)
