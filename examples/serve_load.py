"""Load a server of `setblock serve` and write what came back: throughput, latencies, losses.

    setblock serve nano --engine vllm &
    python examples/serve_load.py --url http://127.0.0.1:8000/v1 --out runs/load.json

Every mode answers the same questions (problems of the bundled model, or those of a file) at every
concurrency, in turns, and on every server, if there are several; ratios are to the first mode on
the first server in the same round, and so is the share of answers that are the same. A share of the
requests is left in the middle, as clients do. What vLLM's own counters say before and after stands
beside.
"""

import asyncio
import itertools
import json
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from setblock import nano, records
from setblock.tasks import read_rows

console = Console(stderr=True)


@dataclass
class Answer:
    """One request: its text, seconds to the first of it and between pieces, and tokens; left: by
    the client.
    """

    text: str = ""
    first_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    tokens: int = 0
    left: bool = False


async def ask(
    client: AsyncOpenAI, model: str, question: str, most: int, own: dict[str, Any], leave: bool
) -> Answer:
    """The answer as it streams in, `most` tokens of it; `leave` hangs up behind the first text."""
    begin, times, pieces, tokens = time.perf_counter(), [], [], 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=most,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=own,
    )
    async for chunk in stream:
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
            pieces.append(chunk.choices[0].delta.content)
            if leave:
                await stream.close()
                return Answer(left=True)
    gaps = tuple(b - a for a, b in itertools.pairwise(times))
    return Answer("".join(pieces), times[0] - begin if times else 0.0, gaps, tokens)


async def round_of(
    client: AsyncOpenAI,
    model: str,
    questions: list[str],
    most: int,
    concurrency: int,
    own: dict[str, Any],
    leave_every: int,
) -> tuple[float, list[Answer]]:
    """Seconds of all questions, at most `concurrency` at a time, and their answers."""
    gate = asyncio.Semaphore(concurrency)

    async def one(number: int, question: str) -> Answer:
        async with gate:
            leave = bool(leave_every) and number % leave_every == leave_every - 1
            return await ask(client, model, question, most, own, leave)

    begin = time.perf_counter()
    answers = await asyncio.gather(*(one(*pair) for pair in enumerate(questions)))
    return time.perf_counter() - begin, list(answers)


COUNTERS = {
    "forwards": "vllm:diffusion_num_denoising_steps_total",
    "committed": "vllm:diffusion_num_committed_tokens_total",
    "running": "vllm:num_requests_running",
    "cache_share": "vllm:kv_cache_usage_perc",
}


def counted(url: str, server_pid: int | None) -> dict[str, float]:
    """vLLM's counters, if the server has any, and the memory of its processes."""
    page = httpx.get(url.removesuffix("/v1") + "/metrics")
    found: dict[str, float] = {}
    for name, theirs in COUNTERS.items() if page.is_success else ():
        values = re.findall(rf"^{theirs}{{.*}} (\S+)$", page.text, re.MULTILINE)
        found[name] = sum(map(float, values))
    if server_pid is not None:
        server = psutil.Process(server_pid)
        every = [server, *server.children(recursive=True)]
        found["rss_bytes"] = sum(one.memory_info().rss for one in every)
    return found


def at_rest(url: str, server_pid: int | None) -> dict[str, float]:
    """The counters once nothing runs: what was left in the middle ends a moment later."""
    for _ in range(100):
        found = counted(url, server_pid)
        if not found.get("running"):
            return found
        time.sleep(0.1)
    return found


def line_of(seconds: float, answers: list[Answer]) -> dict[str, Any]:
    """What a round comes to."""
    whole = [one for one in answers if not one.left]
    firsts = sorted(one.first_s for one in whole)
    gaps = sorted(gap for one in whole for gap in one.gaps_s)
    return {
        "requests": len(answers),
        "left": len(answers) - len(whole),
        "lost": sum(not one.tokens for one in whole),
        "tokens": sum(one.tokens for one in whole),
        "tokens_per_second": sum(one.tokens for one in whole) / seconds,
        "first_text_s": [_at(firsts, 0.5), _at(firsts, 0.99)],
        "between_texts_s": [_at(gaps, 0.5), _at(gaps, 0.99)],
        "wall_s": seconds,
    }


