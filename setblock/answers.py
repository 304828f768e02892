"""A model's own answers to the prompts of a dataset, for training on them instead of the data's.

The masked half then learns what the next-token half would write, not the style of other authors.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset

from setblock.files import end_last_line, lines_of
from setblock.generation import finished
from setblock.model import Model
from setblock.names import lasting
from setblock.watch import prompts_of

# Of a line in the file of answers, at least.
OURS = {"index": int, "prompt": (str, list), "prompt_ids": list, "token_ids": list, "text": str}


def regenerate(
    model: Model,
    rows: Dataset,
    file: Path,
    max_new_tokens: int,
    batch_size: int,
    on_progress: Callable[[int], None] = lambda count: None,
    on_start: Callable[[int], None] = lambda known: None,
    writer: Callable[[Model], Model] = lambda model: model,
) -> Dataset:
    """Each prompt with the model's greedy next-token answer.

    Its rows: input_ids, of both, and completion_mask, which is 1 on the answer.

    An answer that reaches max_new_tokens goes as far as it goes: no end is put behind it. Empty
    ones are left out.
    on_start: called with the number of answers that are there already; on_progress: with the number
    there is by now. writer: what answers in the model's place, asked for if any answer is missing.
    Effects: each answer is added to `file` as it comes, one JSON object a line; a second call goes
    on where the first was stopped.
    Raises: ValueError for a file that belongs to other rows, and if all answers are empty.
    """
    prompts = prompts_of(model, rows)  # of those known already not: a template may tell the date
    how = {"model": lasting(model.author), "max_new_tokens": max_new_tokens}
    known: dict[int, dict[str, Any]] = {}
    for number, _, answer in lines_of(file):
        if not isinstance(answer, dict) or not all(
            isinstance(answer.get(name), kind) for name, kind in OURS.items()
        ):
            raise ValueError(f"{file}:{number}: no answer of ours; move the file away")
        index = answer["index"]
        asked = {**how, "prompt": rows[index]["prompt"] if index < len(rows) else None}
        for name, value in asked.items():
            if answer.get(name) != value:
                raise ValueError(
                    f"{file} holds answers of another run: {name} of answer {index} differs; "
                    "move it away"
                )
        known[index] = answer
    missing = [index for index in range(len(rows)) if index not in known]
    on_start(len(known))
    file.parent.mkdir(parents=True, exist_ok=True)
    end_last_line(file)
    with file.open("a", encoding="utf-8") as out:
        answers = (
            finished(
                writer(model),
                [prompts[index] for index in missing],
                mode="ntp",
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
            )
            if missing
            else ()
        )
        for row, generation in answers:
            index = missing[row]
            known[index] = {
                "index": index,
                **how,
                "prompt": rows[index]["prompt"],
                "prompt_ids": prompts[index],
                "token_ids": list(generation.token_ids),
                "text": generation.text,
                "finish_reason": generation.finish_reason,
            }
            out.write(json.dumps(known[index]) + "\n")
            out.flush()
            on_progress(len(known))
    texts = [known[index] for index in range(len(rows)) if known[index]["text"]]
    if not texts:
        raise ValueError(f"all of the model's {len(rows)} answers are empty")
    return Dataset.from_list(
        [
            {
                "input_ids": answer["prompt_ids"] + answer["token_ids"],
                "completion_mask": [0] * len(answer["prompt_ids"]) + [1] * len(answer["token_ids"]),
            }
            for answer in texts
        ]
    )
