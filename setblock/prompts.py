"""Prompts that a chat model makes up itself: training without a dataset.

A chat model was trained on conversations, whose users' turns it can write too: given its chat
template up to where the user begins to speak, it samples what a user would ask. The method is
Magpie's (arXiv:2406.08464).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from setblock.generation import Generation, Reveal, stream
from setblock.model import Model, ModelError

MARK = "USER-TURN-OF-SETBLOCK"
TRIES = 4  # prompts sampled for each one asked for, at most


def write_prompts(
    model: Model,
    file: Path,
    count: int,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> int:
    """How many prompts `file` holds in the end: `count`, or those that it held if there are more.

    options: of sample_prompts.
    Effects: each prompt is added as it comes, {"prompt": ...} a line; a second call goes on where
    the first was stopped, with noise of its own.
    Raises: as sample_prompts; ValueError for a file that holds something else.
    """
    known = _prompts_in(file)
    if known:
        words = f"{seed} {len(known)}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")
    number = len(known)
    if number >= count:
        return number
    for prompt in sample_prompts(model, count - number, seed=seed, known=known, **options):
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n")
        number += 1
        on_progress(number)
    return number


def _prompts_in(file: Path) -> list[str]:
    """The prompts that a call before this one wrote; a line that a kill cut short is taken away."""
    if not file.exists():
        return []
    *lines, rest = file.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or [*row] != ["prompt"] or type(row["prompt"]) is not str:
            raise ValueError(f'{file}:{number}: not {{"prompt": ...}}, as this command writes it')
        found.append(row["prompt"])
    if rest:
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return found


def sample_prompts(
    model: Model,
    count: int,
    max_tokens: int = 128,
    batch_size: int = 16,
    temperature: float = 1.0,
    top_p: float = 0.95,
    seed: int = 0,
    known: Sequence[str] = (),
) -> Iterator[str]:
    """`count` different users' turns, the same from the same seed, whatever the batch size.

    Left out: turns that do not end within max_tokens, empty ones, and what was sampled before or is
    known.
    Raises: ModelError without a chat template, or for one that changes what the user says;
    ValueError for numbers out of range, and once TRIES * count samples were not enough.
    """
    for name, value in (("count", count), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    before, after = _around_user(model)
    tokenizer = model.tokenizer
    start = tokenizer.encode(before, add_special_tokens=False) or model.encode("")
    follows = tokenizer.encode(after, add_special_tokens=False)
    # A special token that ends the turn ends its text here; the model may have other names for it
    # than for the end of an answer. Plain words are a stop text.
    special = bool(follows) and not model.decode(follows[:1])
    end = {*model.eos_token_ids, *(follows[:1] if special else [])}
    words = model.decode(follows).strip().partition("\n")[0]
    reveals = stream(
        model,
        [start] * (TRIES * count),
        batch_size=batch_size,
        mode="ntp",
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=() if special or not words else (words,),
    )
    seen, found = set(known), 0
    for generation in _in_order(reveals):
        ids = list(generation.token_ids)
        place = next((place for place, token in enumerate(ids) if token in end), None)
        text = model.decode(ids[:place]).strip() if place is not None else generation.text.strip()
        ended = place is not None or generation.finish_reason == "stop"
        if not ended or not text or "\ufffd" in text or text in seen:
            continue
        seen.add(text)
        found += 1
        yield text
        if found == count:
            return
    raise ValueError(
        f"only {found} of {TRIES * count} sampled prompts were whole and new within "
        f"max_tokens={max_tokens}: raise that, or lower count={count}"
    )


def _in_order(reveals: Iterable[Reveal]) -> Iterator[Generation]:
    """The results by their rows: in the order in which they end the short ones would come first."""
    waiting: dict[int, Generation] = {}
    row = 0
    for reveal in reveals:
        if reveal.generation is not None:
            waiting[reveal.row] = reveal.generation
        while row in waiting:
            yield waiting.pop(row)
            row += 1


def _around_user(model: Model) -> tuple[str, str]:
    """The chat template's text before what a user says, and behind it up to the answer."""
    if model.tokenizer.chat_template is None:
        raise ModelError(f"{model.name} has no chat template: it can't make up a user's turn")
    turns = [{"role": "user", "content": MARK}]
    text = str(
        model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    )
    if text.count(MARK) != 1:
        raise ModelError(
            f"the chat template of {model.name} does not hold what the user says once, as it is"
        )
    before, _, after = text.partition(MARK)
    return before, after
