"""What an answer has to look like: which tokens may follow its beginning, as llguidance knows it.

A grammar bounds the next-token distribution, so it is for modes in which each token is chosen
knowing all before it. Where it leaves no choice, verified decoding needs no draft of the model's.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray
from packaging.version import Version

from setblock.model import Model
from setblock.reading import LONGEST_FORM, limits, with_room, written
from setblock.settings import FORMATS, Settings

LONGEST = 300  # characters of what it says of an error
INSTALL = "pip install '.[structured]' in the checkout, or make setup"

# What llguidance makes of a tokenizer takes up to a second: the last one, its size and end tokens.
_vocabularies: WeakKeyDictionary[Any, tuple[tuple[int, ...], Any]] = WeakKeyDictionary()
# And what it made of the last forms of answers, or what was wrong with them.
MOST_READ = 32
_read: WeakKeyDictionary[Any, OrderedDict[tuple[Any, ...], Any]] = WeakKeyDictionary()
_reading = threading.Lock()


class Grammar:
    """Which tokens may come next in one answer."""

    def __init__(self, name: str, matcher: Any, ends: Sequence[int], mask_token_id: int) -> None:
        """name: the option that asks for it. matcher: llguidance's. ends: end tokens, the one to
        expect first. mask_token_id: of the token that is never said.
        """
        self.name, self.matcher = name, matcher
        self.ends, self.mask_token_id = ends, mask_token_id

    def copy(self) -> "Grammar":
        """For another answer that begins with what this one has."""
        return Grammar(self.name, self.matcher.deep_copy(), self.ends, self.mask_token_id)

    def say(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these; what is behind an end token is no part of it.

        Raises: ValueError for one that may not stand there, as where nothing may.
        """
        matcher = self.matcher
        for token in tokens:
            if token in self.ends and matcher.is_accepting():
                return
            if token in self.ends or not matcher.try_consume_tokens([token]):
                raise ValueError(f"{self.name} can't be followed: {_why(matcher)}")

    def allowed(self, draft: Sequence[int] = ()) -> list[UInt8[ndarray, " bytes"]]:
        """A bit for each token of the vocabulary, whether it may come next; the same behind each
        token of the draft, up to the first that may not stand there, ends the answer or leaves
        nothing that may follow.

        Raises: ValueError where nothing may come next.
        """
        found = [self._bits(self.matcher)]
        if not found[0].any():
            raise ValueError(f"{self.name} can't be followed: {_why(self.matcher)}")
        matcher = self.matcher.deep_copy() if draft else self.matcher
        for token in draft:
            if token in self.ends or not matcher.try_consume_tokens([token]):
                break
            found.append(self._bits(matcher))
            if not found[-1].any():
                return found[:-1]
        return found

    def fitted(
        self, draft: Sequence[int], most: int, others: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int], list[bool]]:
        """(the draft as far as it is allowed, at most so many tokens; which of them have no
        alternative). Those stand in place of what was drafted there, or behind it.

        others: what may stand in place of a drafted token that is not allowed, the best first.
        """
        tokens: list[int] = []
        forced: list[bool] = []
        matcher = self.matcher.deep_copy()
        while len(tokens) < most and not (tokens and tokens[-1] in self.ends):
            if matcher.is_accepting() and self._ended(matcher):
                return [*tokens, self.ends[0]], [*forced, True]
            place = len(tokens)
            if only := list(matcher.compute_ff_tokens()):
                tries = [only[: most - place]]
            elif place < len(draft):
                tries = [[one] for one in (draft[place], *(others[place] if others else ()))]
            else:
                break
            for new in tries:
                new = new[: new.index(self.mask_token_id)] if self.mask_token_id in new else new
                if count := matcher.try_consume_tokens(new) if new else 0:
                    tokens += new[:count]
                    forced += [bool(only)] * count
                    break
            else:
                break
        return tokens, forced

    def _ended(self, matcher: Any) -> bool:
        """Whether nothing but an end token can come next."""
        return int(np.bitwise_count(self._bits(matcher)).sum()) == len(self.ends)

    def _bits(self, matcher: Any) -> UInt8[ndarray, " bytes"]:
        """A bit for each token that may come next; none after an error."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8).copy()
        if matcher.is_error():
            return bits * np.uint8(0)
        # An end token that has a text of its own is never a part of one.
        never = [self.mask_token_id, *(() if matcher.is_accepting() else self.ends)]
        for token in never:
            bits[token // 8] &= 255 - (1 << token % 8)
        return bits


def compiled(model: Model, settings: Settings) -> Grammar | None:
    """What these settings ask of an answer, before its first token; None if nothing.

    Raises: ImportError without llguidance; ValueError naming the option for what it can't express.
    """
    asked = ((name, getattr(settings, name)) for name in FORMATS)
    name, form = next(((name, form) for name, form in asked if form is not None), ("", None))
    if form is None:
        return None
    _check_library(name)
    tokenizer: Any = model.tokenizer
    ends = sorted(model.eos_token_ids, key=lambda id: (id != tokenizer.eos_token_id, id))
    if not ends:
        raise ValueError(f"{name} needs an end-of-text token, and {model.name} has none")
    key = name, form, model.vocab_size, *ends, model.mask_token_id
    with _reading:
        known = _read.setdefault(tokenizer, OrderedDict())
        if found := known.get(key):
            known.move_to_end(key)
    if found is None:
        try:
            found = _grammar(model, name, form, ends)
        except ValueError as error:
            found = str(error)
        with _reading:
            known[key] = found
            while len(known) > MOST_READ:
                known.popitem(last=False)
    if isinstance(found, str):
        raise ValueError(found)
    return found.copy()


def _grammar(model: Model, name: str, form: str, ends: Sequence[int]) -> Grammar:
    """That of an option's form. Raises: ValueError naming the option for what it can't express."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    tokenizer: Any = model.tokenizer
    size = model.vocab_size
    if _vocabularies.get(tokenizer, ((), None))[0] != (size, *ends):
        try:
            made = from_tokenizer(tokenizer, n_vocab=size, eos_token=list(ends))
            _vocabularies[tokenizer] = (size, *ends), made
        except Exception as error:
            raise ValueError(
                f"{name} can't be used with the tokenizer of {model.name}: {error}"
            ) from error
    if len(form) > LONGEST_FORM:
        raise ValueError(f"{name} must have at most {LONGEST_FORM:,} characters, got {len(form):,}")
    try:
        grammar = written(name, form)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} can't be used: {error}") from None
    known = _vocabularies[tokenizer][1]
    matcher = with_room(lambda: LLMatcher(known, grammar, log_level=0, limits=limits()))
    if matcher.is_error():
        raise ValueError(f"{name} can't be used: {_why(matcher)}")
    found = Grammar(name, matcher, ends, model.mask_token_id)
    found.allowed()  # what nothing matches is refused here
    return found


