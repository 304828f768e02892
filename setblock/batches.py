"""From trl's tokenised rows to batches: sample ids, cuts, the fill behind the end, padding."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from datasets import Dataset, IterableDataset, Value
from jaxtyping import Int
from torch import Tensor

from setblock import objective

logger = logging.getLogger(__name__)


@dataclass
class Collator:
    """Rows -> a right-padded batch with the places of its documents.

    Yields input_ids, labels, position_ids and document [batch, length], and sample_id and lengths
    [batch, documents of the fullest row], with length 0 for what a row lacks.
    """

    pad_token_id: int
    multiple: int = 1

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        for name in ("input_ids", "labels", "sample_id"):
            if name not in rows[0]:
                raise ValueError(f"rows need the column {name}, got {', '.join(rows[0])}")
        length = max(len(row["input_ids"]) for row in rows)
        length += -length % self.multiple
        lengths = [row.get("seq_lengths", [len(row["input_ids"])]) for row in rows]
        num_documents = max(map(len, lengths))
        padded_lengths = _pad(lengths, num_documents, 0)
        position, document = objective.document_places(padded_lengths, length)
        return {
            "input_ids": _pad([row["input_ids"] for row in rows], length, self.pad_token_id),
            "labels": _pad([row["labels"] for row in rows], length, objective.IGNORE),
            "position_ids": position,
            "document": document,
            "sample_id": _pad([_sample_ids(row) for row in rows], num_documents, 0),
            "lengths": padded_lengths,
        }


def with_sample_ids(dataset: Any) -> Any:
    """The dataset with a sample_id column: its own, else the row's index."""
    if "sample_id" in (dataset.column_names or ()):
        kind = (dataset.features or {}).get("sample_id")
        if isinstance(kind, Value) and "int" not in kind.dtype:
            raise ValueError(f"sample_id must be a column of integers, got {kind.dtype}")
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.map(lambda _, index: {"sample_id": index}, with_indices=True)
    return dataset.add_column("sample_id", range(len(dataset)))


def map_datasets(function: Callable[[Any], Any], datasets: Any) -> Any:
    """`function` of one dataset, or of each of a dict of them, or None of None."""
    if datasets is None:
        return None
    if isinstance(datasets, dict):
        return {name: function(dataset) for name, dataset in datasets.items()}
    return function(datasets)


def repeat_sample_id(row: Mapping[str, Any]) -> dict[str, list[int]]:
    return {"sample_id": [row["sample_id"]] * len(row["input_ids"])}


def cut(dataset: Any, length: int, name: str) -> Any:
    """Rows of at most `length` tokens, those with a label left; says how many it changed.

    Raises: ValueError if none is left.
    """
    cut = dataset.map(sliced, fn_kwargs={"length": length})
    left = cut.filter(_has_label)
    if not isinstance(dataset, Dataset):
        return left  # a stream can't be counted
    num_cut = sum(len(row) > length for row in dataset["input_ids"])
    if not len(left):
        raise ValueError(
            f"none of the {len(dataset)} rows of the {name} dataset has a token to learn "
            f"within max_length={length}: raise it, or check prompts and completions"
        )
    if num_cut or len(left) < len(dataset):
        logger.warning(
            f"{name} dataset: {num_cut} of {len(dataset)} rows were longer than max_length="
            f"{length} and were cut; {len(dataset) - len(left)} rows without a token to learn "
            "were left out"
        )
    return left


def refuse_mask_token(dataset: Any, mask_token_id: int) -> None:
    """Raises: ValueError for a text that holds the mask token; a stream is checked as it comes."""
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return
    for index, ids in enumerate(dataset["input_ids"]):
        if mask_token_id in ids:
            raise ValueError(
                f"row {index} of the train dataset holds the mask token {mask_token_id} in its "
                "text: take it out, or choose another mask_token_id"
            )


def sliced(row: Mapping[str, Any], length: int) -> dict[str, list[int]]:
    return {name: row[name][:length] for name in ("input_ids", "labels")}


def _has_label(row: Mapping[str, Any]) -> bool:
    return any(label != objective.IGNORE for label in row["labels"])


def fill_behind_end(row: Mapping[str, Any], ends: list[int], count: int) -> dict[str, list[int]]:
    """The row with `count` more of the labelled end token that it ends in, if it does.

    A chat template's line break behind the end gives way to them.
    """
    ids, labels = row["input_ids"], row["labels"]
    first = max(len(ids) - 1 - objective.BEHIND_END, 0)
    last = next((i for i in reversed(range(first, len(ids))) if ids[i] in ends), None)
    if last is None or labels[last] == objective.IGNORE:
        return {"input_ids": ids, "labels": labels}
    fill = [ids[last]] * count
    return {"input_ids": ids[: last + 1] + fill, "labels": labels[: last + 1] + fill}


def _sample_ids(row: dict[str, Any]) -> list[int]:
    """The sample id of each document of a row; a packed row holds them once per token."""
    if "seq_lengths" not in row:
        return [row["sample_id"]]
    if isinstance(row["sample_id"], int):
        raise ValueError("a packed row (with seq_lengths) needs a sample_id for each of its tokens")
    starts = accumulate(row["seq_lengths"][:-1], initial=0)
    return [row["sample_id"][start] for start in starts]


def _pad(rows: list[list[int]], length: int, value: int) -> Int[Tensor, "batch length"]:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])
