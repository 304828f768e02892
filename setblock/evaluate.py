"""Tasks x decoding settings -> scores with intervals, forwards and seconds, as one JSON record."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from rich.table import Table
from rich.text import Text

from setblock import likelihood, nano
from setblock.generation import Options, encode, finished, settings_for
from setblock.model import Model
from setblock.records import peak_bytes
from setblock.results import Generation
from setblock.roofline import fitted_acceptance
from setblock.scores import Sample, Score, percent, ratio_interval, repetition
from setblock.settings import FORMATS, Settings
from setblock.tasks import SUFFIXES, TASKS, DataRows, Item, Task, read_rows

PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Form:
    """How a benchmark task's items are put: as a chat turn or as text, behind solved examples."""

    task: Task
    chat: bool = True
    examples: tuple[Item, ...] = ()
    data: DataRows | None = None
    shots_data: DataRows | None = None

    def prompt(self, item: Item) -> str | list[int] | list[dict[str, str]]:
        """The text of an item, its token ids, or messages."""
        return self.task.prompt(item, self.examples, self.chat)

    def describe(self) -> dict[str, Any]:
        """What a line of a record says of it."""
        return {
            "task_version": self.task.version,
            "chat": self.chat,
            "shots": len(self.examples),
            "data": self.data.name if self.data else None,
            "data_sha256": self.data.sha256 if self.data else None,
            "shots_data": self.shots_data.name if self.shots_data else None,
            "shots_data_sha256": self.shots_data.sha256 if self.shots_data else None,
        }


def evaluate(
    model: Model,
    problems: Sequence[nano.Problem] | Sequence[Item],
    batch_size: int,
    on_progress: Callable[[Score], None] = lambda score: None,
    form: Form | None = None,
    known: Sequence[Sample] = (),
    **options: Unpack[Options],
) -> Score:
    """The score of one setting on these problems; `on_progress` is called after every answer.

    form: how items of a benchmark task are put; None for the nano families, always chat turns.
    known: samples of an earlier call that was stopped; these problems are not decoded again.
    """
    prompts = prompt_ids(model, problems, form)
    return _answered(model, problems, prompts, batch_size, on_progress, form, known, options)


def _answered(
    model: Model,
    problems: Sequence[nano.Problem] | Sequence[Item],
    prompts: list[list[int]],
    batch_size: int,
    on_progress: Callable[[Score], None],
    form: Form | None,
    known: Sequence[Sample],
    options: Options,
) -> Score:
    """The score of these problems, put in these tokens."""
    score = Score(list(known))
    done = {sample.index for sample in known}
    check: Any = nano.check if form is None else form.task.check
    # In mode sbd, with penalties or biases, or of a form, tokens are not of the next-token
    # distribution.
    settings = settings_for(model, **options)
    formed = any(getattr(settings, name) is not None for name in FORMATS)
    changed = formed or settings.penalties or settings.biases
    plain = settings.mode != "sbd" and not changed
    asked: Any = {**options, "logprobs": 0} if plain else options
    answers = finished(model, prompts, batch_size=batch_size, skip=done, **asked)
    while True:
        begin = time.perf_counter()
        answer = next(answers, None)
        seconds = time.perf_counter() - begin
        if answer is None:
            return score
        index, generation = answer
        item = problems[index]
        correct = check(item, generation.text) if check else None
        sample = _sample(model, prompts[index], index, item.key, generation, correct, seconds)
        score.samples.append(sample)
        on_progress(score)


def prompt_ids(
    model: Model, problems: Sequence[nano.Problem] | Sequence[Item], form: Form | None
) -> list[list[int]]:
    """Token ids of what is asked."""
    texts: Any = [form.prompt(one) if form else one.prompt for one in problems]  # type: ignore[arg-type]
    return encode(model, texts, form is None or form.chat)


