"""What a decoding run does: mode, solver, sizes, drafts; checked once, kept with every result."""

import json
import math
import reprlib
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from setblock.masks import MOST_SLOTS
from setblock.sampling import Sampler
from setblock.solvers import FixedCount, Solver

MODES = ("sbd", "ntp", "verified")
DRAFTS = ("branches", "solver")
FORMATS = ("json_schema", "regex", "grammar")  # what an answer has to look like
# What changes the logits of tokens that the text has, and the value that changes nothing.
PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
# What else changes logits, and the value that changes nothing.
BIASES = {"logit_bias": (), "min_new_tokens": 0}
MOST_BIAS = 100  # as in OpenAI's API
MOST_BIASES = 1024  # as in vLLM
MOST_LOGPROBS = 20  # tokens that are told of a place
MOST_QUERIES = 8192  # query tokens of a row's forward in mode verified
OWN_OPTIONS = {
    "sbd": ("slide", "next_token_seed", "fallback"),
    "verified": ("draft", "branches", "seeds", "lookup", "lenience"),
}


@dataclass(frozen=True)
class Settings:
    """What a decoding run does; validated once, stored with every result.

    block_size: slots of a block (k of the paper), unused by mode "ntp" like `solver`.
    max_new_tokens: generated tokens at most, EOS included.
    stop: texts that end a row; the text is cut before them.
    ignore_eos: generate on past EOS; EOS itself stays allowed.
    slide: mode "sbd": a block begins behind the last of the final tokens without a gap, instead of
        behind the last whole block, and ends at the limit; its first token is the next-token one.
    next_token_seed: mode "sbd": a block's first token is the next-token one, whose distribution
        the forward that encodes the text before it has anyway. The solver takes it for certain.
    fallback: mode "sbd": a block all of whose masked slots have a higher entropy than this, in
        nats, is finished token by token; None is never.
    draft: mode "verified": "branches" verifies a draft and makes the next one in one forward,
        "solver" drafts with `solver` and verifies in a forward of its own.
    branches: of draft "branches": for how many accepted lengths, the likeliest, the next draft is
        made; None is all.
    seeds: of draft "branches": for each of them, how many more drafts are made that begin with one
        of the likeliest tokens.
    lookup: of draft "branches": tokens at most of a draft that is copied from behind an earlier
        place of the text's last tokens, where that promises more than the model's own; 0 is never.
        Blocks of one token have no other draft.
    lenience: mode "verified": a drafted token is accepted as well if its probability, with
        sampling's noise if any, is at least this share of that of next-token decoding's token; 1 is
        lossless, less is not. See verified.VerifiedRows._said.
    json_schema, regex, grammar: modes "ntp" and "verified": what the whole answer has to look like,
        a JSON Schema as its text, a regular expression or a grammar in llguidance's Lark; see
        grammar.Grammar.
    repetition_penalty: modes "ntp" and "verified": the logits of tokens that the prompt or the
        answer has are divided by it, or multiplied where they are negative. Source:
        arXiv:1909.05858, "Penalized sampling", as transformers has it.
    presence_penalty, frequency_penalty: likewise; taken from the logits of tokens that the answer
        has, the latter for each time. Source: OpenAI's API.
    logit_bias: likewise; pairs of a token's id and what is added to its logit, in -100..100, before
        penalties.
    min_new_tokens: likewise; tokens of an answer before any of the model's end tokens may come,
        unless a form leaves nothing else.
    logprobs: of each token the log-probability, and so many of the likeliest in its place with
        theirs; None is none of this. See running.TokenLogprob.
    """

    mode: str
    solver: Solver
    block_size: int
    max_new_tokens: int = 256
    sampler: Sampler = field(default_factory=Sampler)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    slide: bool = False
    next_token_seed: bool = False
    fallback: float | int | None = None
    draft: str = "branches"
    branches: int | None = None
    seeds: int = 0
    lookup: int = 0
    lenience: float | int = 1.0
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    logit_bias: tuple[tuple[int, float | int], ...] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("draft", DRAFTS)):
            if getattr(self, name) not in allowed:
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {got!r}")
        if isinstance(self.solver, type) or not isinstance(self.solver, Solver):
            raise ValueError(f"solver must be a solver or its text, got {self.solver!r}")
        if str(self.solver) == object.__repr__(self.solver):
            raise ValueError(
                f"solver must have a __str__, which names it in results, got {self.solver!r}"
            )
        bounds = {"block_size": 1, "max_new_tokens": 1, "branches": 1, "seeds": 0, "lookup": 0}
        for name, least in bounds.items():
            value = getattr(self, name)
            if name == "branches" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.block_size > MOST_SLOTS:
            raise ValueError(f"block_size must be at most {MOST_SLOTS}, got {self.block_size}")
        for name in ("ignore_eos", "slide", "next_token_seed"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.fallback is not None and (
            isinstance(self.fallback, bool)
            or not isinstance(self.fallback, (int, float))
            or not 0 <= self.fallback < math.inf
        ):
            raise ValueError(
                f"fallback must be a finite entropy of at least 0, got {self.fallback!r}"
            )
        if self.slide and self.fallback is not None:
            raise ValueError(
                "fallback is for whole blocks, which blocks that slide never are, got "
                f"{self.fallback!r} with slide"
            )
        if (
            isinstance(self.lenience, bool)
            or not isinstance(self.lenience, (int, float))
            or not 0 < self.lenience <= 1
        ):
            raise ValueError(
                f"lenience must be a number in (0, 1], where 1 is lossless, got {self.lenience!r}"
            )
        if self.lenience != 1 and self.mode == "verified" and self.block_size == 1:
            raise ValueError(
                "lenience is for a model's own drafts, of which blocks of one token have none, got "
                f"{self.lenience!r} with block_size 1"
            )
        for mode, names in OWN_OPTIONS.items():
            for name in names if self.mode != mode else ():
                got = getattr(self, name)
                if got != type(self).__dataclass_fields__[name].default:
                    raise ValueError(f"{name} is for mode {mode}, got {got!r} in mode {self.mode}")
        for name in ("branches", "seeds", "lookup") if self.draft == "solver" else ():
            if getattr(self, name):
                got = getattr(self, name)
                raise ValueError(f"{name} is for draft 'branches', got {got} with draft 'solver'")
        told = self.logprobs
        if told is not None and (type(told) is not int or not 0 <= told <= MOST_LOGPROBS):
            raise ValueError(f"logprobs must be an integer in 0..{MOST_LOGPROBS}, got {told!r}")
        self._check_formats()
        penalties_of(self, self.mode)  # in range
        self._check_biases()
        longest = max(self.block_size, self.lookup + 1)
        lengths = min(self.branches or longest, longest)
        queries = longest + self.block_size * lengths * (1 + self.seeds)
        if self.mode == "verified" and self.draft == "branches" and queries > MOST_QUERIES:
            raise ValueError(
                f"seeds, branches, block_size and lookup make forwards of at most {MOST_QUERIES} "
                f"tokens, got {self.seeds}, {self.branches}, {self.block_size} and {self.lookup}: "
                f"{queries}"
            )
        texts = self.stop if isinstance(self.stop, tuple) else (None,)
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"stop must be texts, none of them empty, got {self.stop!r}")

    def _check_formats(self) -> None:
        given = {name: getattr(self, name) for name in FORMATS if getattr(self, name) is not None}
        if not given:
            return
        name, value = next(iter(given.items()))
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
        if self.mode == "sbd":
            raise in_blocks(name, value)
        if self.ignore_eos:
            raise ValueError(f"{name} can't be used with ignore_eos: it says where the answer ends")
        if name != "json_schema":
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a text, got {value!r}")
            return
        try:
            schema = json.loads(value, parse_constant=_no) if isinstance(value, str) else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema must be JSON: {error}") from None
        if not isinstance(schema, dict):
            got = reprlib.repr(value)
            raise ValueError(f"json_schema must be an object or its JSON text, got {got}")

    def _check_biases(self) -> None:
        if (count := len(self.logit_bias)) > MOST_BIASES:
            raise ValueError(f"logit_bias may be of {MOST_BIASES} tokens, got {count}")
        for pair in self.logit_bias:
            token, bias = pair
            known = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if type(token) is not int or token < 0 or not (known and abs(bias) <= MOST_BIAS):
                raise ValueError(
                    f"logit_bias must be of token ids, each with a number in -{MOST_BIAS}.."
                    f"{MOST_BIAS}, got {token!r}: {bias!r}"
                )
        least = self.min_new_tokens
        if type(least) is not int or least < 0:
            raise ValueError(f"min_new_tokens must be an integer of at least 0, got {least!r}")
        if self.mode == "sbd" and (given := self.biases):
            raise in_blocks(*next(iter(given.items())))

    @property
    def biases(self) -> dict[str, Any]:
        """Those that change something."""
        given = {name: getattr(self, name) for name in BIASES}
        return {name: value for name, value in given.items() if value != BIASES[name]}

    @property
    def penalties(self) -> dict[str, float | int]:
        """Those that change something."""
        return penalties_of(self, self.mode)

    @cached_property
    def shared(self) -> tuple["Settings", str]:
        """What answers that are decoded together have in common, to be compared: all but sampling,
        penalties, biases, stop texts, forms, limits that no draft is cut short by, and a solver
        that has no say. A solver is known by its text.
        """
        draft = 1 if self.mode == "ntp" else max(self.block_size, self.lookup + 1)
        most = min(self.max_new_tokens, draft)
        free: dict[str, Any] = {**dict.fromkeys(FORMATS), **PENALTIES, **BIASES, "stop": ()}
        rest = replace(self, solver=FixedCount(1), sampler=Sampler(), max_new_tokens=most, **free)
        return rest, str(self.solver) if self.uses_solver else ""

    @property
    def described(self) -> dict[str, Any]:
        """As JSON values; no solver where none has a say, no format, penalty, bias, min_p or
        logprobs where none is asked for.
        """
        told = {**asdict(self), "solver": str(self.solver) if self.uses_solver else None}
        if not self.sampler.min_p:
            del told["sampler"]["min_p"]
        idle = {name for name in (*FORMATS, "logprobs") if told[name] is None}
        idle |= PENALTIES.keys() | BIASES.keys()
        return {k: v for k, v in told.items() if k not in idle} | self.penalties | self.biases

    @property
    def uses_solver(self) -> bool:
        """Whether `solver` has a say."""
        return self.mode == "sbd" or (self.mode == "verified" and self.draft == "solver")

    @property
    def copies_alone(self) -> bool:
        """Whether all drafts are copied from the text, which needs no training."""
        return self.mode == "verified" and self.lookup > 0 and self.block_size == 1

    @property
    def seeds_blocks(self) -> bool:
        """Whether a block's first token is the next-token one where its distribution is known."""
        return self.slide or self.next_token_seed

    @property
    def stride(self) -> int:
        """What a row ends at a multiple of: a block where blocks are whole."""
        return self.block_size if self.mode == "sbd" and not self.slide else 1

    @property
    def num_slots(self) -> int:
        """Positions that a row takes after its prompt."""
        return -(-self.max_new_tokens // self.stride) * self.stride

    def room(self, left: Any) -> Any:
        """How many tokens an answer has room for where so many positions are left, or arrays."""
        return left // self.stride * self.stride


def penalties_of(given: Any, mode: str) -> dict[str, float | int]:
    """Those of a request's penalties that change something.

    given: has an attribute for each of PENALTIES.
    Raises: ValueError for a value that is out of range, or has no place in the mode.
    """
    found = {}
    for name, neutral in PENALTIES.items():
        value = getattr(given, name)
        least, most = (0.01, 100) if neutral else (-1000, 1000)  # no logit may overflow
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (known and least <= value <= most):
            raise ValueError(f"{name} must be a number in {least}..{most}, got {value!r}")
        found |= {name: value} if value != neutral else {}
    if found and mode == "sbd":
        raise in_blocks(*next(iter(found.items())))
    return found


def in_blocks(name: str, value: Any) -> ValueError:
    """What is wrong with an option of next tokens, of this value, in mode "sbd"."""
    return ValueError(
        f"{name} is for modes ntp and verified, in which each token is chosen knowing all before "
        f"it, got {reprlib.repr(value)} in mode sbd"
    )


def _no(constant: str) -> None:
    """Raises: ValueError for NaN and its like, which Python reads."""
    raise ValueError(f"{constant} is no JSON")
