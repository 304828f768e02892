"""Set block decoding and next-token decoding on one code path.

`DecodeState` holds a batch of rows, each at its own stage and length; `step()` runs one forward
for all of them. A row's text is final before `start`; in `sbd` mode a block of `block_size` slots
stands behind it, in `ntp` mode nothing. A forward takes the final tokens that are not in the cache
yet (the prompt, the block just finished, or the last token), then the block; the keys of the former
are kept, the block's are not.
Source: arXiv:2509.04185 algorithms 2 and 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from setblock.masks import decoding_layout
from setblock.model import Model
from setblock.sampling import Sampler
from setblock.solvers import Solver, entropy

MODES = ("sbd", "ntp")


@dataclass(frozen=True)
class Settings:
    """What a decoding run does; validated once, stored with every result.

    block_size: slots of a block (k of the paper), unused by mode "ntp" like `solver`.
    max_new_tokens: generated tokens at most, EOS included.
    stop: texts that end a row; the text is cut before them.
    ignore_eos: generate on past EOS; EOS itself stays allowed.
    """

    mode: str
    solver: Solver
    block_size: int
    max_new_tokens: int = 256
    sampler: Sampler = field(default_factory=Sampler)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if not isinstance(self.solver, Solver):
            raise ValueError(f"solver must be a solver or its text, got {self.solver!r}")
        for name in ("block_size", "max_new_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be texts, none of them empty, got {self.stop!r}")

    @property
    def num_slots(self) -> int:
        """Positions that a row takes after its prompt: blocks stay whole beyond the limit."""
        step = self.block_size if self.mode == "sbd" else 1
        return -(-self.max_new_tokens // step) * step


class DecodeState:
    """Rows being decoded, each at its own stage and length.

    tokens      [batch, capacity] prompt, final tokens, then the block with its masks
    start       [batch] first position of the block; all before is final
    prompt_end  [batch] length of the prompt
    limit       [batch] first position that may not be generated
    rows        [batch] index of the row in the user's input
    nfe         [batch] forwards counted so far
    revealed_at, entropy  [batch, capacity] forward and entropy of each generated token
    The cache knows how many positions of each row it holds: `cache.lengths`.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        settings: Settings,
    ) -> None:
        self.model, self.settings = model, settings
        self.block_size = settings.block_size if settings.mode == "sbd" else 0
        lengths = [len(prompt) for prompt in prompts]
        capacity = max(lengths) + settings.num_slots
        tokens = torch.full((len(prompts), capacity), model.mask_token_id)
        for slot, prompt in enumerate(prompts):
            tokens[slot, : len(prompt)] = torch.tensor(prompt)
        self.tokens = tokens.to(model.device)
        self.start = torch.tensor(lengths, device=model.device)
        self.prompt_end = self.start.clone()
        self.limit = self.start + settings.max_new_tokens
        self.rows = torch.tensor(list(rows), device=model.device)
        self.nfe = torch.zeros_like(self.start)
        self.revealed_at = torch.zeros_like(self.tokens)
        self.entropy = torch.zeros(self.tokens.shape, device=model.device)
        self.eos = torch.tensor(
            [] if settings.ignore_eos else sorted(model.eos_token_ids),
            dtype=torch.long,
            device=model.device,
        )
        # The last forward of a row starts k tokens before the end and may hold 2k, to go with
        # another row's.
        self.cache = model.new_cache(len(prompts), capacity + self.block_size)

    def step(self) -> Bool[Tensor, "batch length"]:
        """One forward for all rows; True at the positions revealed by it.

        A row that has ended must be dropped by `select` first: nothing here stops it at its limit.
        Effects: tokens, counts and cache change in place.
        """
        prompt_forward = self.cache.lengths == 0
        cached = self.cache.lengths.clone()
        end = torch.where(prompt_forward, self.start, self.start + self.block_size)
        num_queries = int((end - cached).max())
        position = cached[:, None] + torch.arange(num_queries, device=cached.device)
        layout = decoding_layout(position, self.start, end)
        queries = self.tokens.gather(1, position.clamp(max=self.tokens.shape[1] - 1))
        if self.block_size:
            slots = self.start[:, None] + torch.arange(self.block_size, device=cached.device)
            predicting = slots  # a masked slot predicts itself, no shift
        else:
            slots = self.start[:, None]
            predicting = slots - 1  # the last final token predicts the next
        wanted = (predicting - cached[:, None]).clamp(max=num_queries - 1)
        needed = torch.unique(wanted)
        logits = self.model.forward(queries, layout, self.cache, logits_at=needed)
        self.cache.keep(self.start - cached)
        yields = ~prompt_forward if self.block_size else torch.ones_like(prompt_forward)
        self.nfe += yields.long()
        index = torch.searchsorted(needed, wanted)
        block_logits = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
        return self._reveal(block_logits, slots, yields)

    def _reveal(
        self,
        logits: Float[Tensor, "batch block vocab"],
        slots: Int[Tensor, "batch block"],
        yields: Bool[Tensor, " batch"],
    ) -> Bool[Tensor, "batch length"]:
        """Choose and write the tokens of one forward; then move finished blocks behind `start`."""
        inside = slots.clamp(max=self.tokens.shape[1] - 1)
        masked = self._eligible(inside, slots) & yields[:, None]
        if self.block_size:
            reveal = self.settings.solver.reveal(logits, masked)
        else:
            reveal = masked
        chosen = self.settings.sampler.pick(logits, self.rows, slots)
        self._write(self.tokens, inside, reveal, chosen)
        self._write(self.revealed_at, inside, reveal, self.nfe[:, None].expand_as(slots))
        self._write(self.entropy, inside, reveal, entropy(logits))
        finished = yields & ~self._eligible(inside, slots).any(dim=1)
        self.start = torch.where(finished, self.start + slots.shape[1], self.start)
        return torch.zeros_like(self.tokens, dtype=torch.bool).scatter_(1, inside, reveal)

    def _eligible(self, inside: Tensor, slots: Tensor) -> Bool[Tensor, "batch block"]:
        """Masked slots worth a forward: before the limit and before any EOS of the block."""
        tokens = self.tokens.gather(1, inside)
        past_eos = torch.isin(tokens, self.eos).cumsum(dim=1) > 0
        return (tokens == self.model.mask_token_id) & (slots < self.limit[:, None]) & ~past_eos

    @staticmethod
    def _write(target: Tensor, index: Tensor, where: Tensor, value: Tensor) -> None:
        target.scatter_(1, index, torch.where(where, value, target.gather(1, index)))

    def committed(self, slot: int) -> tuple[list[int], bool]:
        """Ids of a batch slot's gapless answer so far, and whether EOS or the limit ends it."""
        first, last = int(self.prompt_end[slot]), int(self.limit[slot])
        answer = self.tokens[slot, first:last]
        gap = (answer == self.model.mask_token_id).nonzero()
        answer = answer[: int(gap[0, 0]) if len(gap) else len(answer)]
        eos = torch.isin(answer, self.eos).nonzero()
        if len(eos):
            return answer[: int(eos[0, 0]) + 1].tolist(), True
        return answer.tolist(), len(answer) == last - first

    def select(self, slots: list[int]) -> None:
        """Drop all rows but these batch slots."""
        index = torch.tensor(slots, device=self.tokens.device)
        for name in (
            "tokens",
            "start",
            "prompt_end",
            "limit",
            "rows",
            "nfe",
            "revealed_at",
            "entropy",
        ):
            setattr(self, name, getattr(self, name)[index])
        self.cache.select(index)