def problems_of_nano(count: int) -> list[str]:
    """Of all families, in turns."""
    each = -(-count // len(nano.FAMILIES))
    families = [nano.problems(name, "validation", each) for name in nano.FAMILIES]
    return [one.prompt for some in zip(*families, strict=True) for one in some][:count]


def questions_of(data: Path, field: str) -> list[str]:
    """Those in a file. Raises: OSError; ValueError for what holds none."""
    rows = read_rows(data).rows
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise ValueError(f"{data}, row {number}: {field} must be a text (--field names it)")
    return [row[field] for row in rows]


def fields_of(mode: str) -> dict[str, Any]:
    """What a request asks for. Raises: ValueError naming what is no JSON."""
    if not mode.startswith("{"):
        return {"mode": mode}
    try:
        return json.loads(mode)
    except ValueError as error:
        raise ValueError(f"--mode must be a mode or JSON, got {mode!r} ({error})") from None


def _at(values: list[float], share: float) -> float | None:
    return values[min(int(share * len(values)), len(values) - 1)] if values else None


def _ratio(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """The median ratio of the rounds that have both."""
    ratios = [one / other for one, other in pairs if one and other]
    return statistics.median(ratios) if ratios else None


def _label(mode: str) -> str:
    """A mode for the table, fields as words."""
    return re.sub(r'[{}":,]', "", mode).removeprefix("mode ")


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


async def measure(
    urls: list[str],
    model: str,
    modes: list[str],
    sizes: list[int],
    questions: list[str],
    before: str,
    most: int,
    repeats: int,
    leave_every: int,
    extra: bool,
    server_pid: int | None,
) -> list[dict[str, Any]]:
    """A line for each server, mode and concurrency: medians over the rounds, the first left out."""
    lines = []
    for size in sizes:
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for repeat in range(repeats + 1):
            texts: list[str] = []  # of the first mode
            for mode, url in itertools.product(modes, urls):
                own = fields_of(mode)
                own = {"vllm_xargs": own} if extra else own
                every = leave_every if repeat else 0
                asked = questions if repeat else questions[: 2 * size]
                if before:  # nothing of which is known from an earlier round
                    asked = [f"{mode} {size} {repeat}\n{before}\n{one}" for one in asked]
                at_first = at_rest(url, server_pid)
                # A client of its own: connections that wait for their turn are closed.
                async with AsyncOpenAI(
                    base_url=url, api_key="none", max_retries=0, timeout=600
                ) as client:
                    seconds, answers = await round_of(client, model, asked, most, size, own, every)
                line = line_of(seconds, answers)
                texts = texts or [one.text for one in answers]
                pairs = zip(answers, texts, strict=True)
                line["same"] = sum(one.text == text for one, text in pairs if not one.left)
                after = at_rest(url, server_pid)
                line |= {"before": at_first, "after": after, "tokens_per_forward": None}
                if steps := after.get("forwards", 0) - at_first.get("forwards", 0):
                    # Of answers that were left nobody knows how many tokens they had.
                    tokens = after["committed"] - at_first["committed"]
                    line["tokens_per_forward"] = (
                        tokens if line["left"] else line["tokens"]
                    ) / steps
                if repeat:
                    found.setdefault((mode, url), []).append(line)
        for (mode, url), rounds in found.items():
            pairs = list(zip(rounds, found[modes[0], urls[0]], strict=True))
            gains = [one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs]
            middle = sorted(rounds, key=lambda one: one["tokens_per_second"])[len(rounds) // 2]
            lost = sum(one["lost"] for one in rounds)
            waits = {
                f"{name}_ratio": [
                    _ratio([(one[name][at], other[name][at]) for one, other in pairs])
                    for at in (0, 1)
                ]
                for name in ("first_text_s", "between_texts_s")
            }
            lines.append(
                {
                    "mode": mode, "url": url, "concurrency": size, "model": model,
                    "task": "load",
                    "throughput_ratio": statistics.median(gains),
                    "throughput_ratio_range": (min(gains), max(gains)), **middle, "lost": lost,
                    **waits,
                    "after_each_round": [one["after"] for one in rounds],
                }
            )  # fmt: skip
            console.print(
                f"{_label(mode)} at {size}, {url}: {middle['tokens_per_second']:.0f} tokens/s"
            )
    return lines


def main(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="The server's, with /v1. Again for more, which take turns. "
            "Default: http://127.0.0.1:8000/v1."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The name it is served by.")] = "nano",
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Or fields of a request as JSON, mode among them. Again for more; ratios are to "
            "the first."
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Again for more. Default: 1, 4, 16 and 64.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Of each round.")] = 64,
    data: Annotated[
        Path | None, typer.Option(help="Rows with the questions. Default: nano's problems.")
    ] = None,
    field: Annotated[str, typer.Option(help="The column that holds them.")] = "question",
    before: Annotated[
        Path | None,
        typer.Option(
            help="Text to put before every question, behind a line of the round's and mode's own: "
            "what requests at the same time have in common, and none before them. Modes answer "
            "other prompts then."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 200,
    repeats: Annotated[int, typer.Option(help="Rounds, after one that warms up.")] = 3,
    leave_every: Annotated[
        int, typer.Option(help="Every so many requests one is left in the middle; 0 is none.")
    ] = 0,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="The server is transformers', not vLLM's.")
    ] = False,
    server_pid: Annotated[
        int | None, typer.Option(help="The server's process, whose memory is watched.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the record to this file.")] = None,
) -> None:
    """Ask a server under every mode and concurrency."""
    modes, urls = mode or ["ntp", "sbd", "verified"], url or ["http://127.0.0.1:8000/v1"]
    try:
        if server_pid is not None and len(urls) > 1:
            raise ValueError(f"--server-pid is for one server, got {len(urls)} of --url")
        for one in modes:
            fields_of(one)
        questions = problems_of_nano(requests) if data is None else questions_of(data, field)
        common = "" if before is None else before.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    questions = questions[:requests]
    record = records.new_record()
    record["results"] = asyncio.run(
        measure(
            urls, model, modes, concurrency or [1, 4, 16, 64],
            questions, common, max_tokens, repeats, leave_every, not transformers, server_pid,
        )
    )  # fmt: skip
    if out is not None:
        records.save_record(record, out)
    shown = Table(title=f"{model} at {', '.join(urls)}; ratios to the first mode")
    names = ("tokens/s", "ratio", "per forward", "first text", "between texts", "same", "lost")
    for name in ("mode", "server", "at once", *names):
        shown.add_column(name, justify="left" if name == "mode" else "right")
    for line in record["results"]:
        waits = [
            ", ".join(map(_rate, line[f"{name}_s_ratio"]))
            for name in ("first_text", "between_texts")
        ]
        shown.add_row(
            _label(line["mode"]), str(1 + urls.index(line["url"])), str(line["concurrency"]),
            f"{line['tokens_per_second']:.0f}", f"{line['throughput_ratio']:.2f}x",
            _rate(line["tokens_per_forward"]),
            *waits, str(line["same"]), str(line["lost"]),
        )  # fmt: skip
    Console().print(shown)


if __name__ == "__main__":
    typer.run(main)
