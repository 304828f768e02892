"""What a request may ask of the plugin, and how that reaches vLLM.

Through SamplingParams.extra_args (over HTTP: vllm_xargs): the names of OWN. Everything else is
vLLM's own; what the plugin does not do is refused when the request comes.
"""

import hashlib
import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

from setblock.sampling import Sampler
from setblock.settings import DRAFTS, MODES, MOST_LOGPROBS, PENALTIES, in_blocks, penalties_of
from setblock.solvers import ConfidentPrefix, Solver, parse

OWN = ("mode", "solver", "block_size", "slide", "draft", "lookup", "lenience")
MOST_STOPS = 16  # end tokens that a request may have
WIDTH = "diffusion_canvas_length"  # vLLM's own name for a request's block size
SEED = "setblock_seed"  # of a request that names none, and of all of its answers
HOLDS = "setblock_holds"  # of a request, see `Decoding.holds`
CUTS = "setblock_cuts"  # of a request, see `cuts`
BACKENDS = ("xgrammar", "guidance")  # of vLLM, for forms of answers
NO_PENALTIES = tuple(PENALTIES.values())


@dataclass(frozen=True)
class Wishes:
    """What a request asks of the tokens of its answer, in modes "verified" and "ntp".

    only: its tokens, if not all may be said. biases: what is added to the logits of tokens.
    least, ends: tokens of the answer before any of the latter. unsaid: words as their tokens.
    """

    only: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()
    least: int = 0
    ends: tuple[int, ...] = ()
    unsaid: tuple[tuple[int, ...], ...] = ()


NO_WISHES = Wishes()
WISHES = ("allowed_token_ids", "logit_bias", "min_tokens", "bad_words")  # vLLM's names of them


def _wishes_of(params: Any, mode: str) -> Wishes:
    """Raises: ValueError in a mode that does not know them."""
    if not (given := [name for name in WISHES if getattr(params, name)]):
        return NO_WISHES
    if mode == "sbd":
        raise in_blocks(given[0], getattr(params, given[0]))
    if wrong := [one for one in (params.logit_bias or {}).values() if not math.isfinite(one)]:
        raise ValueError(f"logit_bias must be of finite numbers, got {wrong[0]}")
    return Wishes(
        tuple(params.allowed_token_ids or ()),
        tuple((params.logit_bias or {}).items()),
        params.min_tokens,
        tuple(sorted(params.all_stop_token_ids)) if params.min_tokens else (),
        tuple(map(tuple, params.bad_words_token_ids or ())),
    )


@dataclass(frozen=True)
class Decoding:
    """How one request is decoded.

    verified: the causal logits of a block's commit accept or cut it. Mode "ntp" is that with
    blocks of one token, which hold no draft.
    sampler: of any seed; each request has its own, see `seed_of`.
    branches: the forward that verifies a draft makes the next one, see `state`; the
    solver is not asked then. lookup: copied tokens of a draft at most.
    lenience: of drafts that are not copied, by the rule of `setblock.generate`; 1 is
    lossless.
    slide: mode "sbd": a block begins behind the last final token. What the solver reveals is
    without a gap then, and the next forward commits all of it.
    penalties: as `settings.PENALTIES`, of next-token logits; all neutral in mode "sbd".
    told: as `Settings.logprobs`.
    """

    verified: bool
    solver: Solver
    block_size: int
    sampler: Sampler
    branches: bool = False
    lookup: int = 0
    lenience: float | int = 1
    slide: bool = False
    penalties: tuple[float | int, ...] = NO_PENALTIES
    wishes: Wishes = NO_WISHES
    told: int | None = None

    @property
    def exact(self) -> bool:
        """Whether what is said does not depend on what was drafted."""
        return self.verified and self.lenience == 1

    @property
    def commits(self) -> bool:
        """Whether each forward commits some tokens and looks at masks behind them."""
        return self.branches or self.slide

    @property
    def holds(self) -> int:
        """Tokens before the masks of a forward that commits, at most; 0 if not each does."""
        return max(self.block_size, 1 + self.lookup) if self.commits else 0


