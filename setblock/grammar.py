"""What an answer has to look like: which tokens may follow its beginning, as llguidance knows it.

A grammar bounds the next-token distribution, so it is for modes in which each token is chosen
knowing all before it. Where it leaves no choice, verified decoding needs no draft of the model's.
"""

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from setblock.model import Model
from setblock.settings import Settings

# White space in JSON, where a schema's "x-guidance" says no other: of any length, small models
# would write nothing else.
SPACE = r" |\n[ \t]{0,40}"
INSTALL = "pip install '.[structured]' in the checkout, or make setup"

# What llguidance makes of a tokenizer takes it up to a second: by size and end tokens.
_vocabularies: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


class Grammar:
    """Which tokens may come next in one answer."""

    def __init__(self, name: str, matcher: Any, ends: Sequence[int]) -> None:
        """name: the option that asks for it. matcher: llguidance's. ends: end tokens, the one to
        expect first.
        """
        self.name, self.matcher, self.ends = name, matcher, ends
        self._bits(matcher)

    def copy(self) -> "Grammar":
        """For another answer that begins with what this one has."""
        return Grammar(self.name, self.matcher.deep_copy(), self.ends)

    def say(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these, which are allowed; after an end token all are."""
        for token in tokens:
            if not self.matcher.consume_token(token):
                raise ValueError(f"{self.name} can't be followed: {_why(self.matcher)}")
            if token in self.ends:
                return

    def allowed(self, draft: Sequence[int]) -> list[bytes]:
        """A bit for each token of the vocabulary, whether it may come next; the same behind each
        token of the draft, up to the first that may not stand there or ends the answer.
        """
        bits, matcher = [self._bits(self.matcher)], self.matcher.deep_copy()
        for token in draft:
            if token in self.ends or not matcher.try_consume_tokens([token]):
                break
            bits.append(self._bits(matcher))
        return bits

    def fitted(self, draft: Sequence[int], most: int) -> tuple[list[int], list[bool]]:
        """(the draft as far as it is allowed, at most so many tokens; which of them have no
        alternative). Those stand in place of what was drafted there, or behind it.
        """
        tokens: list[int] = []
        forced: list[bool] = []
        matcher = self.matcher.deep_copy()
        while len(tokens) < most and not (tokens and tokens[-1] in self.ends):
            if matcher.is_accepting() and self._ended(matcher):
                return [*tokens, self.ends[0]], [*forced, True]
            only = list(matcher.compute_ff_tokens())
            new = (only or list(draft[len(tokens) : len(tokens) + 1]))[: most - len(tokens)]
            count = matcher.try_consume_tokens(new) if new else 0
            tokens += new[:count]
            forced += [bool(only)] * count
            if count == 0:
                break
        return tokens, forced

    def _ended(self, matcher: Any) -> bool:
        """Whether nothing but an end token can come next."""
        return int.from_bytes(self._bits(matcher)).bit_count() == len(self.ends)

    def _bits(self, matcher: Any) -> bytes:
        bits: bytes = matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"{self.name} can't be followed: {_why(matcher)}")
        return bits


def compiled(model: Model, settings: Settings) -> Grammar | None:
    """What these settings ask of an answer, before its first token; None if nothing.

    Raises: ImportError without llguidance; ValueError naming the option for what it can't express.
    """
    if settings.json_schema is None and settings.regex is None:
        return None
    name = "regex" if settings.json_schema is None else "json_schema"
    try:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise ImportError(f"{name} needs llguidance: {INSTALL}") from error
    tokenizer: Any = model.tokenizer
    ends = sorted(model.eos_token_ids, key=lambda id: (id != tokenizer.eos_token_id, id))
    if not ends:
        raise ValueError(f"{name} needs an end-of-text token, and {model.name} has none")
    known = _vocabularies.setdefault(tokenizer, {})
    size = model.vocab_size
    if (size, *ends) not in known:
        try:
            known[size, *ends] = from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
        except Exception as error:
            raise ValueError(
                f"{name} can't be used with the tokenizer of {model.name}: {error}"
            ) from error
    try:
        if settings.json_schema is not None:
            schema = json.loads(settings.json_schema)
            if not any(name.startswith("whitespace") for name in schema.get("x-guidance", ())):
                schema["x-guidance"] = {**schema.get("x-guidance", {}), "whitespace_pattern": SPACE}
            written = LLMatcher.grammar_from_json_schema(schema)
        else:
            written = LLMatcher.grammar_from_regex(str(settings.regex))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} can't be used: {error}") from None
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(known[size, *ends], written, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"{name} can't be used: {_why(matcher)}")
    return Grammar(name, matcher, ends)


def _why(matcher: Any) -> str:
    """llguidance's error in one line."""
    lines = str(matcher.get_error() or matcher.stop_reason()).splitlines()
    if lines[0] == "NoExtensionBias":
        return "no token can come next"
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines)[0].strip()
