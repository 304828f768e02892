"""A model's own answers to the prompts of a dataset, for training on them instead of the data's.

The masked half then learns what the next-token half would write, not the style of other authors.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from setblock.generation import stream
from setblock.loading import lasting
from setblock.model import Model
from setblock.watch import prompts_of


def regenerate(
    model: Model,
    rows: Dataset,
    file: Path,
    max_new_tokens: int,
    batch_size: int,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Dataset:
    """The rows with the model's greedy next-token answer for a completion.

    Answers that reach max_new_tokens without an end are left out: they would teach not to end.
    Effects: each answer is added to `file` as it comes, one JSON object a line; a second call goes
    on where the first was stopped.
    Raises: ValueError for rows without prompts, for a file that belongs to other rows, and if no
    answer ends.
    """
    if "prompt" not in rows.column_names:
        raise ValueError("answers 'model' needs rows of prompt and completion")
    prompts = prompts_of(model, rows)
    how = {"model": lasting(model.name), "max_new_tokens": max_new_tokens}
    known: dict[int, dict[str, Any]] = {}
    if file.exists():
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            try:
                answer = json.loads(line)
            except ValueError:
                continue  # cut short by a kill
            if not (isinstance(answer, dict) and {"index", "text", "finish_reason"} <= set(answer)):
                raise ValueError(f"{file}:{number}: no answer of ours; move the file away")
            index = answer["index"]
            asked = {**how, "prompt_ids": prompts[index] if index < len(rows) else None}
            for name, value in asked.items():
                if answer.get(name) != value:
                    raise ValueError(
                        f"{file} holds answers of another run: {name} of answer {index} differs; "
                        "move it away"
                    )
            known[index] = answer
    missing = [index for index in range(len(rows)) if index not in known]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        if file.stat().st_size and not file.read_text(encoding="utf-8").endswith("\n"):
            out.write("\n")
        reveals = stream(
            model,
            [prompts[index] for index in missing],
            mode="ntp",
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
        )
        for reveal in reveals if missing else ():
            if (generation := reveal.generation) is None:
                continue
            index = missing[reveal.row]
            known[index] = {
                "index": index,
                **how,
                "prompt_ids": prompts[index],
                "text": generation.text,
                "finish_reason": generation.finish_reason,
            }
            out.write(json.dumps(known[index]) + "\n")
            out.flush()
            on_progress(len(known))
    kept = [i for i in range(len(rows)) if known[i]["finish_reason"] == "eos" and known[i]["text"]]
    if not kept:
        raise ValueError(
            f"none of the model's {len(rows)} answers ends within {max_new_tokens} tokens; raise "
            "answer_tokens"
        )

    def own(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        text = known[kept[index]]["text"]
        if isinstance(row["prompt"], str):
            return {"completion": text}
        return {"completion": [{"role": "assistant", "content": text}]}

    return rows.select(kept).map(own, with_indices=True)