def decoding_of(params: Any, defaults: dict[str, Any], canvas: int) -> Decoding:
    """The decoding of a request with these sampling parameters.

    canvas: the server's block size, which a request's may not exceed.
    Raises: ValueError naming what is not supported or out of range.
    """
    extra = dict(params.extra_args or {})
    if unknown := sorted(set(extra) - {*OWN, WIDTH, SEED, HOLDS, CUTS}):
        raise ValueError(f"{unknown[0]} is not one of {', '.join(OWN)}")
    mode = extra.get("mode", defaults.get("mode", "sbd"))
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    knowing = params.structured_outputs is not None or penalties_of(params, "ntp")
    knowing = knowing or any(getattr(params, name) for name in WISHES)
    if knowing and mode == "sbd" and "mode" not in extra:  # as `setblock.generate` has it
        mode = "verified"
    penalties = PENALTIES | penalties_of(params, mode)
    wishes = _wishes_of(params, mode)
    if params.structured_outputs is not None:
        _check_form(params, mode, defaults)
    solver = extra.get("solver", defaults.get("solver", "entropy:0.1"))
    if not isinstance(solver, str):
        raise ValueError(f"solver must be a text such as entropy:0.1, got {solver!r}")
    slide = _slides(extra, mode, solver, defaults)
    branches = _by_branches(extra, mode, defaults)
    drafting = defaults.get("verified", {}) if branches else {}
    size = extra.get("block_size", min(drafting.get("block_size", canvas), canvas))
    if type(size) is not int or not 1 <= size <= canvas:
        raise ValueError(f"block_size must lie in 1..{canvas}, the server's, got {size!r}")
    size = 1 if mode == "ntp" else size
    lookup = extra.get("lookup", min(drafting.get("lookup", 0), canvas - 1))
    if "lookup" in extra and not branches:
        raise ValueError(
            f"lookup is for mode verified with draft branches (not with --no-fused), got "
            f"{lookup!r} with mode {mode}" + (" and draft solver" if mode == "verified" else "")
        )
    if type(lookup) is not int or not 0 <= lookup < canvas:
        raise ValueError(f"lookup must lie in 0..{canvas - 1}, got {lookup!r}")
    lenience = extra.get("lenience", 1)
    if type(lenience) not in (int, float) or not 0 < lenience <= 1:
        raise ValueError(
            f"lenience must be a number in (0, 1], where 1 is lossless, got {lenience!r}"
        )
    if lenience != 1 and (mode != "verified" or size == 1):
        raise ValueError(
            f"lenience is for mode verified with blocks of more than one token, got {lenience!r} "
            f"with mode {mode} and block_size {size}"
        )
    _refuse(params)
    sampler = Sampler(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        seed=params.seed or 0,
        min_p=params.min_p,
    )
    own = parse(solver), size, replace(sampler, seed=0)
    asked = tuple(penalties.values()), wishes, params.logprobs
    return Decoding(mode != "sbd", *own, branches, lookup, lenience, slide, *asked)


def _check_form(params: Any, mode: str, defaults: dict[str, Any]) -> None:
    """Raises: ValueError where an answer can't be of a given form."""
    if mode == "sbd":
        raise ValueError(
            "structured_outputs are for modes ntp and verified, in which each token is chosen "
            "knowing all before it, got mode sbd"
        )
    if not defaults.get("fused", False):
        raise ValueError(
            "structured_outputs need a server that knows the tokens of each forward: they can't be "
            "had with --no-fused"
        )
    if params.ignore_eos:
        raise ValueError(
            "structured_outputs can't be used with ignore_eos: they say where the answer ends"
        )


def _slides(extra: dict[str, Any], mode: str, solver: str, defaults: dict[str, Any]) -> bool:
    """Whether blocks slide. Raises: ValueError where they can't."""
    slide = extra.get("slide", mode == "sbd" and defaults.get("slide", False))
    if slide not in (False, True):  # 0 and 1 over HTTP
        raise ValueError(f"slide must be 0 or 1, got {slide!r}")
    if not slide:
        return False
    whose = "" if "slide" in extra else ", as the server has it"
    if mode != "sbd":
        raise ValueError(f"slide is for mode sbd, got {slide!r} with mode {mode}")
    if hindrance := hindrance_to_sliding(solver, defaults.get("fused", False)):
        raise ValueError(f"slide must be 0 {hindrance}, got {slide!r}{whose}")
    return True


def hindrance_to_sliding(solver: str, fused: bool) -> str | None:
    """Where blocks can't slide, if they can't: what is final is committed by the next forward, so
    that there is no place for a gap, nor a forward of always the same width.
    """
    if not isinstance(parse(solver), ConfidentPrefix):
        return f"on vLLM with solver {solver}, which may leave gaps (prefix:TAU leaves none)"
    return None if fused else "on vLLM with --no-fused"


def _by_branches(extra: dict[str, Any], mode: str, defaults: dict[str, Any]) -> bool:
    """Whether drafts come from branches.

    They do wherever they can, unless the request or whoever started the server named a solver: they
    need a server that reads how many tokens a forward takes.
    """
    able, given = defaults.get("fused", False), "draft" in extra
    draft = extra.get("draft")
    if given and draft not in DRAFTS:
        raise ValueError(f"draft must be one of {', '.join(DRAFTS)}, got {draft!r}")
    if given and mode != "verified":
        raise ValueError(f"draft is for mode verified, got {draft} with mode {mode}")
    if draft == "branches" and not able:
        raise ValueError("draft must be solver on a server with --no-fused, got branches")
    if draft == "branches" and "solver" in extra:
        raise ValueError(f"solver is for draft solver, got {extra['solver']!r} and draft branches")
    solver = "solver" in extra or defaults.get("draft") == "solver"
    return draft == "branches" or (not given and mode == "verified" and able and not solver)


def seed_of(params: Any, name: str) -> int:
    """The seed of a request that was accepted: a fresh one where it names none, and another for
    each of several answers, which vLLM makes requests with names of their own.
    """
    if params.seed is not None:
        return int(params.seed)
    fresh = (params.extra_args or {}).get(SEED, 0)
    return int.from_bytes(hashlib.sha256(f"{fresh} {name}".encode()).digest()[:7], "big")