def run(
    model: Model,
    task: str,
    problems: Sequence[nano.Problem] | Sequence[Item],
    batch_size: int,
    on_progress: Callable[[Score], None] = lambda score: None,
    form: Form | None = None,
    known: Sequence[Sample] = (),
    **options: Unpack[Options],
) -> tuple[dict[str, Any], Score]:
    """One line of a record, a model's score on a task under one setting, and what it sums up.

    peak_bytes: the most memory in use, on a GPU during this run, on a CPU by the whole process.
    least_bytes: what the weights, and the keys and values of the largest batch, take by arithmetic.
    acceptance: of drafted tokens by branches alone, fitted to tokens per forward, else None.
    Raises: ValueError without problems.
    """
    if not problems:
        raise ValueError(f"problems must be at least one, got none of task {task}")
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    prompts = prompt_ids(model, problems, form)
    score = _answered(model, problems, prompts, batch_size, on_progress, form, known, options)
    settings = settings_for(model, min(batch_size, len(problems)), **options)
    lengths = sorted((len(prompt) for prompt in prompts), reverse=True)
    result = score.result()
    drafting = settings.mode == "verified" and settings.draft == "branches"
    drafting &= not settings.lookup and settings.lenience == 1
    acceptance = None
    if drafting and settings.block_size > 1:
        acceptance = acceptance_fitting(settings, result["tokens_per_forward"])
    longest = sum(length + settings.num_slots for length in lengths[:batch_size])
    line = {
        "task": task,
        "model": model.name,
        "mode": settings.mode,
        "solver": settings.described["solver"],
        **result,
        "acceptance": acceptance,
        "peak_bytes": peak_bytes(model.device),
        "least_bytes": model.least_bytes(longest),
        "batch_size": batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "packed": model.packed,
        "settings": settings.described,
        **(form.describe() if form else {}),
    }
    return line, score


def acceptance_fitting(settings: Settings, tokens_per_forward: float) -> float:
    """The acceptance of drafts by branches, in blocks of 2 and more, that fits what was measured.

    See roofline.best_spending.
    """
    size = settings.block_size
    branches = min(settings.branches or size, size)
    return fitted_acceptance(size, branches, settings.seeds, tokens_per_forward)


def _sample(
    model: Model,
    prompt: list[int],
    index: int,
    key: str,
    generation: Generation,
    correct: bool | None,
    seconds: float,
) -> Sample:
    """The sample of a generation."""
    ids = generation.token_ids
    if generation.logprobs is None:
        judged = likelihood.next_tokens(model, [*prompt, *ids], len(prompt)).logprobs
    else:
        judged = torch.tensor([one.logprob for one in generation.logprobs])
    return Sample(
        index=index,
        key=key,
        correct=correct,
        text=generation.text,
        token_ids=ids,
        finish_reason=generation.finish_reason,
        nfe=generation.nfe,
        prefill_forwards=generation.prefill_forwards,
        entropy_nats=sum(generation.entropy),
        logprob_nats=float(judged.double().sum()),
        repetition=repetition(ids),
        wall_s=seconds,
        reveal_step=generation.reveal_step,
    )


def read_texts(data: str, limit: int | None = None, split: str = "test") -> DataRows:
    """The texts of rows {"text": ...}, as `tasks.read_rows` reads them, or of a plain file as one.

    Raises: ValueError naming source and row for a row of another form; OSError.
    """
    path = Path(data)
    if path.exists() and path.suffix not in set(SUFFIXES) - {".txt"}:
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from error
        return DataRows(path.name, hashlib.sha256(content).hexdigest(), (text,))
    found = read_rows(data, split)
    for number, row in enumerate(found.rows[:limit], start=1):
        if not (isinstance(row, dict) and isinstance(row.get("text"), str)):
            raise ValueError(f"{found.name}, row {number}: a row needs a text, named text")
    return replace(found, rows=tuple(row["text"] for row in found.rows[:limit]))


