"""The training objective: clean tokens -> [x ; x_hat], its layout and its labels -> the two losses.

arXiv:2509.04185 eq. 14: next-token prediction (NTP) on the clean half, masked-token prediction
(MATP) on the masked positions of the noisy copy. In the paper's order:

    draw_block_size    one block size per optimizer step
    draw_noise         one mask rate per document, then which of its positions are masked
    noisy_view         the doubled sequence, who may see whom, a label where there is a loss
    drop_idle_blocks   the same without the noisy blocks that no loss depends on
    losses             sums of -log p over the labels of each half, and their counts

Nothing here reads global random state: every draw is keyed by what it belongs to, so that the same
document gets the same noise in any batch, on any rank, packed or not, before and after a resume.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from setblock.masks import CLEAN, PADDING, Layout, WholeRows, causal_layout, training_layout

IGNORE = -100  # a label without a loss, as in torch and transformers
BEHIND_END = 2  # tokens of a chat template's line break behind an end token, at most


@dataclass(frozen=True)
class View:
    """What one forward of a training step reads, and what it is scored on.

    tokens, layout and labels share one shape: [batch, 2 * L] for set block decoding (less once idle
    blocks are dropped), [batch, L] for the clean half alone. labels[b, i] is the token that the
    output at i shall predict, IGNORE where there is no loss: the following token in the clean half,
    the token itself at masked positions of the noisy half. rows: where every noisy block was kept
    whole and no row holds more than one document, what its rows have in common. maskable: the
    places of a row that the noise could mask; filled: those whose noisy token is not the clean one.
    """

    tokens: Int[Tensor, "batch length"]
    layout: Layout
    labels: Int[Tensor, "batch length"]
    num_clean: int
    rows: WholeRows | None = None
    maskable: Bool[Tensor, "batch clean"] | None = None
    filled: Bool[Tensor, "batch clean"] | None = None

    @property
    def matp_labels(self) -> Int[Tensor, "batch length"]:
        """Labels of the noisy half, not shifted; of zero length in a view without one."""
        return self.labels[:, self.num_clean :]

    @property
    def supervised(self) -> Bool[Tensor, "batch length"]:
        """Where there is a label, and so where logits are needed."""
        return self.labels != IGNORE

    def masked_only(self) -> "View":
        """This view without its next-token labels: for a network whose clean half can't learn."""
        labels = self.labels.clone()
        labels[:, : self.num_clean] = IGNORE
        return replace(self, labels=labels)

    def without_next(self, ends: Collection[int]) -> "View":
        """This view without the next-token labels that ask for an end token after itself.

        The end tokens that fill up a text's last block teach where blocks end, not what follows.
        """
        labels = self.labels.clone()
        clean = slice(self.num_clean)
        again = _same_end(self.tokens[:, clean], labels[:, clean], ends)
        labels[:, clean] = labels[:, clean].masked_fill(again, IGNORE)
        return replace(self, labels=labels)

    def teachers(self, ends: Collection[int] = ()) -> Int[Tensor, "batch length"]:
        """Index of the clean token whose output predicts what a masked token shall predict.

        That is the clean token before it in its document; -1 where there is none, and wherever
        there is no masked-token label. Nor is there one for an end after itself: nothing teaches
        the clean half what follows a text (see without_next).
        """
        found = self._clean_before()
        before = self.tokens.gather(1, found.clamp(min=0))
        return torch.where(_same_end(before, self.labels, ends), -1, found)

    def before(self) -> Int[Tensor, "batch length"]:
        """The clean token before each masked token that has a label; -1 where there is none."""
        found = self._clean_before()
        return torch.where(found < 0, -1, self.tokens.gather(1, found.clamp(min=0)))

    def _clean_before(self) -> Int[Tensor, "batch length"]:
        """Index of that token in its row, -1 for none."""
        return torch.where(self._filled(found := self._text_before()), -1, found)

    def fills(self, ends: Collection[int]) -> Bool[Tensor, "batch length"]:
        """Masked-token labels that are no text: an end token behind itself, to fill a block."""
        found = self._text_before()
        before = self.tokens.gather(1, found.clamp(min=0))
        again = _same_end(before, self.labels, ends) & (found >= 0)
        return again | self._filled(found)

    def _filled(self, before: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
        """Where the noisy token is not the clean one; `before` as of _text_before."""
        if self.filled is None:
            return torch.zeros_like(before, dtype=torch.bool)
        return self.filled.gather(1, before + 1) & (before >= 0)

    def _text_before(self) -> Int[Tensor, "batch length"]:
        """As _clean_before, also where the noisy half has another text."""
        first, layout = self.num_clean, self.layout
        noisy = torch.arange(self.labels.shape[1], device=self.labels.device) >= first
        wanted = noisy & (self.labels != IGNORE) & (layout.position > 0)
        # A row's clean tokens are in order, so a document's token stands at its start + position.
        slot = layout.document - PADDING
        index = torch.arange(first, device=slot.device).expand(len(slot), -1)
        start = torch.full((len(slot), first + 1), first, device=slot.device)
        start = start.scatter_reduce(1, slot[:, :first], index, "amin").gather(1, slot)
        return torch.where(wanted, start + layout.position - 1, -1)


def _same_end(
    tokens: Int[Tensor, "batch length"], labels: Int[Tensor, "batch length"], ends: Collection[int]
) -> Bool[Tensor, "batch length"]:
    return (tokens == labels) & torch.isin(labels, torch.tensor([*ends], device=labels.device))


class Losses(NamedTuple):
    """Sums of -log p in nats and the numbers of labels that they run over."""

    ntp_sum: Float[Tensor, ""]
    ntp_count: Int[Tensor, ""]
    matp_sum: Float[Tensor, ""]
    matp_count: Int[Tensor, ""]


def draw_block_size(seed: int, step: int, low: int = 2, high: int = 16) -> int:
    """Block size of optimizer step `step`, uniform over low..high, both included.

    Raises: ValueError unless 1 <= low <= high.
    Source: arXiv:2509.04185 section 3. The paper's code can draw 0; this cannot.
    """
    if not 1 <= low <= high:
        raise ValueError(f"block sizes need 1 <= low <= high, got low={low}, high={high}")
    generator = torch.Generator().manual_seed(_key("block size", seed, step))
    return int(torch.randint(low, high + 1, (), generator=generator))


@dataclass(frozen=True)
class Noise:
    """How documents are masked; the defaults are the paper's.

    full_mask_share: share of the documents that are masked throughout instead (eta = 1).
    suffix_mask_share: share of the documents each of whose blocks is masked from a random position
    to its end instead, the state that decoding from left to right leaves a block in.
    Raises: ValueError for a share outside of 0..1, and for two that sum to more than 1.
    """

    full_mask_share: float = 0.0
    suffix_mask_share: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (shares := vars(self)).items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {share}")
        if sum(shares.values()) > 1:
            raise ValueError(
                f"{' and '.join(shares)} must sum to at most 1, got "
                f"{' and '.join(map(str, shares.values()))}"
            )


def draw_noise(
    seed: int,
    epoch: int,
    sample_id: int,
    length: int,
    noise: Noise = Noise(),
    block_size: int = 16,
) -> tuple[float, Bool[Tensor, " length"]]:
    """(eta, masked): a document's mask rate ~ U(0, 1), each position masked with that probability.

    eta is the masked share itself where `noise` has the document masked otherwise.
    Drawn on the CPU, from a generator keyed by (seed, epoch, sample_id) alone.
    Source: arXiv:2509.04185 algorithm 1.
    """
    generator = torch.Generator().manual_seed(_key("noise", seed, epoch, sample_id))
    uniform = torch.rand(1 + length, generator=generator)
    kind = float(torch.rand((), generator=generator))
    if kind < noise.full_mask_share:
        return 1.0, torch.ones(length, dtype=torch.bool)
    if kind < noise.full_mask_share + noise.suffix_mask_share:
        position = torch.arange(length)
        first = torch.randint(block_size, (1 + length // block_size,), generator=generator)
        masked = position % block_size >= first[position // block_size]
        return float(masked.float().mean()), masked
    return float(uniform[0]), uniform[1:] < uniform[0]


def draw_batch_noise(
    seed: int,
    epoch: int,
    sample_ids: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    length: int,
    noise: Noise = Noise(),
    block_size: int = 16,
) -> Bool[Tensor, "batch length"]:
    """Masked positions of a batch; row b holds documents sample_ids[b] of lengths[b] tokens.

    Documents stand one after the other from the left; the rest of the row is padding, never masked.
    Drawn on the CPU, as in `draw_noise`.
    """
    masked = torch.zeros(len(sample_ids), length, dtype=torch.bool)
    for row, row_ids, row_lengths in zip(masked, sample_ids, lengths, strict=True):
        start = 0
        for sample_id, num_tokens in zip(row_ids, row_lengths, strict=True):
            drawn = draw_noise(seed, epoch, sample_id, num_tokens, noise, block_size)
            row[start : start + num_tokens] = drawn[1]
            start += num_tokens
    return masked


def document_places(
    lengths: Int[Tensor, "batch _"], length: int
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """(position, document) of rows that hold documents of these lengths one after the other.

    Zero lengths may fill up a row of `lengths`. Padding gets position 0 and document PADDING.
    """
    ends = lengths.cumsum(dim=1)
    index = torch.arange(length, device=lengths.device)
    document = (index[None, :, None] >= ends[:, None, :]).sum(dim=2)
    padding = document == lengths.shape[1]
    document = document.masked_fill(padding, 0)
    starts = (ends - lengths).gather(1, document)
    position = (index - starts).masked_fill(padding, 0)
    return position, document.masked_fill(padding, PADDING)


def clean_view(
    tokens: Int[Tensor, "batch length"],
    labels: Int[Tensor, "batch length"],
    position: Int[Tensor, "batch length"],
    document: Int[Tensor, "batch length"],
) -> View:
    """An ordinary causal language modelling step: no noisy copy, NTP labels only."""
    return View(
        tokens=tokens,
        layout=causal_layout(position, document),
        labels=_shift(labels, document),
        num_clean=tokens.shape[1],
    )


def noisy_view(
    tokens: Int[Tensor, "batch length"],
    labels: Int[Tensor, "batch length"],
    position: Int[Tensor, "batch length"],
    document: Int[Tensor, "batch length"],
    masked: Bool[Tensor, "batch length"],
    block_size: int,
    mask_token_id: int,
    drop_ragged_block: bool = False,
    first_slot_loss: bool = True,
    ends: Collection[int] = (),
    end_fill: int = 0,
) -> View:
    """[x ; x_hat] of a batch, 2 * length tokens a row.

    labels[b, i] is tokens[b, i] or IGNORE. Positions without a label (prompts, padding) are never
    masked, whatever `masked` says, and have no loss in either half. `position` counts from 0 in
    every document, and blocks do too. drop_ragged_block leaves a document's last, incomplete block
    unmasked and without MATP loss, as in the paper; by default it is trained, since it holds the
    end of the text. first_slot_loss=False leaves the first slot of every block without MATP loss.
    A turn, labels that tokens without one follow, ends its block: what comes then is not known
    while the turn is decoded. Behind a turn that ends in one of `ends`, in the noisy half alone, up
    to `end_fill` more of that token have labels, as far as its block would reach, unless the next
    turn begins in it.
    Raises: ValueError if block_size < 1.
    Source: arXiv:2509.04185 algorithm 1, eqs. 13 and 14.
    """
    noisy, wanted, begins = _turns_ended(
        tokens, labels, position, document, block_size, ends, end_fill
    )
    maskable = wanted != IGNORE
    masked = masked & maskable
    if drop_ragged_block:
        masked = masked & _in_full_block(position, document, block_size)
    predicted = masked if first_slot_loss else masked & (position % block_size != 0)
    layout = training_layout(position, document, block_size, begins)
    whole = bool((layout.block[:, tokens.shape[1] :] % block_size == 0).all())
    return View(
        tokens=torch.cat([tokens, noisy.masked_fill(masked, mask_token_id)], dim=1),
        layout=layout,
        labels=torch.cat(
            [_shift(labels, document), wanted.masked_fill(~predicted, IGNORE)],
            dim=1,
        ),
        num_clean=tokens.shape[1],
        rows=WholeRows(tokens.shape[1], block_size) if whole and document.max() <= 0 else None,
        maskable=maskable,
        filled=maskable & (wanted != labels),
    )


def _turns_ended(
    tokens: Int[Tensor, "batch length"],
    labels: Int[Tensor, "batch length"],
    position: Int[Tensor, "batch length"],
    document: Int[Tensor, "batch length"],
    block_size: int,
    ends: Collection[int],
    end_fill: int,
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """The noisy half's (tokens before the noise, labels, tokens at which a block begins anew)."""
    same = document[:, 1:] == document[:, :-1]
    labelled = labels != IGNORE
    last_labels = (labelled[:, :-1] & ~labelled[:, 1:] & same).nonzero().tolist()
    begins = torch.zeros_like(labelled)
    if not last_labels:
        return tokens, labels, begins
    said, places, texts = labels.tolist(), position.tolist(), document.tolist()
    noisy, wanted, cuts = tokens.tolist(), labels.tolist(), begins.tolist()
    for row, last in last_labels:
        # Back from the last label; a chat template's line break may come behind an end token.
        most = min(BEHIND_END, places[row][last])
        turn = takewhile(lambda label: label != IGNORE, said[row][last - most : last + 1][::-1])
        back = next((back for back, label in enumerate(turn) if label in ends), None)
        behind, fill = last + 1, 0
        if back is not None:
            behind -= back
            wanted[row][behind : last + 1] = [IGNORE] * back
            stop = behind + -places[row][behind] % block_size
            room = texts[row][behind:stop].count(texts[row][last])
            if all(label == IGNORE for label in said[row][last + 1 : behind + room]):
                fill = min(room, end_fill)
            for column in (noisy, wanted):
                column[row][behind : behind + fill] = [said[row][behind - 1]] * fill
        if behind + fill < len(cuts[row]):
            cuts[row][behind + fill] = True
    device = tokens.device
    return (
        torch.tensor(noisy, device=device),
        torch.tensor(wanted, device=device),
        torch.tensor(cuts, device=device),
    )


def drop_idle_blocks(view: View) -> View:
    """The view without the noisy blocks that hold no mask; its losses and gradients are the same.

    No label stands in such a block and no other token sees it, so it is work for nothing: all of a
    prompt's blocks, those that the noise left alone, and padding. What remains of each row's noisy
    half moves to the left, padded to the batch's longest; where nothing is masked, to one token, so
    that every micro-batch takes the same forwards: ranks that share weights meet in each.
    """
    first = view.num_clean
    noisy = view.layout.map(lambda tensor: tensor[:, first:])
    changes = (noisy.block[:, 1:] != noisy.block[:, :-1]) | (
        noisy.document[:, 1:] != noisy.document[:, :-1]
    )
    run = torch.zeros_like(noisy.block)  # numbers a row's blocks from the left
    run[:, 1:] = changes.cumsum(dim=1)
    labelled = (view.matp_labels != IGNORE).long()
    needed = torch.zeros_like(run).scatter_reduce(1, run, labelled, "amax").gather(1, run)
    width = max(int(needed.sum(dim=1).amax()), 1)
    order = needed.argsort(dim=1, descending=True, stable=True)[:, :width]
    filler = needed.gather(1, order) == 0

    def left(tensor: Tensor, fill: int) -> Tensor:
        moved = tensor[:, first:].gather(1, order).masked_fill(filler, fill)
        return torch.cat([tensor[:, :first], moved], dim=1)

    layout = view.layout
    return replace(
        view,
        tokens=left(view.tokens, 0),
        layout=Layout(
            position=left(layout.position, 0),
            horizon=left(layout.horizon, 1),
            block=left(layout.block, CLEAN),
            document=left(layout.document, PADDING),
        ),
        labels=left(view.labels, IGNORE),
        rows=None,
    )


def losses(nats: Float[Tensor, " labels"], view: View) -> Losses:
    """Both sums of eq. 14 and their label counts.

    nats: -log p of every label, in the order of view.labels[view.supervised].
    The loss of a step is (ntp_sum + matp_sum) / (ntp_count + matp_count), sums and counts taken
    over all micro-batches and ranks of the step: eq. 14 has coefficient 1 for every label of either
    half.
    """
    noisy = (view.layout.block != CLEAN)[view.supervised]
    matp_sum, matp_count = nats[noisy].sum(), noisy.sum()
    return Losses(nats[~noisy].sum(), noisy.numel() - matp_count, matp_sum, matp_count)


def _shift(
    labels: Int[Tensor, "batch length"], document: Int[Tensor, "batch length"]
) -> Int[Tensor, "batch length"]:
    """The label of the following token of the same document, IGNORE at a document's last token."""
    shifted = torch.full_like(labels, IGNORE)
    same = document[:, 1:] == document[:, :-1]
    shifted[:, :-1] = labels[:, 1:].masked_fill(~same, IGNORE)
    return shifted


def _in_full_block(
    position: Int[Tensor, "batch length"], document: Int[Tensor, "batch length"], block_size: int
) -> Bool[Tensor, "batch length"]:
    """Where a token stands in a block that its document fills."""
    slot = document - PADDING  # padding's own document first, so that it needs no case of its own
    num_tokens = torch.zeros(position.shape[0], position.shape[1] + 1, dtype=position.dtype)
    num_tokens = num_tokens.to(position.device)
    num_tokens = num_tokens.scatter_reduce(1, slot, position + 1, reduce="amax").gather(1, slot)
    return position < num_tokens - num_tokens % block_size


def _key(*parts: object) -> int:
    """A 63-bit generator seed: a hash of the parts that is the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
