"""Set block decoding in EleutherAI's lm-eval: `python -m setblock.lm_eval run --model setblock ...`

Generation tasks are decoded by this package, by blocks, verified or token by token; likelihood
tasks are lm-eval's own forwards of the causal half. Everything else (tasks, prompts, filters,
metrics, logs) is lm-eval's. Needs `pip install '.[lm-eval]'` in the checkout.
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
    message = f"lm-eval can't be used ({error}): pip install '.[lm-eval]' in the checkout"
    if __name__ == "__main__":
        sys.exit(f"error: {message}")
    raise ImportError(message) from error

from setblock.generation import OWN, Options, ending_at, generate, settings_for
from setblock.grammar import compiled
from setblock.loading import load
from setblock.settings import PENALTIES

# What a task may ask of generation; lm-eval says do_sample=False for greedy decoding.
KNOWN = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# HFLM's own arguments that hold for a network that is loaded already.
OTHERS = (
    "batch_size", "max_batch_size", "max_length", "truncation", "logits_cache", "add_bos_token",
    "prefix_token_id", "softmax_dtype", "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip

BASE: Any = HFLM  # its decorator hides its methods from type checkers


class SetBlockLM(BASE):
    """`--model setblock --model_args pretrained=MODEL,mode=verified,...`

    pretrained: a MODEL as for `setblock generate`, adapters and bundled names included.
    dtype, device, mask_token_id: as for `setblock.load`.
    mode, solver, block_size, seed, slide, next_token_seed, fallback, draft, branches, seeds,
    lookup, lenience, json_schema, regex, grammar, presence_penalty, frequency_penalty, logit_bias:
    decoding, as for `setblock.generate`; what is absent comes from the checkpoint.
    Besides, of HFLM's own: those of OTHERS.
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
        decoding = {name: options.pop(name) for name in OWN if name in options}
        if unknown := sorted(set(options) - set(OTHERS)):
            own = ("pretrained", "dtype", "device", "mask_token_id", *OWN)
            raise ValueError(
                f"model argument {unknown[0]} is not one of {', '.join((*own, *OTHERS))}"
            )
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            # lm-eval's own default, which its command hands over as if it had been asked for.
            print(f"no CUDA here for device {device}: the CPU is used", file=sys.stderr)
            device = None
        self.decoding = cast(Options, decoding)
        self.loaded = load(pretrained, dtype=dtype, device=device, mask_token_id=mask_token_id)
        # Bad values are refused before the first task.
        self.used = settings_for(self.loaded, **self.decoding)
        compiled(self.loaded, self.used)
        self.prompts, self.generated, self.forwards = 0, 0, 0
        if self.loaded.context_note:  # lm-eval knows what the configuration says
            options.setdefault("max_length", self.loaded.context_length)
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
        sample = asked.pop("do_sample", None)
        if sample is False:
            asked = {name: asked[name] for name in asked.keys() & PENALTIES}
        elif sample and not asked.get("temperature"):
            asked["temperature"] = 1.0  # as transformers samples
        given = {name: value for name, value in asked.items() if value is not None}
        shown = torch.ones_like(context) if attention_mask is None else attention_mask
        prompts = [ids[seen.bool()].tolist() for ids, seen in zip(context, shown, strict=True)]
        options: Options = {**self.decoding, **given}  # type: ignore[typeddict-item]
        options["max_new_tokens"] = max_length - context.shape[1]
        # lm-eval fills the context to its last token, and whole blocks may need a few more: as it
        # does itself, the front of a prompt that is too long goes.
        slots = settings_for(self.loaded, **options).num_slots
        room = self.loaded.context_length - slots
        if room < 1:
            raise ValueError(
                f"max_gen_toks={options['max_new_tokens']} leaves no room for a prompt in the "
                f"model's context of {self.loaded.context_length} tokens, of which whole blocks of "
                f"it take {slots}"
            )
        prompts = [ids[-room:] for ids in prompts]
        # Noise is drawn by seed and row: a request that comes again must not get the same.
        options["seed"] = options.get("seed", 0) + self.prompts
        self.prompts += len(prompts)
        model, options["stop"] = ending_at(self.loaded, stop)
        answers = generate(model, prompts, **options)
        self.used = answers[0].settings
        self.generated += sum(one.num_tokens for one in answers)
        self.forwards += sum(one.nfe for one in answers)
        longest = max(one.num_tokens for one in answers)
        found = torch.full((len(answers), longest), self.tokenizer.pad_token_id)
        for row, one in enumerate(answers):
            found[row, : one.num_tokens] = torch.tensor(one.token_ids)
        return torch.cat((context, found.to(context.device)), dim=1)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: the decoding and its forwards beside HFLM's own."""
        settings = self.used  # of the latest batch: how much is drafted depends on its rows
        verified = settings.mode == "verified"
        return super().get_model_info() | {
            "setblock": {
                "model": self.loaded.name,
                "mode": settings.mode,
                "solver": settings.described["solver"],
                "block_size": settings.block_size if settings.mode != "ntp" else None,
                "slide": settings.slide,
                "next_token_seed": settings.next_token_seed,
                "fallback": settings.fallback,
                "draft": settings.draft if verified else None,
                "branches": settings.branches if verified else None,
                "seeds": settings.seeds if verified else None,
                "lookup": settings.lookup if verified else None,
                "lenience": settings.lenience if verified else None,
                "json_schema": settings.json_schema,
                "regex": settings.regex,
                "grammar": settings.grammar,
                **{name: getattr(settings, name) for name in PENALTIES},
                "logit_bias": dict(settings.logit_bias),
                "min_new_tokens": settings.min_new_tokens,
                "tokens": self.generated,
                "nfe": self.forwards,
                "tokens_per_forward": self.generated / self.forwards if self.forwards else None,
            }
        }


register_model("setblock")(SetBlockLM)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ValueError as error:  # of a model argument, or a model that can't be used
        sys.exit(f"error: {error}")
