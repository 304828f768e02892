"""Checkpoints that stock tools decode by blocks."""

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from setblock.checkpoint import write_settings
from setblock.custom_generate import unsupported
from setblock.files import let_read, whole_or_empty
from setblock.model import Model

log = logging.getLogger(__name__)

# Stock transformers runs this file with trust_remote_code=True; without, it decodes token by token.
GENERATE = '''\
"""Decode by set blocks; written by `setblock export`."""


def generate(*inputs, model, **settings):
    try:
        from setblock.custom_generate import generate as decode
    except ImportError as error:
        raise ImportError(
            "this checkpoint decodes by set blocks: pip install setblock"
        ) from error
    return decode(*inputs, model=model, **settings)
'''


def export(model: Model, folder: Path) -> None:
    """Write the model with its tokenizer, settings and the code that stock transformers calls.

    An adapter is folded in. The mask token is suppressed, so that decoding without our code,
    token by token, never says it. Of its settings of generation those that this package has not,
    such as beams, are left out, each with a warning.
    Raises: ValueError for a gated adapter and for a folder that is not empty.
    """
    if model.gated:
        raise ValueError(
            f"{model.name} is a gated adapter: it acts on masked positions alone, which stock "
            "transformers has no place for; load it by setblock, beside its base"
        )
    with whole_or_empty(folder):
        _write(model, folder)


def _write(model: Model, folder: Path) -> None:
    network: Any = model.network
    network.save_pretrained(folder)
    let_read(folder)
    model.tokenizer.save_pretrained(folder)
    write_settings(folder, **model.settings)
    path = folder / "generation_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    dropped = unsupported(content)
    if model.defaults["mode"] == "sbd":  # else it would be another
        for name, neutral in (("repetition_penalty", 1), ("min_new_tokens", 0)):
            if content.get(name) not in (None, neutral):
                dropped[name] = content[name]
    if content.get("suppress_tokens"):
        dropped["suppress_tokens"] = content["suppress_tokens"]
    for name, value in dropped.items():
        log.warning(
            "%s asks for %s=%r, which decoding by blocks has not: left out", model.name, name, value
        )
        del content[name]
    content["suppress_tokens"] = [model.mask_token_id]
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    own = folder / "custom_generate"
    own.mkdir()
    (own / "generate.py").write_text(GENERATE, encoding="utf-8")
    (own / "requirements.txt").write_text(f"setblock>={version('setblock')}\n", encoding="utf-8")
