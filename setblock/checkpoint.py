"""What a checkpoint says of itself to us: the "setblock" entry of its generation_config.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoConfig, GenerationConfig

from setblock.files import write_whole
from setblock.masks import MOST_SLOTS
from setblock.names import ADAPTER_CONFIG, HUB_FILES, ModelError, any_of, path_of

SETTINGS = {
    "mask_token_id": int,
    "block_size": int,
    "solver": str,
    "mode": str,
    "slide": bool,  # in mode "sbd", see settings.Settings
    "trained": bool,
    "dtype": str,
    "device": str,
    "acceptance": float,  # of drafted tokens, see roofline.best_spending
    "chain_width": int,  # of a gated adapter's chain
    "verified": dict,  # what that mode drafts, see DRAFTING; what is absent by arithmetic
}
DRAFTING = {"block_size": 1, "branches": 1, "seeds": 0, "lookup": 0}  # at least


def file_of(source: str, name: str) -> str | None:
    """The path of a file of a checkpoint folder or hub repository, None if it has none.

    Where the hub can't be asked, a repository has what was fetched before.
    Raises: OSError if nothing was; the hub is given half a minute, and each further file of such a
    repository would take as long.
    """
    if Path(source).is_dir():
        path = Path(source) / name
        return str(path) if path.is_file() else None
    try:
        return hf_hub_download(source, name)
    except LocalEntryNotFoundError:
        here = [try_to_load_from_cache(source, one) for one in HUB_FILES]
        if not any(isinstance(one, str) for one in here):  # else a path, or a mark that it has none
            raise
    except EntryNotFoundError:
        pass
    return None


def base_of(source: str) -> str | None:
    """The MODEL that an adapter's folder or repository names, None for a whole checkpoint."""
    path = file_of(source, ADAPTER_CONFIG)
    if path is None:
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{ADAPTER_CONFIG} of {source!r} is no JSON: {error}") from None
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str):
        raise ModelError(f"{ADAPTER_CONFIG} of {source!r} names no base_model_name_or_path")
    return base


def read_settings(source: str) -> dict[str, Any]:
    """The "setblock" entry of the checkpoint's generation_config.json, {} without one.

    Read from the file: transformers drops every key it does not know, without a word, where the
    file says "_from_model_config": true.
    """
    name = "generation_config.json"
    path = file_of(source, name)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except ValueError as error:
        raise ModelError(f"{name} of {source} is no JSON: {error}") from None
    settings = content.get("setblock") if isinstance(content, dict) else content
    if settings is not None and not (isinstance(content, dict) and isinstance(settings, dict)):
        raise ModelError(f"{name} must hold an object, and one by the name setblock if any")
    return settings or {}


def _is_drafting(value: dict[str, Any]) -> bool:
    return all(
        name in DRAFTING and type(number) is int and number >= DRAFTING[name]
        for name, number in value.items()
    )


def checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    for key, value in settings.items():
        if key not in SETTINGS:
            raise ModelError(f"setblock setting {key!r} is not one of {any_of(SETTINGS)}")
        in_range, limits = {
            "mask_token_id": (lambda value: value >= 0, " of at least 0"),
            "block_size": (lambda value: 1 <= value <= MOST_SLOTS, f" in 1..{MOST_SLOTS}"),
            "chain_width": (lambda value: value >= 1, " of at least 1"),
            "acceptance": (lambda value: 0 < value < 1, " between 0 and 1"),
            "verified": (_is_drafting, " of block_size and branches, at least 1, seeds and lookup"),
        }.get(key, (lambda value: True, ""))
        if type(value) is not SETTINGS[key] or not in_range(value):
            raise ModelError(
                f"setblock setting {key} must be {SETTINGS[key].__name__}{limits}, got {value!r}"
            )
    return settings


def write_settings(folder: str | Path, **settings: Any) -> None:
    """Put these settings into a checkpoint's generation_config.json, where `load` finds them.

    None takes one away. Effects: replaces the file; other keys stay, but for the mark that has
    transformers make the file anew and drop what it does not know.
    Raises: ModelError for a setting of another type or range than `load` takes of any model.
    """
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
    elif (Path(folder) / "config.json").is_file():  # what transformers would derive, its ends too
        config = AutoConfig.from_pretrained(folder)
        content = GenerationConfig.from_model_config(config).to_diff_dict()
    else:
        content = {}
    content.pop("_from_model_config", None)
    merged = content.get("setblock", {}) | settings
    content["setblock"] = checked_settings(
        {name: value for name, value in merged.items() if value is not None}
    )
    write_whole(path, json.dumps(content, indent=2) + "\n")


def fingerprint(name: str, settings: bool = True) -> str | None:
    """Tells the files of a model on this machine from what they were; None for a hub name.

    settings: count a change of its generation_config.json too.
    """
    place = path_of(name)
    if not place.exists():
        return None
    kinds = (".safetensors", ".bin", ".gguf", ".json")
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    facts = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.suffix in kinds and (settings or file.name != "generation_config.json")
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
