"""The model card that a training run leaves beside its weights."""

import json
from importlib.metadata import version
from typing import Any

from huggingface_hub import ModelCardData

# By what was trained: all weights or a low-rank adapter of them, a gated adapter, the baseline.
WHAT = {
    "sbd": "Trained for set block decoding ([arXiv:2509.04185](https://arxiv.org/abs/2509.04185)):\n"
    "next-token and masked-token prediction in one network, which decodes several tokens per\n"
    "forward.",
    "gated": "A gated adapter for set block decoding\n"
    "([arXiv:2509.04185](https://arxiv.org/abs/2509.04185)). It acts on masked positions alone:\n"
    "its base's next-token text stays what it was. Decoded verified, the adapter drafts, the base\n"
    "verifies, and the text is the base's own, in fewer forwards.",
    "ntp": "Trained for next-token prediction alone, as the baseline of set block decoding\n"
    "([arXiv:2509.04185](https://arxiv.org/abs/2509.04185)).",
}
USE = {
    "sbd": "`setblock tune FOLDER ...` looks for the fastest decoding that loses no score that you "
    "would\nmiss, and makes it the default.",
    "gated": "By default it decodes verified. `setblock tune FOLDER ...` measures how many of its "
    "drafts are\naccepted, and writes that down beside it: how much to draft is chosen by that. "
    "Mode sbd decodes\nwithout verification, for which a gated adapter needs far more training.",
    "ntp": "It decodes token by token.",
}
SPEEDUP = "`setblock speedup`"  # what chose, in a card that says so
CHOSEN = (
    "By the clock `setblock speedup` chose, on prompts held out, {choice}: {speed:.2f} times as\n"
    "fast as token by token ({where}). `setblock tune FOLDER ...` chooses anew."
)
CHOSEN_NTP = (
    "It decodes token by token: `setblock speedup` found nothing faster ({where}).\n"
    "`setblock tune FOLDER ...` looks anew, and `--mode verified` drafts in any case."
)
LIBRARIES = ("setblock", "trl", "transformers", "torch")
CARD = """---
{front}
---

# {name}

{what}

```
setblock generate {name} {chat}--prompt "..."  # {name}: this folder's path, or its name on the hub
```

{use}

## Set block decoding

Model and data:

```json
{provenance}
```

Settings:

```json
{settings}
```

At the end, after {steps} steps (losses in nats per label):

```json
{losses}
```

Software: {software}.
"""


def card(
    name: str,
    kind: str,
    base: str | None,
    adapter: bool,
    provenance: dict[str, Any],
    settings: dict[str, Any],
    steps: int,
    losses: dict[str, float],
) -> str:
    """The text of README.md, as the hub reads it.

    kind: one of WHAT. base: the hub name of the model that it was trained from, None for a local
    one. losses: of the last steps, with accuracies.
    """
    front = ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["set-block-decoding", "trl", "sft"],
    )
    return CARD.format(
        front=front.to_yaml(),
        name=name,
        chat="--chat " * bool(provenance.get("chat")),
        what=WHAT[kind],
        use=USE[kind],
        provenance=json.dumps(provenance, indent=2, default=str),
        settings=json.dumps(settings, indent=2),
        steps=steps,
        losses=json.dumps(losses, indent=2),
        software=", ".join(f"{library} {version(library)}" for library in LIBRARIES),
    )


def with_choice(text: str, choice: str | None, speed: float, where: str) -> str:
    """A card of ours that tells what the clock chose, in place of how to choose.

    choice: a setting in words, None for token by token. where: machine and circumstances. A card
    that was written anew by hand gets the sentence as its last.
    """
    told = CHOSEN_NTP if choice is None else CHOSEN
    told = told.format(choice=choice, speed=speed, where=where)
    before, cue, rest = text.partition("\n```\n\n")
    _, heading, after = rest.partition("\n\n## Set block decoding")
    if not heading:
        return f"{text}\n{told}\n"
    return before + cue + told + heading + after
