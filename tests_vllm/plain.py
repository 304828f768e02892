"""vLLM as it is, in a process of its own, which has not seen the plugin."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Likely = dict[int, tuple[float, int]]  # log-probability and rank, of each token that is told of

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

def params(form=None, logit_bias=None, **more):
    bias = {3: -100.0, **{int(token): value for token, value in (logit_bias or {}).items()}}
    form = form and StructuredOutputsParams(**form)
    more = {"temperature": 0.0, "max_tokens": 60, **more}
    return SamplingParams(**more, logit_bias=bias, structured_outputs=form)  # no masks

def told(places):
    return [
        place and [[token, one.logprob, one.rank] for token, one in place.items()]
        for place in places or []
    ]

if __name__ == "__main__":
    model, asked, settings = json.load(sys.stdin)
    engine = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=512, **settings)
    prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
    found = engine.generate(prompts, [params(**more) for _, more in asked], use_tqdm=False)
    for one in found:
        [answer] = one.outputs
        lines = list(answer.token_ids), told(answer.logprobs), told(one.prompt_logprobs)
        print("said", json.dumps(lines))
"""


@dataclass(frozen=True)
class Said:
    ids: tuple[int, ...]
    told: list[Likely]
    prompt: list[Likely | None]


def plain(
    folder: Path, asked: Sequence[tuple[Sequence[int], dict[str, Any]]], **settings: Any
) -> list[Said]:
    """What it says to these prompts with these sampling parameters, greedily."""
    env = {name: value for name, value in os.environ.items() if name != "VLLM_USE_V2_MODEL_RUNNER"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps([str(folder), asked, settings]), text=True,
        env=env, capture_output=True, check=True,
    )  # fmt: skip
    lines = [line.removeprefix("said ") for line in done.stdout.splitlines() if line[:5] == "said "]

    def likely(places: list[Any]) -> list[Any]:
        return [
            place and {token: (value, rank) for token, value, rank in place} for place in places
        ]

    return [
        Said(tuple(ids), likely(told), likely(prompt))
        for ids, told, prompt in map(json.loads, lines)
    ]
