"""How often a copied token is right, by how many tokens before it match.

    python examples/copied_tokens.py smollm2 gsm8k=gsm8k.jsonl prompts=question.jsonl

The model answers questions token by token; then each token of its answers is looked up in the text
before it, as `--lookup` does. What `branches.chance_of_copy` assumes stands beside what was found.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from setblock.branches import chance_of_copy, looked_up
from setblock.generation import encode, generate
from setblock.loading import load
from setblock.names import ModelError
from setblock.records import new_record, save_record
from setblock.tasks import TASKS, load_items, read_rows


def found(prompt: list[int], answer: tuple[int, ...]) -> Counter[tuple[int, bool]]:
    """(tokens that matched, whether the copied token was right): how often, in one answer."""
    text, counts = np.array([[*prompt, *answer]]), Counter[tuple[int, bool]]()
    for end in range(len(prompt) + 1, text.shape[1]):
        copied, matched = looked_up(text, np.array([end]), 1)
        if matched[0]:
            counts[int(matched[0]), bool(copied[0, 0] == text[0, end])] += 1
    return counts


def main(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Who answers.")],
    sources: Annotated[list[str], typer.Argument(metavar="TASK=FILE...", help="Rows of a task.")],
    each: Annotated[int, typer.Option(help="Questions of each task at most.", min=1)] = 24,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.", min=2)] = 96,
    batch_size: Annotated[int, typer.Option(help="Answers at a time.", min=1)] = 8,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    out: Annotated[Path, typer.Option(help="The record.")] = Path(
        "benchmarks/records/copied-tokens.json"
    ),
) -> None:
    """Answer, look up, and write the record."""
    record = new_record()
    try:
        model = load(name, dtype=dtype)
    except ModelError as error:
        raise typer.BadParameter(str(error)) from error
    tasks, counts = {}, Counter[tuple[int, bool]]()
    for source in sources:
        task, _, file = source.partition("=")
        if task not in TASKS:
            raise typer.BadParameter(f"{task!r} is none of {', '.join(TASKS)}, in {source!r}")
        try:
            items = load_items(TASKS[task], read_rows(file))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{source}: {error}") from error
        some = items[:: max(len(items) // each, 1)][:each]  # of all parts of a file
        prompts = encode(model, [TASKS[task].prompt(item, (), chat=True) for item in some], True)
        options: Any = {"mode": "ntp", "max_new_tokens": max_new_tokens}
        answers = generate(model, prompts, batch_size=batch_size, **options)
        tasks[task] = {"questions": len(some), "tokens": sum(len(one.token_ids) for one in answers)}
        print(f"{task}: {tasks[task]['tokens']} tokens in {len(some)} answers", flush=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            counts += found(prompt, answer.token_ids)
    print("\n| tokens that match | looked up | right | assumed |\n| ---: | ---: | ---: | ---: |")
    for matched in sorted({matched for matched, _ in counts}):
        right, wrong = counts[matched, True], counts[matched, False]
        line = {"matched": matched, "looked_up": right + wrong, "right": right / (right + wrong)}
        line["assumed"] = float(chance_of_copy(np.array(matched)))
        record["results"].append(line)
        print("| {matched} | {looked_up} | {right:.2f} | {assumed:.2f} |".format(**line))
    save_record({**record, "model": model.name, "tasks": tasks}, out)
    print(f"\n{out}")


if __name__ == "__main__":
    typer.run(main)
