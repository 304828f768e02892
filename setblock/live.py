"""What the terminal shows: answers coloured by the forward that revealed each token, progress."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from setblock.generation import stream
from setblock.model import Model
from setblock.results import Generation

# Neighbouring forwards are easy to tell apart; after the last colour the first comes again.
COLORS = (
    "cyan",
    "magenta",
    "yellow",
    "green",
    "blue",
    "red",
    "white",
    "bright_cyan",
    "bright_magenta",
)

EVERY_S = 30  # between lines of progress, where no terminal could show a bar

NAMES = {
    "ntp": "token by token",
    "sbd": "set block decoding",
    "verified": "verified blocks",
}


def watch(
    model: Model,
    prompt: str,
    options: dict[str, Any],
    console: Console | None,
    animate: bool,
    remark: Callable[[Generation], str] = lambda generation: "",
) -> Generation:
    """The answer to a prompt, shown on the console, if there is one, as forwards reveal it.

    remark: what the line under the answer begins with.
    """
    if console is None or not (animate and console.is_terminal):
        generation = _last(stream(model, [prompt], chat=True, **options))
        if console is not None:
            console.print(_answer(model, _slots(generation)))
            console.print(_caption(generation, remark(generation)), style="dim")
        return generation
    slots: dict[int, tuple[int, int]] = {}
    generation = None
    with Live(console=console, auto_refresh=False) as live:
        for reveal in stream(model, [prompt], chat=True, **options):
            slots |= {place: (token, reveal.nfe) for place, token in reveal.drafts}
            generation = reveal.generation
            if generation is not None:
                slots = _slots(generation)
            live.update(_answer(model, slots), refresh=True)
    assert generation is not None
    console.print(_caption(generation, remark(generation)), style="dim")
    return generation


def _last(reveals: Iterator) -> Generation:
    *_, last = reveals
    return last.generation


def _slots(generation: Generation) -> dict[int, tuple[int, int]]:
    """Place -> (token, forward that revealed it)."""
    pairs = zip(generation.token_ids, generation.reveal_step, strict=True)
    return dict(enumerate(pairs))


def _answer(model: Model, slots: dict[int, tuple[int, int]]) -> Text:
    """The answer so far; a place not revealed yet shows as a dot."""
    text = Text()
    for place in range(max(slots, default=-1) + 1):
        if place not in slots:
            text.append("·", style="dim")
            continue
        token, nfe = slots[place]
        text.append(model.decode([token]), style=COLORS[(nfe - 1) % len(COLORS)])
    return text


def _caption(generation: Generation, remark: str) -> str:
    mode = NAMES[generation.settings.mode]
    return (
        f"  {remark}{mode}: {generation.num_tokens} tokens in {generation.nfe} forwards, "
        f"{generation.tokens_per_forward:.2f} tokens per forward, {generation.wall_s:.3f} s\n"
    )


def total(answers: Sequence[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Sums over the answers of one mode; correct is None where nothing was checked.

    same: answers with the tokens of token by token, None for itself and where it was not shown.
    """
    mine = [answer for answer in answers if answer["mode"] == mode]
    sums = {name: sum(answer[name] for answer in mine) for name in ("num_tokens", "nfe", "wall_s")}
    checked = [answer["correct"] for answer in mine if answer["correct"] is not None]
    exact = {one["prompt"]: one["token_ids"] for one in answers if one["mode"] == "ntp"}
    same = sum(exact.get(answer["prompt"]) == answer["token_ids"] for answer in mine)
    return {
        "mode": str(mode),
        "answers": len(mine),
        "correct": sum(checked) if checked else None,
        "same": same if exact and mode != "ntp" else None,
        **sums,
        "tokens_per_forward": sums["num_tokens"] / sums["nfe"],
    }


def table(totals: Sequence[dict[str, Any]]) -> Table:
    """The totals of both modes side by side."""
    shown = Table(title="All prompts")
    names = {"correct": "right", "same": "same\ntext"}
    counted = [name for name in names if any(row[name] is not None for row in totals)]
    heads = [names[name] for name in counted]
    for column in ("decoding", *heads, "tokens", "forwards", "per\nforward", "seconds"):
        named = column == "decoding"
        shown.add_column(column, justify="left" if named else "right", no_wrap=not named)
    for row in totals:
        shares = [
            "" if row[name] is None else f"{row[name]} of {row['answers']}" for name in counted
        ]
        shown.add_row(
            NAMES[row["mode"]],
            *shares,
            str(row["num_tokens"]),
            str(row["nfe"]),
            f"{row['tokens_per_forward']:.2f}",
            f"{row['wall_s']:.3f}",
        )
    return shown


@contextmanager
def progress_bar(
    console: Console, label: str, count: int, say: Callable[[str], None]
) -> Iterator[Callable[[Any], None]]:
    """A bar of `count` problems; the function it yields takes the running score after each.

    say: `lines` of the console, one for all bars of a command.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_interactive) as progress:
        bar = progress.add_task(label, total=count)

        def advance(score: Any) -> None:
            judged = score.accuracy is not None
            shown = f"{label}  {score.accuracy:.1%} right" if judged else label
            progress.update(bar, completed=len(score.samples), description=shown)
            say(f"{shown}, {len(score.samples)} of {count}")

        yield advance


@contextmanager
def spinner(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """A spinner with a title, which the function it yields changes.

    Where the console is no terminal it is a line every EVERY_S seconds.
    """
    say = lines(console)
    with console.status(Text(title)) as status:

        def update(text: str) -> None:
            status.update(Text(text))
            say(text)

        yield update


def lines(console: Console) -> Callable[[str], None]:
    """A function that prints what it is told, once in EVERY_S seconds, and never on a terminal."""
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if not console.is_interactive and time.monotonic() - last >= EVERY_S:
            console.print(text)
            last = time.monotonic()

    return say
