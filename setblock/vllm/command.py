"""The command that starts vLLM's own server with the plugin."""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from setblock.checkpoint import base_of, checked_settings, read_settings
from setblock.loading import LOAD_ERRORS, place_of
from setblock.model import DEFAULTS
from setblock.names import ModelError, any_of, lasting, one_line
from setblock.solvers import BUILT_IN, parse
from setblock.vllm import ARCHITECTURES, PREFIX
from setblock.vllm.requests import hindrance_to_sliding

# Of vLLM's backends for CUDA the one that takes requests both causal and not on every GPU:
# FlashAttention does in its version 4 alone, FlashInfer in none.
BACKEND = "TRITON_ATTN"
CHOOSES_BACKEND = ("--attention-backend", "--attention-config", "-ac")  # vLLM's own words for it
CHOOSES_GRAPHS = ("--compilation-config", "-cc")


def command(
    name: str,
    settings: dict[str, Any],
    allow_untrained: bool = False,
    more: Sequence[str] = (),
    adaptive: bool | None = None,
    fused: bool = False,
    compile: str = "off",
) -> list[str]:
    """What to run. vLLM reads a checkpoint itself, and of an adapter the base.

    settings: mode, solver, block_size, slide, mask_token_id and dtype, where the checkpoint's own
    shall not hold.
    more: words for vLLM's own command line; where they choose no attention backend, ours is added
    on CUDA, and where they say nothing of what is compiled, that its graphs leave out attention.
    adaptive: blocks are as wide as pays under the load at hand, see `adaptive`: all, none, or by
    default those of requests that say the same then.
    fused: the forward that commits a block begins the next one, and mode verified has its drafts
    from branches unless `settings` name a solver.
    compile: off, kernels, or on: kernels, replayed as graphs on CUDA.
    Raises: ModelError; ValueError for a bad setting; ImportError without vLLM.
    """
    if compile not in ("off", "kernels", "on"):
        raise ValueError(
            "--compile must be off, kernels or on with engine vllm, whose graphs are of kernels, "
            f"got {compile}"
        )
    if find_spec("vllm") is None:
        raise ImportError(
            "vLLM is not installed: pip install '.[vllm]' in the checkout, or make vllm-env"
        )
    place = str(place_of(name))
    base, subject = None, f"no model {name!r}"
    try:
        base = base_of(place)
        whole = place
        if base is not None:
            subject = f"{name!r} is an adapter on {base!r}, which vLLM can't read"
            whole = str(place_of(base))
            if Path(base).suffix == ".gguf" or base_of(whole) is not None:
                raise ModelError("its base must be a whole checkpoint in safetensors")
        config = AutoConfig.from_pretrained(whole)
    except LOAD_ERRORS as error:
        raise ModelError(f"{subject}: {one_line(error)}") from error
    architecture = " and ".join(config.architectures or ["model of no named architecture"])
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{name} is a {architecture}; on vLLM only {any_of(ARCHITECTURES)} run")
    if getattr(config, "sliding_window", None):
        raise ModelError(f"{name} has sliding-window attention, which the plugin does not serve")
    given = {key: value for key, value in settings.items() if value is not None}
    own = checked_settings({**read_settings(place), **given})
    trained = own.get("trained", False)
    if not trained and not allow_untrained:
        raise ModelError(
            f"{name} was never trained for set block decoding: its blocks would hardly make sense; "
            "--allow-untrained serves it, token by token unless a request asks for blocks"
        )
    mask = own.get("mask_token_id")
    if mask is None or not 0 <= mask < config.vocab_size:
        if "mask_token_id" in given:
            raise ValueError(
                f"--mask-token-id must lie in 0..{config.vocab_size - 1}, the vocabulary of "
                f"{name}, got {mask}"
            )
        raise ModelError(
            f"{name} names no mask token within its {config.vocab_size} tokens, got {mask}: give "
            "--mask-token-id, or export it first, which writes one into the checkpoint"
        )
    solver = own.get("solver", DEFAULTS["solver"])
    parse(solver)
    if solver.partition(":")[0] not in BUILT_IN:
        raise ValueError(f"vLLM knows the built-in solvers alone, got {solver!r}")
    size = own.get("block_size", DEFAULTS["block_size"])
    # The settings of an adapter hold, and not those of its base, which vLLM would read.
    served = {"mode": own.get("mode", "sbd" if trained else "ntp"), "solver": solver}
    drafting = dict(own.get("verified", {}))
    if "block_size" in given:
        drafting.pop("block_size", None)
    served["verified"] = drafting
    served["slide"] = own.get("slide", False)
    if given.get("slide") and served["mode"] != "sbd":
        raise ValueError(f"slide is for mode sbd, got True in mode {served['mode']}")
    if served["slide"] and served["mode"] == "sbd":
        if hindrance := hindrance_to_sliding(solver, fused):
            raise ModelError(
                f"{name} decodes in blocks that slide, which they can't {hindrance}: --no-slide "
                "serves whole blocks"
            )
    served |= {"draft": "solver"} if "solver" in given else {}
    served |= {"fused": True} if fused else {}
    served |= {"adaptive": "all" if adaptive else "exact"} if adaptive is not False else {}
    served |= {"adapter": lasting(name)} if base is not None else {}
    words = {
        "--served-model-name": name,
        "--dtype": own.get("dtype", "auto"),
        "--diffusion-config": json.dumps({"canvas_length": 2 * size if fused else size}),
        "--scheduler-cls": "setblock.vllm.scheduler.scheduler",
        "--middleware": "setblock.vllm.fields.Fields",
        "--hf-overrides": json.dumps(
            {
                "architectures": [f"{PREFIX}{architecture}"],
                "canvas_length": size,
                "mask_token_id": mask,
                "setblock": served,
            }
        ),
    }
    cuda = bool(torch.cuda.is_available() and torch.version.cuda)
    if cuda and not _any_of(CHOOSES_BACKEND, more):
        words["--attention-backend"] = BACKEND
    if compile == "off":
        if own := _any_of(CHOOSES_GRAPHS, more):
            raise ValueError(f"{own} compiles nothing without --compile on or kernels")
        more = ["--enforce-eager", *more]
    elif _any_of(("--enforce-eager",), more):
        raise ValueError(f"--compile {compile} can't be used with --enforce-eager: leave one out")
    elif not _any_of(CHOOSES_GRAPHS, more):
        graphs = "PIECEWISE" if cuda and compile == "on" else "NONE"
        words["--compilation-config"] = json.dumps({"cudagraph_mode": graphs})
    if fused:
        more = ["--no-async-scheduling", *more]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", whole]
    return [*server, *(word for pair in words.items() for word in pair), *more]


def _any_of(names: tuple[str, ...], more: Sequence[str]) -> str | None:
    """The first of these words for vLLM's command line that is an option of these names."""
    return next((word for word in more if word.replace("_", "-").startswith(names)), None)
