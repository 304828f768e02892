"""Set block decoding in EleutherAI's lm-eval: `python -m setblock.lm_eval run --model setblock ...`

Generation tasks are decoded by this package, by blocks, verified or token by token; likelihood
tasks are lm-eval's own forwards of the causal half. Everything else (tasks, prompts, filters,
metrics, logs) is lm-eval's. Needs `pip install "setblock[lm-eval]"`.
"""

import sys
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    message = f'lm-eval can\'t be used ({error}): pip install "setblock[lm-eval]"'
    if __name__ == "__main__":
        sys.exit(f"error: {message}")
    raise ImportError(message) from error

from setblock.generation import Options, generate, settings_for
from setblock.loading import load

# What a task may ask of generation; lm-eval says do_sample=False for greedy decoding.
KNOWN = ("do_sample", "temperature", "top_p", "top_k")
DECODING = (
    "mode", "solver", "block_size", "seed", "next_token_seed", "fallback", "draft", "branches",
    "seeds",
)  # fmt: skip

BASE: Any = HFLM  # its decorator hides its methods from type checkers


class SetBlockLM(BASE):
    """`--model setblock --model_args pretrained=MODEL,mode=verified,...`

    pretrained: a MODEL as for `setblock generate`, adapters and bundled names included.
    dtype, device, mask_token_id: as for `setblock.load`.
    mode, solver, block_size, seed, next_token_seed, fallback, draft, branches, seeds: decoding, as
    for `setblock.generate`; what is absent comes from the checkpoint.
    Everything else is HFLM's: batch_size, max_length, truncation, add_bos_token ...
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str | None = None,
        device: str | None = None,
        mask_token_id: int | None = None,
        **options: Any,
    ) -> None:
        """Raises: ValueError naming an option out of range; ModelError."""
        decoding = {name: options.pop(name) for name in DECODING if name in options}
        self.decoding = cast(Options, decoding)
        self.loaded = load(pretrained, dtype=dtype, device=device, mask_token_id=mask_token_id)
        settings_for(self.loaded, **self.decoding)  # bad values are refused before the first task
        self.generated, self.forwards = 0, 0
        super().__init__(pretrained=self.loaded.network, tokenizer=self.loaded.tokenizer, **options)

    def _model_generate(
        self,
        context: Int[Tensor, "batch width"],
        max_length: int,
        stop: list[str],
        attention_mask: Int[Tensor, "batch width"] | None = None,
        **asked: Any,
    ) -> Int[Tensor, "batch longest"]:
        """The prompts, as they came, followed by their answers, padded on the right.

        Raises: ValueError for an option of generation that this package does not have.
        """
        if unknown := sorted(set(asked) - set(KNOWN)):
            raise ValueError(f"generation option {unknown[0]} is not one of {', '.join(KNOWN)}")
        if asked.pop("do_sample", None) is False:
            asked = {}
        given = {name: value for name, value in asked.items() if value is not None}
        shown = torch.ones_like(context) if attention_mask is None else attention_mask
        prompts = [ids[seen.bool()].tolist() for ids, seen in zip(context, shown, strict=True)]
        special = self.loaded.special_tokens
        options: Options = {**self.decoding, **given}  # type: ignore[typeddict-item]
        options["max_new_tokens"] = max_length - context.shape[1]
        # lm-eval adds the end token's text, at which every mode ends anyway.
        options["stop"] = [text for text in stop if not any(token in text for token in special)]
        answers = generate(self.loaded, prompts, **options)
        self.generated += sum(one.num_tokens for one in answers)
        self.forwards += sum(one.nfe for one in answers)
        longest = max(one.num_tokens for one in answers)
        found = torch.full((len(answers), longest), self.loaded.pad_token_id)
        for row, one in enumerate(answers):
            found[row, : one.num_tokens] = torch.tensor(one.token_ids)
        return torch.cat((context, found.to(context.device)), dim=1)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: the decoding and its forwards beside HFLM's own."""
        settings = settings_for(self.loaded, **self.decoding)
        return super().get_model_info() | {
            "setblock": {
                "model": self.loaded.name,
                "mode": settings.mode,
                "solver": str(settings.solver) if settings.uses_solver else None,
                "block_size": settings.block_size,
                "tokens": self.generated,
                "nfe": self.forwards,
                "tokens_per_forward": self.generated / self.forwards if self.forwards else None,
            }
        }


register_model("setblock")(SetBlockLM)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