def width_of(params: Any, served: int) -> int:
    """The block size of a request that was accepted; `served`, the server's, of any other."""
    return int((getattr(params, "extra_args", None) or {}).get(WIDTH, served))


def holds_of(params: Any) -> int:
    """How many tokens a forward of a request that was accepted commits or verifies at most, if each
    forward does; 0 if not.
    """
    return int((getattr(params, "extra_args", None) or {}).get(HOLDS, 0))


def cuts(defaults: dict[str, Any], how: Decoding) -> bool:
    """Whether the load may cut forwards of a request that is decoded so.

    defaults: of whose "adaptive" is "all" for every request, "exact" for those that say the same
    then, and missing for none.
    """
    adaptive = defaults.get("adaptive")
    return adaptive == "all" or (adaptive == "exact" and how.exact)


def cuts_of(params: Any) -> bool:
    """Whether the load may cut forwards of a request that was accepted."""
    return bool((getattr(params, "extra_args", None) or {}).get(CUTS, False))


def ends_of(params: Any) -> set[int]:
    """The tokens that end a request: the model's and its own."""
    ends = set() if params.ignore_eos else set(params.all_stop_token_ids)
    return ends | set(params.stop_token_ids or ())


def _refuse(params: Any) -> None:
    """Raises ValueError for what neither vLLM's diffusion path nor this plugin does."""
    if len(ends := ends_of(params)) > MOST_STOPS:
        raise ValueError(
            f"stop_token_ids: at most {MOST_STOPS} tokens may end a request, got {ends}"
        )
    names = (
        "logprob_token_ids", "repetition_detection", "thinking_token_budget",
        "trace_decode_token_ids",
    )  # fmt: skip
    for name in names:
        if (given := getattr(params, name, None)) is not None and given != []:
            raise ValueError(f"{name} is not supported by set block decoding, got {given!r}")
    # Each of several answers has the next seed, and Sampler takes it.
    if params.seed is not None and params.seed + params.n > 2**63:
        raise ValueError(f"seed must be at most 2**63 - n, got {params.seed} with n {params.n}")
    if (told := params.logprobs) is not None and not 0 <= told <= MOST_LOGPROBS:
        raise ValueError(f"logprobs must lie in 0..{MOST_LOGPROBS}, got {told}")


def install() -> None:
    """Let vLLM's checks of a request for a diffusion model be ours, where the model is ours."""
    from vllm import SamplingParams  # type: ignore
    from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]

    from setblock.vllm import PREFIX

    theirs, of_forms = (
        SamplingParams._validate_diffusion,
        SamplingParams._validate_structured_outputs,
    )
    if getattr(theirs, "of_setblock", False):
        return

    def is_ours(model_config: Any) -> bool:
        return any(name.startswith(PREFIX) for name in model_config.architectures)

    def validate(self: Any, model_config: Any) -> None:
        if not is_ours(model_config):
            theirs(self, model_config)
            return
        settings = settings_of(model_config)
        try:
            found = decoding_of(self, settings, model_config.hf_config.canvas_length)
            if (only := {*found.wishes.only}) and only == {mask_of(model_config)}:
                raise ValueError(
                    f"allowed_token_ids must be of more than the mask token, {only.pop()}, which "
                    "is never said"
                )
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        own = {WIDTH: found.block_size, SEED: secrets.randbits(63), HOLDS: found.holds}
        own[CUTS] = cuts(settings, found)
        self.extra_args = {**(self.extra_args or {}), **own}

    def validate_form(self: Any, model_config: Any, *more: Any) -> None:
        if not is_ours(model_config):
            of_forms(self, model_config, *more)
            return
        of_forms(self, _InOrder(model_config), *more)
        if (form := self.structured_outputs) is not None and form._backend not in (None, *BACKENDS):
            raise VLLMValidationError(
                f"structured_outputs need the backend {' or '.join(BACKENDS)}, which take back as "
                f"many tokens as a draft has, got {form._backend}"
            )

    validate.of_setblock = True  # type: ignore[attr-defined]
    SamplingParams._validate_diffusion = validate
    SamplingParams._validate_structured_outputs = validate_form


class _InOrder:
    """A model's configuration, as of one whose tokens are chosen knowing all before them: vLLM
    knows no forms of answers for diffusion models.
    """

    is_diffusion = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def settings_of(model_config: Any) -> dict[str, Any]:
    """The checkpoint's own settings (mask token, mode, solver), and over them the server's."""
    own = (model_config.try_get_generation_config() or {}).get("setblock", {})
    return {**own, **getattr(model_config.hf_config, "setblock", {})}


def mask_of(model_config: Any) -> int:
    """The mask token. Raises: ValueError if the checkpoint names none."""
    mask = settings_of(model_config).get("mask_token_id", None)
    mask = getattr(model_config.hf_config, "mask_token_id", mask)
    if mask is None:
        raise ValueError(
            "the checkpoint names no mask token: export it with setblock, or give "
            "--hf-overrides '{\"mask_token_id\": N}'"
        )
    return mask
