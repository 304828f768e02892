"""Records of measurements -> Markdown tables, plots, and one page in which answers replay."""

import base64
import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setblock.evaluate import PERPLEXITY
from setblock.live import NAMES
from setblock.scores import Sample, compare

KINDS = (
    "the records of `setblock evaluate`, `benchmark` and `tune` (--out), and what `setblock demo "
    "--json` prints"
)
LINE = (
    "task", "model", "mode", "solver", "n", "score", "interval", "tokens_per_forward", "wall_s",
)  # fmt: skip
COMPARISON = (
    "task", "first", "second", "only_first", "only_second", "p_value", "identical_share",
    "wall_clock_ratio",
)  # fmt: skip
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


@dataclass
class Measured:
    """What the records hold, by kind.

    accepted: for each of `scores` in mode "verified" whose samples are at hand, and where every
    forward had a draft (a branch behind each length): of the forwards whose first j - 1 drafted
    tokens were accepted, the share that had the j-th accepted as well.
    """

    origins: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    contenders: list[dict[str, Any]] = field(default_factory=list)
    forwards: list[dict[str, Any]] = field(default_factory=list)
    tunings: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    accepted: list[tuple[dict[str, Any], list[float]]] = field(default_factory=list)
    samples: list[tuple[Path, dict[str, Any], list[Sample]]] = field(default_factory=list)


def read(paths: Sequence[Path]) -> Measured:
    """All records together.

    Raises: ValueError naming a file that is none; OSError.
    """
    found = Measured()
    for path in dict.fromkeys(path.resolve() for path in paths):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if "answers" in record:
                _ = record["answers"][0]
                found.answers += [_replayed(one) for one in record["answers"]]
                continue
            origin = {name: record[name] for name in ("command", "commit", "date", "machine")}
            found.origins.append({"file": path.name, **origin})
            for run, line in enumerate(record["results"]):
                if "contender" in line:
                    found.contenders.append(line)
                elif "finalists" in line:
                    found.tunings.append(line)
                else:
                    _ = [line[name] for name in LINE]  # KeyError: a line of something else
                    _, _ = line["interval"] or (0, 0)
                    _ = float(line["tokens_per_forward"]), Path(line["model"])
                    _ = line.get("settings", {}).get
                    if wrong := _out_of_range(line):
                        raise OutOfRange(f"{path}: results[{run}].{wrong}")
                    found.scores.append(line)
                    _read_samples(found, path, run, line)
            for one in record.get("comparisons", []):
                _ = [one[name] for name in COMPARISON]
                sides = {n: _with_settings(one, n, record["results"]) for n in ("first", "second")}
                found.comparisons.append({**one, **sides})
            for line in record.get("forwards", []):
                found.forwards.append({**line, "model": record["results"][0]["model"]})
        except OutOfRange:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is no record; those are {KINDS}") from error
    _pair_up(found)
    _name_models(found)
    return found


class OutOfRange(ValueError):
    """A record that was edited into what no command measures."""


def _out_of_range(line: dict[str, Any]) -> str | None:
    """What is wrong with the numbers of a line of scores, if anything."""
    most = math.inf if line["task"] == PERPLEXITY else 1
    low, high = line["interval"] or (line["score"], line["score"])
    if line["score"] is not None and not 0 <= low <= line["score"] <= high <= most:
        return f"score and interval must lie in 0 .. {most}: {line['score']}, {line['interval']}"
    for name, least in (("n", 1), ("tokens_per_forward", 0), ("wall_s", 0)):
        if not least <= line[name] < math.inf:
            return f"{name} must be a number of at least {least}, got {line[name]}"
    return None


def _name_models(found: Measured) -> None:
    """Call each model by its folder's name, or by its whole path where two have the same name."""
    lines = [*found.scores, *found.contenders, *found.forwards, *found.tunings, *found.answers]
    lines += [one[place] for one in found.comparisons for place in ("first", "second")]
    models = dict.fromkeys(line["model"] for line in lines)
    names = [Path(model).name for model in models]
    for line in lines:
        name = Path(line["model"]).name
        line["model"] = name if names.count(name) == 1 else line["model"]


def _replayed(answer: dict[str, Any]) -> dict[str, Any]:
    """What of an answer of the demo the page needs."""
    names = ("prompt", "mode", "tokens", "reveal_step", "entropy", "nfe", "correct", "model")
    _, _ = NAMES[answer["mode"]], Path(answer["model"])
    return {name: answer[name] for name in names}


