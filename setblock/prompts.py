"""Prompts that a chat model makes up itself: training without a dataset.

A chat model was trained on conversations, whose users' turns it can write too: given its chat
template up to where the user begins to speak, it samples what a user would ask. The method is
Magpie's (arXiv:2406.08464).
"""

import codecs
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setblock.files import write_whole
from setblock.generation import finished, settings_for
from setblock.model import Model
from setblock.names import ModelError, lasting
from setblock.results import Generation

MARK = "USER-TURN-OF-SETBLOCK"
CHUNK = 256  # samples whose noise has one seed; a call that goes on begins the last chunk again
TRIES = 4  # samples for each prompt asked for, at most
FEWEST = 256  # samples that are tried, however few prompts are asked for
BEGIN = '{"prompt": "'  # of every line


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled; those that do not end within max_tokens are left out."""

    seed: int = 0
    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 0.95

    def options(self, chunk: int = 0) -> dict[str, Any]:
        """Those of `generate`, with the noise of this chunk of samples."""
        seed = self.seed
        if chunk:
            words = f"{self.seed} {chunk}".encode()
            seed = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")
        return {
            "mode": "ntp",
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": seed,
        }


def write_prompts(
    model: Model,
    file: Path,
    count: int,
    sampling: Sampling,
    batch_size: int = 16,
    on_progress: Callable[[int], None] = lambda count: None,
) -> int:
    """How many prompts `file` holds in the end: `count`, or those that it held if there are more.

    on_progress: takes how many there are, at first those of earlier calls.
    Effects: each prompt is added as it comes, {"prompt": ...} a line with how it was made; a second
    call goes on where the first was stopped, to what one call would have written.
    Raises: as sample_prompts; ValueError for a file that holds something else, or prompts of
    another model, seed, temperature or top_p.
    """
    _check(model, count, sampling, batch_size)
    how = {"model": lasting(model.author), "seed": sampling.seed}
    how |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
    lines, known = _read(file, how)
    number = len(known)
    if number:
        on_progress(number)
    if number >= count:
        return number
    texts = [row["prompt"] for row in known]
    first = max((row["sample"] + 1 for row in known), default=0)
    whole = False
    for sample, text in sample_prompts(model, count - number, sampling, batch_size, texts, first):
        if not whole:  # every line with its end, without one that a kill cut short
            write_whole(file, "".join(f"{line}\n" for line in lines))
            whole = True
        row = {"prompt": text, "sample": sample, **how}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        number += 1
        on_progress(number)
    return number


def _read(file: Path, how: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """(the lines that calls before this one wrote, what they say); none where there is no file."""
    whole_characters = codecs.getincrementaldecoder("utf-8")()  # a kill may cut the last in two
    try:
        content = whole_characters.decode(file.read_bytes() if file.exists() else b"")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}") from None
    *whole, last = content.split("\n")
    lines, found = [], []
    for number, line in enumerate([*whole, last], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        cut = number > len(whole) and (line.startswith(BEGIN) or BEGIN.startswith(line))
        if row is None and cut:
            continue  # by a kill
        names = {"prompt", "sample", *how}
        if not (isinstance(row, dict) and row.keys() == names and type(row["sample"]) is int):
            raise ValueError(
                f"{file}:{number}: not a line as this command writes it, of {', '.join(names)}; "
                "choose another file"
            )
        for name, value in how.items():
            if row[name] != value:
                raise ValueError(
                    f"{file}:{number}: made with {name} {row[name]!r}, not {value!r}: choose "
                    "another file, or move this one away"
                )
        lines.append(line)
        found.append(row)
    return lines, found


def sample_prompts(
    model: Model,
    count: int,
    sampling: Sampling | None = None,
    batch_size: int = 16,
    known: Sequence[str] = (),
    first: int = 0,
) -> Iterator[tuple[int, str]]:
    """(its sample's number, text) of `count` different users' turns.

    The same from the same seed, whatever the batch size. Left out: turns that do not end within
    max_tokens, empty ones, and what was sampled before or is known.
    first: the sample to begin with, behind known ones.
    Raises: ModelError without a chat template, or for one that refuses a user's turn, changes what
    the user says or does not mark its end; ValueError for numbers out of range, and once the
    samples were too many.
    """
    sampling = sampling or Sampling()
    _check(model, count, sampling, batch_size)
    before, after = _around_user(model)
    # A space belongs to the word that follows, in the tokens that the model has seen.
    start = model.tokenizer.encode(before.rstrip(" "), add_special_tokens=False)
    start = start or model.encode("")
    end, stop = _end_of_turn(model, after)
    seen, num_found, left_out = set(known), 0, Counter()
    number = first // CHUNK * CHUNK
    last = first + max(FEWEST, TRIES * count)
    while number < last:
        chunk = number // CHUNK
        size = min(CHUNK, last - number)
        turns = finished(
            model,
            [start] * size,
            batch_size=batch_size,
            stop=stop,
            **sampling.options(chunk),
        )
        for generation in _in_order(turns):
            number += 1
            if number <= first:
                continue
            ids = list(generation.token_ids)
            place = next((place for place, token in enumerate(ids) if token in end), None)
            text = generation.text if place is None else model.decode(ids[:place])
            text = text.strip()
            if place is None and generation.finish_reason != "stop":
                left_out["too long"] += 1
            elif not text or "\ufffd" in text:
                left_out["empty or no text"] += 1
            elif text in seen:
                left_out["known already"] += 1
            else:
                seen.add(text)
                num_found += 1
                yield number - 1, text
                if num_found == count:
                    return
    reasons = ", ".join(f"{times} were {why}" for why, times in left_out.most_common())
    raise ValueError(
        f"only {num_found} of {count} prompts were found: of {last - first} samples {reasons}. "
        f"Ask for fewer, or for more than max_tokens={sampling.max_tokens} where they are too "
        "long: setblock prompts --max-tokens, whose file is then the --data"
    )


def _check(model: Model, count: int, sampling: Sampling, batch_size: int) -> None:
    for name, value in (
        ("count", count), ("max_tokens", sampling.max_tokens), ("batch_size", batch_size),
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    settings_for(model, **sampling.options())


def _end_of_turn(model: Model, after: str) -> tuple[frozenset[int], tuple[str, ...]]:
    """(tokens that end a user's turn, stop texts that do), by what the template puts behind it.

    The model may have another token for it than for the end of an answer.
    """
    added = model.tokenizer.added_tokens_decoder
    ids = model.tokenizer.encode(after, add_special_tokens=False)
    place = next((place for place, token in enumerate(ids) if token in added), len(ids))
    words = model.decode(ids[:place]).strip().partition("\n")[0]
    if words:
        return frozenset(model.eos_token_ids), (words,)
    if place == len(ids):
        raise ModelError(
            f"the chat template of {model.name} puts nothing behind what a user says, so that no "
            "turn of a user's would end"
        )
    return frozenset({*model.eos_token_ids, ids[place]}), ()


def _in_order(turns: Iterable[tuple[int, Generation]]) -> Iterator[Generation]:
    """The results by their rows: in the order in which they end the short ones would come first."""
    waiting: dict[int, Generation] = {}
    row = 0
    for number, turn in turns:
        waiting[number] = turn
        while row in waiting:
            yield waiting.pop(row)
            row += 1


def _around_user(model: Model) -> tuple[str, str]:
    """The chat template's text before what a user says, and behind it up to the answer."""
    if model.tokenizer.chat_template is None:
        raise ModelError(f"{model.name} has no chat template: it can't make up a user's turn")
    text = model.in_template([{"role": "user", "content": MARK}])
    if text.count(MARK) != 1:
        raise ModelError(
            f"the chat template of {model.name} does not hold what the user says once, as it is"
        )
    before, _, after = text.partition(MARK)
    return before, after
