"""Measure answers that follow a JSON Schema: how many fit, tokens per forward, time of a forward.

    python examples/structured.py --out benchmarks/records/structured-smollm2.json
    python examples/structured.py --url http://localhost:8000/v1 --out structured-vllm.json

The model is asked to tell as JSON what a sentence says of a person. It answers freely, under a
schema, and under the same schema without white space between its parts, each token by token and
verified, which have to say the same. With --url a running `setblock serve --engine vllm` is asked,
whose own setting says how much white space there may be.
"""

import functools
import itertools
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console

import setblock
from setblock import records
from setblock.scores import percent

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 40},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 4},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "free": {},
    "schema": {"json_schema": PERSON},
    "schema, compact": {"json_schema": {**PERSON, "x-guidance": {"whitespace_flexible": False}}},
}
MODES = ("ntp", "verified")
NAMES = ("Anna Smith", "Bob Miller", "Carla Rossi", "David Kim", "Eva Novak", "Farid Haddad")
CITIES = ("Lisbon", "Toronto", "Nairobi", "Osaka", "Bergen", "Lima")
HOBBIES = ("chess", "hiking", "baking bread", "the violin", "old cars", "painting", "football")
console = Console(stderr=True)


def sentences(count: int) -> list[str]:
    """So many about persons, always the same."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        one, other = draw.sample(HOBBIES, 2)
        name, city, age = draw.choice(NAMES), draw.choice(CITIES), draw.randint(18, 90)
        found.append(
            draw.choice(
                (
                    f"{name}, who is {age} and lives in {city}, likes {one} and {other}.",
                    f"At {age}, {name} moved to {city}. {one} and {other} fill the days.",
                    f"{name} from {city} turned {age} today and asked for a book on {one}.",
                )
            )
        )
    return found


def fits(text: str) -> bool:
    """Whether a text is JSON of the schema."""
    try:
        told = json.loads(text)
    except ValueError:
        return False
    kinds = {"name": str, "age": int, "city": str, "hobbies": list}
    return (
        isinstance(told, dict)
        and told.keys() == kinds.keys()
        and all(type(told[name]) is kind for name, kind in kinds.items())
        and all(type(one) is str for one in told["hobbies"])
    )


def tells_age(text: str, sentence: str) -> bool:
    """Whether a text gives the age that the sentence has, in the form of JSON."""
    age = re.search(r"\d+", sentence)
    return age is not None and bool(re.search(rf'"age": ?"?{age[0]}\b', text))


class Told(NamedTuple):
    """An answer. seconds: of its forwards alone, over HTTP of all of it."""

    text: str
    token_ids: tuple[int, ...]
    nfe: int
    seconds: float
    settings: dict[str, Any]


def asked_here(loaded: setblock.Model, prompt: list[dict[str, str]], how: dict[str, Any]) -> Told:
    [found] = setblock.generate(loaded, prompt, **how)
    settings = found.settings.described
    return Told(found.text, found.token_ids, found.nfe, found.decode_s, settings)


def asked_there(url: str, model: str, prompt: list[dict[str, str]], how: dict[str, Any]) -> Told:
    """What a server of vLLM's says to a prompt."""
    body: dict[str, Any] = {
        "model": model,
        "messages": prompt,
        "temperature": 0,
        "max_tokens": how["max_new_tokens"],
        "return_token_ids": True,
        "vllm_xargs": {"mode": how["mode"]},
    }
    if "json_schema" in how:
        form = {"name": "person", "schema": how["json_schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    start = time.perf_counter()
    response = httpx.post(f"{url}/chat/completions", json=body, timeout=600)
    seconds = time.perf_counter() - start
    if response.status_code != 200:
        raise typer.BadParameter(f"{response.status_code}: {response.text}", param_hint="--url")
    told = response.json()
    forwards = told["metrics"]["speculative_decoding"]["num_spec_steps"]
    [choice] = told["choices"]
    ids = tuple(choice["token_ids"])
    return Told(choice["message"]["content"], ids, forwards, seconds, how)


def main(
    model: Annotated[str, typer.Option(help="A MODEL.")] = "smollm2",
    limit: Annotated[int, typer.Option(min=1, help="Sentences.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 120,
    url: Annotated[str | None, typer.Option(help="Of a server, with its /v1.")] = None,
    out: Annotated[Path | None, typer.Option(help="File of the record.")] = None,
) -> None:
    """Answer every sentence in every way, one at a time, the ways in turns."""
    if url is None:
        loaded = setblock.load(model, dtype="float32", pack=None)
        ask_one = functools.partial(asked_here, loaded)
    else:
        ask_one = functools.partial(asked_there, url, model)
    ask = "Write name, age, city and hobbies of this person as JSON, and nothing else: "
    told = sentences(limit)
    prompts = [[{"role": "user", "content": ask + text}] for text in told]
    forms = list(FORMATS) if url is None else ["free", "schema"]
    ways = list(itertools.product(forms, MODES))
    answers: dict[Any, list[Told]] = {way: [] for way in ways}
    for done, prompt in enumerate([prompts[0], *prompts]):  # once more, to warm up
        for form, mode in ways:
            how: Any = {"mode": mode, "max_new_tokens": max_new_tokens, **FORMATS[form]}
            answers[form, mode] += [ask_one(prompt, how)][: done > 0]
        console.print(f"{done} of {limit} sentences", style="dim")
    record = records.new_record()
    lines = ["| answers | mode | of the schema | right age | as ntp | tokens | per forward | ms |"]
    lines.append("|---" * 8 + "|")
    for form, mode in ways:
        found, plain = answers[form, mode], answers[form, "ntp"]
        num_tokens, nfe = sum(len(one.token_ids) for one in found), sum(one.nfe for one in found)
        same = [a.token_ids == b.token_ids for a, b in zip(found, plain, strict=True)]
        forward_s = statistics.median(one.seconds / one.nfe for one in found)
        ages = [tells_age(one.text, text) for one, text in zip(found, told, strict=True)]
        line = {
            "format": form,
            "mode": mode,
            "num_answers": len(found),
            "fitting_share": sum(fits(one.text) for one in found) / len(found),
            "right_age_share": sum(ages) / len(found),
            "identical_share": sum(same) / len(found),
            "num_tokens": num_tokens,
            "nfe": nfe,
            "tokens_per_forward": num_tokens / nfe,
            "median_forward_s": forward_s,
            "answer_s": statistics.median(one.seconds for one in found),
            "texts": [one.text for one in found],
            "settings": found[0].settings,
        }
        record["results"].append({"model": model, "dtype": "float32", **line})
        lines.append(
            f"| {form} | {mode} | {percent(line['fitting_share'])} "
            f"| {percent(line['right_age_share'])} | {percent(line['identical_share'])} "
            f"| {num_tokens} | {num_tokens / nfe:.2f} | {1000 * forward_s:.0f} |"
        )
    print("\n".join(lines))
    if out is not None:
        records.save_record(record, out)
    if any(line["identical_share"] < 1 for line in record["results"]):
        console.print("verified decoding said other tokens than ntp", style="red")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