def _with_settings(
    one: dict[str, Any], side: str, lines: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One side of a comparison; its settings from the one line it can be, if it has none."""
    names = ("model", "mode", "solver")
    own = {name: one[side][name] for name in names}
    same = [line for line in lines if line["task"] == one["task"]]
    same = [line for line in same if own == {name: line[name] for name in names}]
    found = same[0].get("settings") if len(same) == 1 else None
    return {"settings": found, **one[side]}


def _read_samples(found: Measured, path: Path, run: int, line: dict[str, Any]) -> None:
    """Read the samples beside a record, and what they say of a line."""
    file = path.with_suffix(".samples.jsonl")
    samples = []
    for row in file.read_text(encoding="utf-8").split("\n") if file.is_file() else ():
        try:
            sample = json.loads(row)
        except ValueError:
            continue  # cut short by a kill
        if sample.pop("run") == run:
            samples.append(Sample.from_json(sample))
    if len(samples) == line["n"]:
        found.samples.append((path, line, samples))
    settings = line.get("settings", {})
    always = (settings.get("branches") or 0) >= (settings.get("block_size") or 1)
    if line["mode"] == "verified" and always and (shares := _accepted(samples)):
        found.accepted.append((line, shares))


def _accepted(samples: Sequence[Sample]) -> list[float]:
    """See `Measured`; of samples that say which forward revealed what."""
    lengths: Counter[int] = Counter()
    for sample in samples:
        if sample.reveal_step:
            counts = list(Counter(sample.reveal_step).values())
            lengths.update(counts[1:-1])  # the prompt's forward has no draft, the last is cut
    shares, most = [], max(lengths, default=1)
    for drafted in range(1, most):
        tried = sum(count for length, count in lengths.items() if length >= drafted)
        shares.append(sum(n for length, n in lengths.items() if length > drafted) / tried)
    return shares


def _pair_up(found: Measured) -> None:
    """Compare the first line on some problems with those of other records on the same ones."""
    firsts: dict[Any, tuple[Path, dict[str, Any], list[Sample]]] = {}
    for path, line, samples in found.samples:
        place = [line.get(name) for name in ("task", "data_sha256", "split", "held_out", "shots")]
        problems = (*place, frozenset(one.index for one in samples))
        first = firsts.setdefault(problems, (path, line, samples))
        if first[0] != path:
            compared = compare(first[1], line, (first[2], samples))
            # Seconds of different times, perhaps machines, make no ratio.
            found.comparisons.append({**compared, "wall_clock_ratio": None})


def name_of(line: dict[str, Any]) -> str:
    """Model and decoding of a line in a few words."""
    words, settings = [line["model"], line["mode"], line["solver"]], line.get("settings") or {}
    if line["mode"] != "ntp" and settings.get("block_size"):
        words.append(f"k={settings['block_size']}")
    if line["mode"] == "verified" and settings.get("draft") == "branches":
        words.append(f"{settings.get('branches') or 'all'}+{settings.get('seeds', 0)}")
    return " ".join(filter(None, words))


def tables(found: Measured) -> list[Shown]:
    """Those that the records have lines for."""
    shown = []
    if found.scores:
        header = ("task, decoding", "n", "score", "95 %", "tokens per forward", "ended")
        header += ("repetition", "log-prob of a token", "seconds")
        shown.append(Shown("Scores", header, tuple(_score_row(line) for line in found.scores)))
    if found.comparisons:
        header = ("task, second against first", "only first right", "only second", "p (McNemar)")
        header += ("same answers", "wall clock")
        rows = tuple(
            (
                f"{one['task']}: {name_of(one['second'])} against {name_of(one['first'])}",
                _cell(one["only_first"]),
                _cell(one["only_second"]),
                _cell(one["p_value"], ".3g"),
                f"{one['identical_share']:.1%}",
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
                f"{line['identical_share']:.1%}",
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
        header = ("setting", "score", "loss", "at most", "speed", "proven")
        rows = tuple(
            (
                " ".join(str(one[name]) for name in ("mode", "solver", "block_size") if one[name]),
                f"{one['score']:.1%}",
                f"{100 * one['drop']:.1f}",
                f"{100 * one['drop_bounds'][1]:.1f}",
                f"{one['speed']:.2f}x",
                "yes" if one["proven"] else "no",
            )
            for one in line["finalists"]
        )
        chosen = " ".join(
            str(line["chosen"][name])
            for name in ("mode", "solver", "block_size")
            if line["chosen"][name]
        )
        most = f"at most {100 * line['max_drop']:g} points lost at {line['confidence']:.0%}"
        shown.append(Shown(f"Tuning of {line['model']}, {most}: {chosen}", header, rows))
    return shown


def _score_row(line: dict[str, Any]) -> tuple[str, ...]:
    form = ".3f" if line["task"] == "perplexity" else ".1%"
    low_high = line["interval"] or ()
    return (
        f"{line['task']}, {name_of(line)}",
        str(line["n"]),
        _cell(line["score"], form),
        " to ".join(f"{end:{form}}" for end in low_high),
        f"{line['tokens_per_forward']:.2f}",
        _cell(line.get("eos_share"), ".1%"),
        _cell(line.get("repetition"), ".1%"),
        _cell(line.get("logprob_nats"), ".3f"),
        f"{line['wall_s']:.1f}",
    )


def _cell(value: Any, form: str = "") -> str:
    return "" if value is None else f"{value:{form}}"


def draw(found: Measured, folder: Path) -> list[tuple[Path, str]]:
    """PNG files of what the records have points for, each with its title.

    Raises: ImportError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "setblock[plot]"') from error
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

    judged = [line for line in found.scores if line["interval"] and line["task"] != "perplexity"]
    if judged:
        figure, axes = panel("tokens per forward", "score, 95 % interval")
        curves = {(line["model"], line["task"]) for line in judged}
        for model, task in sorted(curves):
            lines = [line for line in judged if (line["model"], line["task"]) == (model, task)]
            lines.sort(key=lambda line: line["tokens_per_forward"])
            x, y = ([line[name] for line in lines] for name in ("tokens_per_forward", "score"))
            low, high = (
                [max(sign * (line["interval"][end] - line["score"]), 0.0) for line in lines]
                for end, sign in ((0, -1), (1, 1))
            )
            axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, label=f"{model}, {task}")
        axes.legend()
        save(figure, "score", "Score against tokens per forward")
    answered = [line for line in found.scores if line["task"] != "perplexity"]
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
    return f"`{one['file']}`: `{one['command']}`, commit {one['commit']}, {place}, {one['date']}"


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
    found = read(paths)
    folder.mkdir(parents=True, exist_ok=True)
    shown, plots = tables(found), draw(found, folder)
    texts = {"report.md": markdown(found, shown, plots), "index.html": page(found, shown, plots)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / "report.md", *(path for path, _ in plots), folder / "index.html"]