def judge(model: Model, data: DataRows, window: int | None) -> dict[str, Any]:
    """One line of a record: a model's perplexity on the texts of `read_texts`, each by itself.

    window: tokens that a forward sees at most, default the model's context.
    score: perplexity per token; interval: 95 %, from how much the texts differ, None for one text.
    nfe counts forwards of up to likelihood.QUERIES tokens. Texts under two tokens are left out.
    Raises: ValueError if none is left.
    """
    begin = time.perf_counter()
    some = any(data.rows)
    ids = [ids for text in data.rows if len(ids := model.encode(text)) > 1] if some else []
    if not ids:
        raise ValueError(f"{data.name}: no text of at least two tokens")
    for number, one in enumerate(ids, start=1):
        if model.mask_token_id in one:
            mask = model.tokenizer.convert_ids_to_tokens(model.mask_token_id)
            raise ValueError(
                f"{data.name}: text {number} of at least two tokens holds the mask token {mask!r}, "
                "which is never said: leave it out, or name another by --mask-token-id"
            )
    found = [likelihood.perplexity(model, one, window) for one in ids]
    tokens = sum(one.tokens for one in found)
    mean = sum(one.nats for one in found) / tokens
    if math.isnan(mean):
        raise ValueError(f"the logits of {model.name} are not numbers: look at its weights")
    bounds = ratio_interval([(one.nats, one.tokens) for one in found])
    return {
        "task": PERPLEXITY,
        "model": model.name,
        "mode": "ntp",
        "solver": None,
        "n": len(found),
        "score": _exp(mean),
        "interval": bounds and tuple(map(_exp, bounds)),
        "tokens": tokens,
        "nfe": (forwards := sum(one.forwards for one in found)),
        "tokens_per_forward": tokens / forwards,
        "wall_s": time.perf_counter() - begin,
        "dtype": str(model.dtype).removeprefix("torch."),
        "packed": model.packed,
        "settings": {"window": window or model.context_length},
        "data": data.name,
        "data_sha256": data.sha256,
    }


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def families(tasks: Sequence[str]) -> list[str]:
    """The families that task names stand for, each once; "nano" is all of them.

    Raises: ValueError for an unknown name.
    """
    found: dict[str, None] = {}
    for task in tasks:
        if task != "nano" and task not in nano.FAMILIES:
            if task in (*TASKS, PERPLEXITY):
                raise ValueError(f"task {task} needs its rows: --data FILE")
            allowed = ", ".join(["nano", *nano.FAMILIES, *TASKS, PERPLEXITY])
            raise ValueError(f"task must be one of {allowed}, got {task!r}")
        found |= dict.fromkeys(nano.FAMILIES if task == "nano" else [task])
    return list(found)


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The lines of a record as a table, narrow enough for a terminal.

    What all lines share of model, batch size and number of items is in the title.
    """
    models = {line["model"] for line in results}
    sizes = {line.get("batch_size") for line in results} - {None}  # perplexity has no batches
    counts = {line["n"] for line in results}
    common = [*models] * (len(models) == 1) + [f"batch size {s}" for s in sizes] * (len(sizes) == 1)
    common += [f"{counted(n)} of each task" for n in counts] * (len(counts) == 1)
    shown = Table(title=Text(", ".join(common)) if common else None)
    who = "decoding" if len(models) == 1 else "model and decoding"
    several = len({_seed(line) for line in results}) > 1
    names = [_name(line, model=len(models) > 1, seed=several) for line in results]
    shown.add_column("task", no_wrap=True)
    shown.add_column(who, overflow="fold", min_width=_longest_word(names))
    for name in ([] if len(counts) == 1 else ["n"]) + ["score", "95 %"]:
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("tokens per\nforward", "seconds"):
        shown.add_column(name, justify="right", no_wrap=True)
    for line, name in zip(results, names, strict=True):
        shown.add_row(
            line["task"],
            name,
            *([] if len(counts) == 1 else [str(line["n"])]),
            *_score_cells(line),
            "-" if line["task"] == PERPLEXITY else f"{line['tokens_per_forward']:.2f}",
            f"{line['wall_s']:.1f}",
        )
    if any(line["task"] == PERPLEXITY for line in results):
        shown.caption = "score: perplexity per token, the lower the better; nothing is decoded"
    return shown


def counted(items: int) -> str:
    """A number of items in words: "1 item", "20 items"."""
    return f"{items} item{'s' * (items != 1)}"


def _longest_word(names: Sequence[str]) -> int:
    """Cells of the longest word that fits beside the other columns: "prefix:0.99" stays whole."""
    return max(len(word) for name in names for word in name.split() if len(word) <= 20)


def _seed(line: Mapping[str, Any]) -> int | None:
    return ((line.get("settings") or {}).get("sampler") or {}).get("seed")


def _name(line: Mapping[str, Any], model: bool, seed: bool = False) -> str:
    """Model and seed, if asked for, mode and solver in a few words that break at spaces."""
    settings = line.get("settings") or {}
    slides = "sliding" if settings.get("slide") else ""
    size = f"k={settings['block_size']}" if line["mode"] == "verified" and settings else ""
    words = line["model"] if model else "", line["mode"], line["solver"], slides, size
    words += (f"seed {_seed(line)}" if seed else "",)
    return " ".join(filter(None, words))


def _score_cells(line: Mapping[str, Any]) -> tuple[str, str]:
    if line["score"] is None:
        return "", ""
    if line["task"] == PERPLEXITY:
        score, interval, unit = f"{line['score']:.3f}", "{:.3f}-{:.3f}", 1
    else:
        score, interval, unit = percent(line["score"]), "{:.1f}-{:.1f}", 100
    bounds = [unit * bound for bound in line["interval"] or ()]
    return score, interval.format(*bounds) if bounds else ""


def pooled_table(pooled: Sequence[dict[str, Any]]) -> Table:
    """Each setting over all of its seeds."""
    models = len({line["model"] for line in pooled}) > 1
    seeds = ", ".join(map(str, pooled[0]["seeds"]))
    shown = Table(
        title=f"All answers of seeds {seeds}",
        caption="95 %: by how much problems differ, each with all of its answers",
    )
    names = [_name(line, models) for line in pooled]
    shown.add_column("task", no_wrap=True)
    shown.add_column("decoding", overflow="fold", min_width=_longest_word(names))
    for name in ("score", "95 %", "of seeds", "tokens per\nforward"):
        shown.add_column(name, justify="right", no_wrap=True)
    for line, name in zip(pooled, names, strict=True):
        judged = [one for one in line["scores"] if one is not None]
        ends = f"{100 * min(judged):.1f}-{100 * max(judged):.1f}" if judged else ""
        per_forward = f"{line['tokens_per_forward']:.2f}"
        shown.add_row(line["task"], name, *_score_cells(line), ends, per_forward)
    return shown


def comparison_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    """Each setting beside the first of its task, on the same problems."""
    several = len({one[who]["model"] for one in comparisons for who in ("first", "second")}) > 1
    seeds = len({_seed(one["second"]) for one in comparisons}) > 1  # both sides have the same
    names = [
        [_name(one["first"], several), _name(one["second"], several, seeds)] for one in comparisons
    ]
    firsts = {first for first, _ in names}
    first = Text(firsts.pop()) if len(firsts) == 1 else None
    if first is None:
        names = [["", f"{second} against {first}"] for first, second in names]
    shown = Table(
        title=Text("Against ").append(first or "the first setting of the task"),
        caption="right alone: problems that only this setting got right : that only the other\n"
        "did, and p of McNemar's exact test. same: answers with the same tokens.\n"
        "clock: how many times as fast, at this batch size",
        caption_justify="left",
    )
    shown.add_column("task", no_wrap=True)
    words = [second for _, second in names]
    shown.add_column("decoding", overflow="fold", min_width=_longest_word(words))
    for name in ("right alone", "p", "same", "clock"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one, name in zip(comparisons, words, strict=True):
        alone = "" if one["p_value"] is None else f"{one['only_second']} : {one['only_first']}"
        shown.add_row(
            one["task"],
            name,
            alone,
            "" if one["p_value"] is None else f"{one['p_value']:.3g}",
            percent(one["identical_share"]),
            f"{one['wall_clock_ratio']:.2f}x",
        )
    return shown
