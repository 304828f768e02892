"""A model without weights: logits come from tables, the cache holds plain token ids."""

import itertools
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from setblock.masks import CLEAN, PADDING, Layout
from setblock.model import DEFAULTS, Model
from setblock.names import ModelError
from setblock.roofline import ACCEPTANCE, Spending

MASK, EOS, BOS = 0, 1, 2
LETTERS = "abcdefghijklmnopqrstuvwxyz ."


class TableCache:
    """The clean tokens of each row; the surface of PrefixCache that decoding uses.

    tokens: what a real cache would hold keys and values of, row by row.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.staged: list[list[int]] | None = None
        self.restored = np.zeros(batch, dtype=np.int64)

    @property
    def lengths(self) -> ndarray:
        return np.array([len(row) for row in self.tokens])

    def stage(self, tokens: Tensor, layout: Layout) -> None:
        if int(self.lengths.max()) + tokens.shape[1] > self.capacity:
            raise ValueError(f"{self.lengths} + {tokens.shape[1]} exceed capacity {self.capacity}")
        self.staged = []
        for row, length in enumerate(self.lengths.tolist()):
            clean = (layout.block[row] == CLEAN) & (layout.document[row] != PADDING)
            leading = int(clean.long().cumprod(0).sum())
            assert not clean[leading:].any(), "clean tokens after noisy ones or padding"
            places = layout.position[row, :leading].tolist()
            assert places == list(range(length, length + leading)), f"{places} after {length}"
            noisy = layout.block[row] != CLEAN
            assert (layout.horizon[row][noisy] <= length + leading).all(), "sees unwritten tokens"
            self.staged.append(tokens[row, :leading].tolist())

    def keep(self, counts: ndarray) -> None:
        assert self.staged is not None, "keep() twice after one forward, or before any"
        for row, (new, count) in enumerate(zip(self.staged, counts.tolist(), strict=True)):
            assert 0 <= count <= len(new), f"row {row}: keep {count} of {len(new)} clean tokens"
            self.tokens[row] = self.tokens[row] + new[:count]
        self.staged = None

    def forget(self, counts: ndarray) -> None:
        for row, count in enumerate(counts.tolist()):
            assert 0 <= count <= len(self.tokens[row])
            self.tokens[row] = self.tokens[row][: len(self.tokens[row]) - count]

    def saved(self, count: int, row: int = 0) -> list[int]:
        assert count <= len(self.tokens[row])
        return self.tokens[row][:count]

    def restore(self, saved: list[int], count: int) -> None:
        assert not any(self.tokens)
        assert count <= len(saved)
        self.tokens = [saved[:count] for _ in self.tokens]
        self.restored = np.full_like(self.restored, count)

    def widen(self, capacity: int) -> bool:
        self.capacity = max(self.capacity, capacity)
        return True

    def has_room_for(self, rows: int, capacity: int) -> bool:
        return True

    def join(self, other: "TableCache") -> None:
        assert self.staged is None
        assert other.staged is None
        self.tokens = [*self.tokens, *other.tokens]
        self.restored = np.concatenate([self.restored, other.restored])

    def select(self, rows: ndarray) -> None:
        self.tokens = [self.tokens[row] for row in rows.tolist()]
        self.restored = self.restored[rows]
        self.staged = None if self.staged is None else [self.staged[row] for row in rows.tolist()]


class TableModel(Model):
    """The surface of Model over two tables; a letter is a token.

    next_token[position, previous] are the logits of the token after `previous` at `position`;
    noisy[position] those of a noisy slot at `position`, whatever its block holds.
    forwards: [batch, query tokens] of every forward so far.
    """

    def __init__(self, next_token: Tensor, noisy: Tensor, chat: bool = True) -> None:
        self.next_token, self.noisy, self.chat = next_token, noisy, chat
        self.context_length, self.vocab_size = noisy.shape
        assert next_token.shape == (self.context_length, self.vocab_size, self.vocab_size)
        assert self.vocab_size <= 3 + len(LETTERS)
        self.chooses_mode = True
        self.network = torch.nn.Module()  # by which a model is known
        self.name, self.trained, self.defaults = "table", True, dict(DEFAULTS)
        self.told, self.context_note = set(), ""
        self.base = None
        self.mask_token_id, self.mask_token_source = MASK, "given explicitly"
        self.gated = self.packed = False
        self.chain = self._compiled = self._graphs = None
        self.weight_bytes = next_token.nbytes + noisy.nbytes
        self.num_parameters = next_token.numel() + noisy.numel()
        self.special_tokens = ("<mask>", "<eos>", "<bos>")
        self.byte_ids = frozenset()
        self.special_token_ids = frozenset([MASK, EOS, BOS])
        self.tells = frozenset()
        self.acceptance, self.drafting, self.watch = ACCEPTANCE, {}, None
        self.slides = False
        self.acceptance_is_known = False
        self.eos_token_ids, self.bos_token_id, self.pad_token_id = frozenset([EOS]), BOS, EOS
        self.forwards: list[tuple[int, int]] = []

    @classmethod
    def random(cls, seed: int = 0, vocab_size: int = 12, context_length: int = 256) -> "TableModel":
        """Both tables drawn at random, about as sure of themselves as a language model."""
        generator = torch.Generator().manual_seed(seed)
        shape = (context_length, vocab_size, vocab_size)
        next_token = 4 * torch.randn(shape, generator=generator)
        return cls(next_token, 4 * torch.randn(shape[:2], generator=generator))

    @classmethod
    def spelling(cls, text: str, start: int, sharpness: float = 20.0) -> "TableModel":
        """A model that answers `text`, then EOS for ever, after any prompt of `start` tokens."""
        vocab_size, context_length = 3 + len(LETTERS), start + len(text) + 128
        targets = torch.full((context_length + 1,), EOS)
        targets[start : start + len(text)] = torch.tensor([3 + LETTERS.index(c) for c in text])
        logits = sharpness * torch.nn.functional.one_hot(targets, vocab_size).float()
        return cls(logits[1:, None].repeat(1, vocab_size, 1), logits[:-1])

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def replays(self) -> bool:
        return False

    def new_cache(  # type: ignore[override]
        self, batch: int, capacity: int, room: int | None = None
    ) -> TableCache:
        return TableCache(batch, capacity)

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        cache: TableCache | None = None,  # type: ignore[override]
        logits_at: Tensor | None = None,
    ) -> Tensor:
        assert tokens.shape == layout.position.shape
        self.forwards.append((tokens.shape[0], tokens.shape[1]))
        if cache is not None:
            cache.stage(tokens, layout)
        clean = self.next_token[layout.position, tokens]
        noisy = self.noisy[layout.position]
        logits = torch.where((layout.block == CLEAN)[..., None], clean, noisy)
        logits[..., MASK] = -torch.inf
        return logits if logits_at is None else logits[:, logits_at]

    def least_bytes(self, tokens: int) -> int:
        return self.weight_bytes

    def best_spending(self, block_size: int, rows: int, **fixed: Any) -> Spending:
        """As on a machine where branches cost nothing."""
        branches = fixed.get("branches") or block_size
        return Spending(block_size, branches, fixed.get("seeds") or 0, 1.0, 1.0)

    def worth(self, rows: int) -> float:
        return 0.0 if rows < 4 else 1.0

    @property
    def leaves_padding_out(self) -> bool:
        return True

    def encode(self, text: str, chat: bool = False) -> list[int]:
        if chat and not self.chat:
            raise ModelError(f"{self.name} has no chat template")
        return [BOS] + [3 + LETTERS.index(letter) for letter in text]

    def piece(self, token: int) -> str:
        return self.decode([token]) or self.special_tokens[token]

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[i - 3] for i in ids if i >= 3)


class ByteModel(TableModel):
    """A token is a byte, so that a character may come in pieces."""

    BYTES = sorted({*"aé€😀".encode(), 0xFF})

    def decode(self, ids: list[int]) -> str:
        return bytes(self.BYTES[i - 3] for i in ids if i >= 3).decode(errors="replace")


class FallbackModel(TableModel):
    """A token is "a" or a byte; neighbouring bytes are a text together, or none of them is."""

    BYTES = sorted({*"\n€😀".encode(), 0xFF})

    def __init__(self, next_token: torch.Tensor, noisy: torch.Tensor) -> None:
        super().__init__(next_token, noisy)
        self.byte_ids = frozenset(range(4, 4 + len(self.BYTES)))

    def decode(self, ids: list[int]) -> str:
        text = ""
        for single, run in itertools.groupby(ids, self.byte_ids.__contains__):
            if not single:
                text += "".join("a" for token in run if token == 3)
                continue
            read = bytes(self.BYTES[token - 4] for token in run)
            try:
                text += read.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(read)
        return text

    @classmethod
    def tokens_of(cls, text: str) -> list[int]:
        parts = ([3] if c == "a" else [4 + cls.BYTES.index(b) for b in c.encode()] for c in text)
        return [token for part in parts for token in part]


def tokens_of(text: str) -> list[int]:
    return [3 + ByteModel.BYTES.index(byte) for byte in text.encode()]


def saying(answer: list[int], start: int = 1, model_class=TableModel) -> TableModel:
    """A model that answers these tokens, then EOS for ever, after any prompt of `start` tokens."""
    targets = torch.full((start + len(answer) + 129,), EOS)
    targets[start : start + len(answer)] = torch.tensor(answer)
    logits = 20 * torch.nn.functional.one_hot(targets, 3 + len(LETTERS)).float()
    return model_class(logits[1:, None].repeat(1, 3 + len(LETTERS), 1), logits[:-1])


def in_full(
    query: Any, key: Any, value: Any, bias: Any, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attention.efficient` asks a GPU's kernel for, and what that may put where nothing is
    seen, or beyond its rows.
    """
    scaling = scaling or query.shape[-1] ** -0.5
    scores = query @ key.transpose(2, 3) * scaling + bias
    found = scores.logsumexp(dim=-1)
    result = scores.softmax(dim=-1) @ value
    return result, torch.nn.functional.pad(found, (0, 5), value=torch.inf)
