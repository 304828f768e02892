"""Measure a conversation whose earlier turns are kept: seconds to the first token of each answer.

    python examples/conversation.py --out benchmarks/records/conversation-smollm2.json

The model is told of many persons, then asked about one after the other, each question behind the
answers before. Every turn is answered with a prompt cache and without, in turns, which have to say
the same.
"""

import random
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import setblock
from setblock import records

NAMES = ("Anna", "Bob", "Carla", "David", "Eva", "Farid", "Grace", "Hiro", "Ines", "Jan")
CITIES = ("Lisbon", "Toronto", "Nairobi", "Osaka", "Bergen", "Lima")
HOBBIES = ("chess", "hiking", "baking bread", "the violin", "old cars", "painting", "football")
WAYS = ("anew", "kept")
console = Console(stderr=True)


def opening(model: setblock.Model, tokens: int) -> str:
    """What the model is told first, of about so many tokens, always the same."""
    draw, told = random.Random(0), ""
    while len(model.encode(told)) < tokens:
        name, city, age = draw.choice(NAMES), draw.choice(CITIES), draw.randint(18, 90)
        told += f"{name}, who is {age} and lives in {city}, likes {draw.choice(HOBBIES)}. "
    return told


def main(
    model: Annotated[str, typer.Option(help="A MODEL.")] = "smollm2",
    turns: Annotated[int, typer.Option(min=1, max=len(NAMES), help="Questions.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="Of the text before the first one.")] = 1000,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 60,
    repeats: Annotated[int, typer.Option(min=1, help="Of the conversation.")] = 5,
    out: Annotated[Path | None, typer.Option(help="File of the record.")] = None,
) -> None:
    """Hold the conversation so many times, and once more before to warm up."""
    loaded = setblock.load(model, dtype="float32", pack=None)
    told, differ = opening(loaded, tokens), False
    found: list[dict[str, list[setblock.Generation]]] = [
        {way: [] for way in WAYS} for _ in range(turns)
    ]
    for repeat in range(repeats + 1):
        cache, messages = setblock.PromptCache(), []
        for turn, name in enumerate(NAMES[:turns]):
            ask = f"Tell me about {name}, in one sentence."
            messages.append({"role": "user", "content": ask if turn else f"{told}\n\n{ask}"})
            answers: dict[str, setblock.Generation] = {}
            for way, kept in zip(WAYS, (None, cache), strict=True):
                how: Any = {"prompt_cache": kept, "max_new_tokens": max_new_tokens}
                [answers[way]] = setblock.generate(loaded, messages, **how)
                found[turn][way] += [answers[way]][: repeat > 0]
            differ |= answers["anew"].token_ids != answers["kept"].token_ids
            messages.append({"role": "assistant", "content": answers["anew"].text})
        console.print(f"{repeat} of {repeats} conversations", style="dim")
    record = records.new_record()
    lines = ["| turn | tokens of the prompt | kept | s to encode anew | kept | s to answer |"]
    lines.append("|---" * 6 + "|")
    for turn, ways in enumerate(found):
        line: dict[str, Any] = {"turn": turn + 1, "prompt_tokens": ways["kept"][0].prompt_tokens}
        line["cached_tokens"] = ways["kept"][0].cached_tokens
        for way, timed in ways.items():
            line[f"{way}_prefill_s"] = [one.prefill_s for one in timed]
            line[f"{way}_decode_s"] = [one.decode_s for one in timed]
        line["settings"] = ways["kept"][0].settings.described
        record["results"].append({"model": model, "dtype": "float32", **line})
        anew, kept, decode = (
            statistics.median(line[name])
            for name in ("anew_prefill_s", "kept_prefill_s", "kept_decode_s")
        )
        lines.append(
            f"| {turn + 1} | {line['prompt_tokens']} | {line['cached_tokens']} | {anew:.2f} "
            f"| {kept:.2f} | {decode:.2f} |"
        )
    print("\n".join(lines))
    if out is not None:
        records.save_record(record, out)
    if differ:
        console.print("an answer with a prompt cache had other tokens than without", style="red")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
