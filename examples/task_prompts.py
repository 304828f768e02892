"""Benchmarks' training questions as prompts, put the way `setblock evaluate` puts them to a model.

    python examples/task_prompts.py gsm8k=gsm8k.jsonl mbpp=mbpp.jsonl --out prompts.jsonl
    setblock train --data prompts.jsonl --chat --answers model ...

Each line is {"prompt": ...}; the tasks take turns, so that `--limit` cuts all of them alike.
"""

import json
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated

import typer

from setblock.tasks import TASKS, load_items, read_rows


def main(
    sources: Annotated[list[str], typer.Argument(metavar="TASK=FILE...", help="Rows of a task.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
    each: Annotated[int | None, typer.Option(help="Questions of each task at most.", min=1)] = None,
) -> None:
    """Write the file."""
    if out.exists():
        raise typer.BadParameter(f"{out} exists already")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"no folder {str(out.parent)!r} for --out")
    prompts = []
    for source in sources:
        name, _, file = source.partition("=")
        if name not in TASKS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(TASKS)}, in {source!r}")
        task = TASKS[name]
        try:
            items = load_items(task, read_rows(file), each)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{source}: {error}") from error
        prompts.append([task.prompt(item, (), chat=True) for item in items])
    turns = [one for one in chain(*zip_longest(*prompts)) if one is not None]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in turns]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {out}")


if __name__ == "__main__":
    typer.run(main)
