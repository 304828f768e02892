"""Records of measurements -> Markdown tables, plots, and one page in which answers replay."""

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setblock.evaluate import PERPLEXITY
from setblock.live import NAMES
from setblock.measured import Measured, name_of, read, tell_apart
from setblock.scores import percent
from setblock.tune import loss_cells, proven, words

PAGE = Path(__file__).with_name("report.html")


@dataclass(frozen=True)
class Shown:
    """A table: cells are texts."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As GitHub draws it; the first column to the left, the others to the right."""
        lines = [self.header, ("---", *["---:"] * (len(self.header) - 1)), *self.rows]
        cells = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines)
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells)

    def html(self) -> str:
        """As a <table>."""

        def row(cells: Iterable[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(one)}</{tag}>' for one in cells)}</tr>"

        body = "".join(row(one, "td") for one in self.rows)
        head = f"<h2>{html.escape(self.title)}</h2>"
        return f"{head}<div class=wide><table>{row(self.header, 'th')}{body}</table></div>"


def tables(found: Measured) -> list[Shown]:
    """Those that the records have lines for."""
    shown = []
    if found.scores:
        header = ("task, decoding", "n", "score", "95 %", "tokens per forward", "95 %")
        header += ("ended", "repetition", "log-prob of a token", "seconds")
        shown.append(Shown("Scores", header, tuple(_score_row(line) for line in found.scores)))
    if found.pooled:
        header = ("task, decoding", "seeds", "n", "score", "95 %", "of seeds", "tokens per forward")
        rows = tuple(
            (
                f"{line['task']}: {name_of(line)}",
                ", ".join(map(str, line["seeds"])),
                str(line["n"]),
                _cell(line["score"], ".1%"),
                " to ".join(f"{end:.1%}" for end in line["interval"] or ()),
                ", ".join(f"{one:.1%}" for one in line["scores"] if one is not None),
                f"{line['tokens_per_forward']:.2f}",
            )
            for line in found.pooled
        )
        shown.append(Shown("Over several seeds", header, rows))
    if found.comparisons:
        header = ("task, second against first", "only first right", "only second")
        header += ("points of score won", "95 %", "p (McNemar)")
        header += ("same answers", "wall clock")
        rows = tuple(
            (
                f"{one['task']}: {name_of(one['second'])} against {name_of(one['first'])}",
                _cell(one["only_first"]),
                _cell(one["only_second"]),
                *_difference(one),
                _cell(one["p_value"], ".3g"),
                percent(one["identical_share"]),
                "" if one["wall_clock_ratio"] is None else f"{one['wall_clock_ratio']:.2f}x",
            )
            for one in found.comparisons
        )
        shown.append(Shown("On the same problems", header, rows))
    if found.contenders:
        header = ("decoding", "batch", "prompt tokens", "tokens per forward", "tokens per second")
        header += ("speed-up, decoding", "with prompt", "same answers")
        rows = tuple(
            (
                f"{line['model']} {line['contender']}",
                str(line["batch_size"]),
                f"{line['prompt_tokens']:.0f}",
                _cell(line["tokens_per_forward"], ".2f"),
                f"{line['tokens_per_second']:.1f}",
                *("" if line[name] is None
                  else "{:.2f}x ({:.2f}-{:.2f})".format(line[name], *line[f"{name}_range"])
                  for name in ("speedup", "total_speedup")),
                percent(line["identical_share"]),
            )
            for line in found.contenders
        )  # fmt: skip
        shown.append(Shown("Wall clock against token by token", header, rows))
    if found.forwards:
        header = ("model", "query tokens", "batch", "cached", "ms", "against one", "predicted")
        rows = tuple(
            (
                *(str(line[name]) for name in ("model", "queries", "batch_size", "cached")),
                f"{1000 * line['seconds']:.2f}",
                f"{line['ratio']:.2f}",
                _cell(line.get("predicted_ratio"), ".2f"),
            )
            for line in found.forwards
        )
        shown.append(Shown("One forward", header, rows))
    for line in found.tunings:
        score = "score" if line.get("judged", True) else "same"
        header = ("setting", score, "points lost", "at most", "speed", "proven")
        rows = tuple(
            (words(one), *loss_cells(one), f"{one['speed']:.2f}x", proven(one))
            for one in line["finalists"]
        )
        chosen = words(line["chosen"])
        most = f"at most {100 * line['max_drop']:g} points lost at {line['confidence']:.0%}"
        shown.append(Shown(f"Tuning of {line['model']}, {most}: {chosen}", header, rows))
    return shown


def _difference(one: dict[str, Any]) -> tuple[str, str]:
    """Points of score that the second setting won, and their interval; if the record has them."""
    won, bounds = one.get("score_difference"), one.get("score_difference_interval")
    if won is None or bounds is None:
        return "", ""
    return f"{100 * won:.1f}", " to ".join(f"{100 * end:.1f}" for end in bounds)


def _score_row(line: dict[str, Any]) -> tuple[str, ...]:
    form = ".3f" if line["task"] == PERPLEXITY else ".1%"
    low_high, rates = line["interval"] or (), line.get("tokens_per_forward_interval") or ()
    return (
        f"{line['task']}, {name_of(line)}",
        str(line["n"]),
        _cell(line["score"], form),
        " to ".join(f"{end:{form}}" for end in low_high),
        "" if line["task"] == PERPLEXITY else f"{line['tokens_per_forward']:.2f}",
        " to ".join(f"{end:.2f}" for end in rates),
        _cell(line.get("eos_share"), ".1%"),
        _cell(line.get("repetition"), ".1%"),
        _cell(line.get("logprob_nats"), ".3f"),
        f"{line['wall_s']:.1f}",
    )


def curves(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What to call a decoder -> its lines of one task, which differ in the parameter of its solver
    alone, by tokens per forward.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    ordered = sorted(lines, key=lambda line: line["tokens_per_forward"])
    rules = [(line["solver"] or "").partition(":")[0] for line in ordered]
    decoders = [
        {**one, "solver": rule, "apart": ()} for one, rule in zip(ordered, rules, strict=True)
    ]
    tell_apart(decoders)
    for line, decoder in zip(ordered, decoders, strict=True):
        found.setdefault(f"{line['task']}, {name_of(decoder)}", []).append(line)
    return dict(sorted(found.items()))


def _cell(value: Any, form: str = "") -> str:
    return "" if value is None else f"{value:{form}}"


def draw(found: Measured, folder: Path) -> list[tuple[Path, str]]:
    """PNG files of what the records have points for, each with its title.

    Raises: ImportError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install '.[plot]' in the checkout") from error
    drawn: list[tuple[Path, str]] = []

    def save(figure: Any, name: str, title: str) -> None:
        figure.axes[0].set_title(title)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        drawn.append((path, title))

    def panel(x: str, y: str) -> tuple[Any, Any]:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=x, ylabel=y)
        return figure, axes

    judged = [line for line in found.scores if line["interval"] and line["task"] != PERPLEXITY]
    if judged:
        figure, axes = panel("tokens per forward", "score, 95 % interval")
        for label, lines in curves(judged).items():
            x, y = ([line[name] for line in lines] for name in ("tokens_per_forward", "score"))
            low, high = (
                [max(sign * (line["interval"][end] - line["score"]), 0.0) for line in lines]
                for end, sign in ((0, -1), (1, 1))
            )
            axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, label=label)
            for line in lines:
                place = line["tokens_per_forward"], line["score"]
                parameter = (line["solver"] or "").partition(":")[2]
                axes.annotate(parameter, place, (4, 4), textcoords="offset points", fontsize=7)
        axes.legend(fontsize=8)
        save(figure, "score", "Score against tokens per forward")
    answered = [line for line in found.scores if line["task"] != PERPLEXITY]
    if answered:
        figure, axes = panel("", "tokens per forward")
        names = [f"{line['task']}\n{name_of(line)}" for line in answered]
        axes.bar(range(len(names)), [line["tokens_per_forward"] for line in answered])
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        save(figure, "tokens", "Tokens per forward by task")
    if found.forwards:
        figure, axes = panel("query tokens", "seconds against a forward of one token")
        key = ("model", "batch_size", "cached")
        places = dict.fromkeys(tuple(line[name] for name in key) for line in found.forwards)
        for number, place in enumerate(places):
            lines = [one for one in found.forwards if tuple(one[name] for name in key) == place]
            x = [line["queries"] for line in lines]
            label = "{}, batch {}, {} cached".format(*place)
            axes.plot(x, [one["ratio"] for one in lines], f"C{number}o-", label=label)
            if all("predicted_ratio" in one for one in lines):
                predicted = [one["predicted_ratio"] for one in lines]
                axes.plot(x, predicted, f"C{number}x--", label=f"{label}, roofline")
        axes.legend(fontsize=8)
        save(figure, "forwards", "What a wider forward costs: measured and roofline")
    if found.accepted:
        figure, axes = panel("offset of the drafted token", "accepted behind accepted ones")
        for line, shares in found.accepted:
            label = f"{line['task']}, {name_of(line)}"
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=label)
        axes.set_ylim(0, 1.02)
        axes.legend(fontsize=8)
        save(figure, "acceptance", "Acceptance by offset in the draft")
    return drawn


def markdown(found: Measured, shown: Sequence[Shown], plots: Sequence[tuple[Path, str]]) -> str:
    """The whole report as one Markdown page."""
    parts = ["# Measurements", *(one.markdown() for one in shown)]
    parts += [f"![{title}]({path.name})" for path, title in plots]
    if found.origins:
        parts.append("## Where the numbers come from")
        parts.append("\n".join(f"- {_origin(one)}" for one in found.origins))
    return "\n\n".join(parts) + "\n"


def _origin(one: dict[str, Any]) -> str:
    machine = one["machine"]
    place = machine["cuda"] or f"{machine['cores']} cores of {machine['cpu']}"
    own = "".join(f", {file} ({digest})" for file, digest in one["imported"].items())
    return (
        f"`{one['file']}`: `{one['command']}`, commit {one['commit']}{own}, {place}, {one['date']}"
    )


def page(found: Measured, shown: Sequence[Shown], plots: Sequence[tuple[Path, str]]) -> str:
    """The whole report as one HTML page that needs nothing else; answers replay in it."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for answer in found.answers:
        named = {**answer, "name": f"{answer['model']}, {NAMES[answer['mode']]}"}
        groups.setdefault(answer["prompt"], []).append(named)
    data = json.dumps([{"prompt": prompt, "answers": some} for prompt, some in groups.items()])
    pictures = "".join(
        f'<figure><img alt="{html.escape(title)}" '
        f'src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"></figure>'
        for path, title in plots
    )
    origins = "".join(f"<li>{html.escape(_origin(one))}</li>" for one in found.origins)
    parts = {
        "DATA": data.replace("<", "\\u003c"),  # a model's text must not end the script
        "TABLES": "".join(one.html() for one in shown),
        "PLOTS": pictures,
        "ORIGINS": f"<h2>Where the numbers come from</h2><ul>{origins}</ul>" if origins else "",
    }
    # In one pass: what is put in may hold such a comment itself.
    return re.sub(
        r"<!--([A-Z]+)-->", lambda found: parts[found[1]], PAGE.read_text(encoding="utf-8")
    )


def write(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write report.md, its plots and index.html into the folder; the files, in that order."""
    found = read(paths, lambda one: page(one, tables(one), ()))
    folder.mkdir(parents=True, exist_ok=True)
    shown, plots = tables(found), draw(found, folder)
    texts = {"report.md": markdown(found, shown, plots), "index.html": page(found, shown, plots)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / "report.md", *(path for path, _ in plots), folder / "index.html"]