def check_schema(schema: dict[str, Any]) -> None:
    """Raises: ValueError for one that can't be followed; ImportError as `compiled`."""
    _check_library("a schema")
    from llguidance import LLMatcher

    written = LLMatcher.grammar_from_json_schema(schema)
    if told := with_room(lambda: LLMatcher.validate_grammar(written)):
        raise ValueError(_brief(told))


def _check_library(name: str) -> None:
    """Raises: ImportError without llguidance."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{name} needs llguidance: {INSTALL}") from error
    # Before 1.8 white space in JSON has no bound, whatever its pattern says.
    if Version(found := version("llguidance")) < Version("1.8"):
        raise ImportError(f"{name} needs llguidance 1.8 or newer, got {found}: {INSTALL}")


def _why(matcher: Any) -> str:
    """A matcher's error in one line."""
    told = str(matcher.get_error())
    if not told or told.startswith("NoExtensionBias"):
        return "no token can come next, as llguidance has it"
    return _brief(told)


def _brief(told: str) -> str:
    """llguidance's words in one line."""
    marked = [line for line in told.splitlines() if line.startswith("error: ")]  # of an expression
    told = " ".join((marked[0].removeprefix("error: ") if marked else told).split())
    # Not where in a grammar that nobody wrote, nor where in the library.
    told = re.sub(r"^at \d+\(\d+\): | <(backtrace|non-verbose).*", "", told)
    return told if len(told) <= LONGEST else f"{told[:LONGEST]}..."
