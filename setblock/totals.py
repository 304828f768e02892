"""What training logs: running means, and masked accuracy by offset and by mask rate."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from setblock import objective
from setblock.head import LabelScores
from setblock.masks import CLEAN, PADDING


class Totals:
    """Running sums of what the log reports, kept on the device until a line is logged."""

    NAMES = (
        *("ntp_nats", "ntp_labels", "ntp_right", "matp_nats", "matp_labels", "matp_right"),
        *("text_nats", "text_labels", "text_right"),
        *("chain_nats", "chain_labels", "chain_right", "distill_nats", "distill_labels"),
        *("maskable", "tokens", "block_sizes", "batches"),
    )
    NUM_RATES = 10  # mask rates in tenths

    def __init__(self, device: torch.device, max_block_size: int) -> None:
        self.values = torch.zeros(
            len(self.NAMES) + 2 * max_block_size + 2 * self.NUM_RATES, device=device
        )
        self.max_block_size = max_block_size
        self.seconds, self._since = 0.0, 0.0

    def start(self) -> None:
        """A step begins; time between steps, such as that of a decoding, does not count."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """The step has ended."""
        self.seconds += time.perf_counter() - self._since

    def _parts(self) -> list[Tensor]:
        """NAMES; labels and right answers by offset in the block; the same by mask rate."""
        sizes = [self.max_block_size] * 2 + [self.NUM_RATES] * 2
        return list(self.values.split([len(self.NAMES), *sizes]))

    def add(
        self,
        scores: LabelScores,
        view: objective.View,
        block_size: int,
        batch: Mapping[str, Any],
        taught: Tensor,
        fills: Tensor,
    ) -> None:
        """taught: which labels had a teacher. fills: which are end tokens behind a text's own."""
        supervised = view.supervised
        noisy = (view.layout.block != CLEAN)[supervised]
        losses = objective.losses(scores.nats.detach(), view)
        matp_right, text = (scores.right & noisy).sum(), noisy & ~fills
        maskable = torch.zeros(()) if view.maskable is None else view.maskable.float()
        sums = (
            *(losses.ntp_sum, losses.ntp_count, scores.right.sum() - matp_right),
            *(losses.matp_sum, losses.matp_count, matp_right),
            scores.nats.detach().where(text, 0).sum(),
            *(text.sum(), (scores.right & text).sum()),
            *(scores.chain_nats.detach().sum(), scores.chain_known.sum(), scores.chain_right.sum()),
            *(scores.divergence.detach()[taught].sum(), taught.sum()),
            *(maskable.sum(), (batch["document"] != PADDING).sum(), block_size, 1),
        )
        device = self.values.device
        names, *tables = self._parts()
        names += torch.stack([torch.as_tensor(value, device=device) for value in sums])
        if not view.matp_labels.shape[1]:
            return
        offset = (view.layout.position - view.layout.horizon)[supervised][noisy]
        slot = view.layout.document - PADDING
        counts = torch.zeros(2, len(slot), int(slot.max()) + 1, device=device)
        clean = slot[:, : view.num_clean]
        counts[0].scatter_add_(1, clean, maskable)
        counts[1].scatter_add_(1, slot, (supervised & (view.layout.block != CLEAN)).float())
        rate = (counts[1] / counts[0].clamp(min=1)).gather(1, slot)[supervised][noisy]
        tenth = (rate * self.NUM_RATES).long().clamp(max=self.NUM_RATES - 1)
        known, right = text[noisy].float(), (scores.right & text)[noisy].float()
        for (labels, rights), index in zip((tables[:2], tables[2:]), (offset, tenth), strict=True):
            labels.index_add_(0, index, known)
            rights.index_add_(0, index, right)

    def means(self) -> dict[str, float]:
        """Name -> mean, of a half only where it had labels."""
        totals = dict(zip(self.NAMES, self._parts()[0].tolist(), strict=True))
        means = {}
        for half in ("ntp", "matp"):
            if totals[f"{half}_labels"]:
                means[f"{half}_loss"] = totals[f"{half}_nats"] / totals[f"{half}_labels"]
                means[f"{half}_accuracy"] = totals[f"{half}_right"] / totals[f"{half}_labels"]
        if totals["text_labels"]:
            means["matp_text_loss"] = totals["text_nats"] / totals["text_labels"]
            means["matp_text_accuracy"] = totals["text_right"] / totals["text_labels"]
        if totals["distill_labels"]:
            means["distill_loss"] = totals["distill_nats"] / totals["distill_labels"]
        if totals["chain_labels"]:
            means["chain_loss"] = totals["chain_nats"] / totals["chain_labels"]
            # Of all masked tokens, as matp_accuracy.
            means["chain_accuracy"] = totals["chain_right"] / totals["matp_labels"]
        if totals["matp_labels"]:
            means["mask_ratio"] = totals["matp_labels"] / totals["maskable"]
            means["block_size"] = totals["block_sizes"] / totals["batches"]
        if self.seconds:
            means["tokens_per_second"] = totals["tokens"] / self.seconds
        return means

    def breakdown(self) -> dict[str, list[float | None]]:
        """Masked accuracy by offset in the block and by mask rate (tenths), None without labels.

        Of the text alone, without the end tokens that fill up its last block.
        """
        tables = [part.tolist() for part in self._parts()[1:]]
        shares = [
            [right / labels if labels else None for labels, right in zip(*pair, strict=True)]
            for pair in (tables[:2], tables[2:])
        ]
        return dict(
            zip(("matp_accuracy_by_offset", "matp_accuracy_by_mask_rate"), shares, strict=True)
        )
