"""What a MODEL may be called, and where it lies; no torch, which takes seconds to import."""

import functools
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_GIVEN = os.environ.get("XDG_CACHE_HOME", "")  # one that is not absolute shall be ignored
# Stays "~/.cache" where nobody is at home; Path.expanduser would raise.
CACHE = Path(_GIVEN if os.path.isabs(_GIVEN) else os.path.expanduser("~/.cache")) / "setblock"
SMOLLM2 = "smollm2-base"
BUNDLED = {
    **{name: Path(__file__).parent / "demo" / name for name in ("nano", "nano-twin", "smollm2")},
    SMOLLM2: CACHE / "smollm2-base-0.1.2",  # unpacked there when it is first loaded
}
ADAPTER_CONFIG = "adapter_config.json"  # what tells an adapter from a whole checkpoint
HUB_FILES = ("config.json", ADAPTER_CONFIG)  # one of them is in every repository of a model
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
LONGEST = 300  # characters of an error within a line

log = logging.getLogger(__name__)


class ModelError(ValueError):
    """What was asked for can't be loaded or run; one line that names it and what is allowed."""


def any_of(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def one_line(error: BaseException) -> str:
    """What it says, without the stop at its end: more may follow."""
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    text = " ".join(text.split()).rstrip(".")
    if len(text) <= LONGEST:
        return text
    return (text[:LONGEST].rpartition(" ")[0] or text[:LONGEST]) + " ..."


def check(name: str) -> None:
    """Raises: ModelError for a MODEL that no file and no repository can have by that name."""
    if name != SMOLLM2:  # not unpacked by now, maybe
        located(name)


def located(name: str) -> tuple[str, dict[str, Any]]:
    """The folder or hub name to read, and the GGUF file in it, if it is one, as an argument."""
    path = path_of(name)
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if name and path.is_dir():
        is_adapter = (path / ADAPTER_CONFIG).is_file()
        for files in () if is_adapter else (("config.json",), TOKENIZER_FILES):
            if not any((path / file).is_file() for file in files):
                raise ModelError(f"folder {name!r} has no {' or '.join(files)}: not a checkpoint")
        return str(path), {}
    if name in BUNDLED:
        raise ModelError(f"the bundled model {name!r} is not part of this installation")
    if path.is_file():
        raise ModelError(
            f"no model {name!r}: it is a file, and neither a checkpoint folder nor a GGUF file "
            "(.gguf)"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise ModelError(
            f"no model {name!r}: it is not a checkpoint folder, a GGUF file (.gguf), a bundled "
            f"model ({any_of(BUNDLED)}), or of the form owner/name (on the hub)"
        )
    if path.parent.is_file():
        raise ModelError(f"no model {name!r}: {str(path.parent)!r} is a file, not a folder")
    if path.parent.is_dir():  # rather than to ask the hub for a minute
        raise ModelError(
            f"no model {name!r}: folder {str(path.parent)!r} is here and holds no {path.name!r}; "
            "to have it from the hub, call from where no such folder is"
        )
    _tell_of_hub(name)
    return name, {}


def path_of(name: str) -> Path:
    """Where a bundled MODEL or a path lies; of a hub name a path that is not there."""
    return BUNDLED.get(name, _path(name))


def _path(name: str) -> Path:
    """~ is the user's folder; that of a user whom there is not stays as it is."""
    return Path(os.path.expanduser(name))


def lasting(name: str) -> str:
    """A MODEL name that holds from any working folder."""
    path = _path(name)
    return str(path.resolve()) if name not in BUNDLED and path.exists() else name


@functools.cache
def _tell_of_hub(name: str) -> None:
    """Say, once, that the hub is asked for what this machine does not have yet: without a network
    it takes half a minute to give up.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        known = any(isinstance(try_to_load_from_cache(name, file), str) for file in HUB_FILES)
    except HFValidationError as error:
        raise ModelError(f"no model {name!r}: {one_line(error)}") from None
    if not known and not constants.HF_HUB_OFFLINE:
        log.warning("no folder %s here: asking the Hugging Face hub for it", name)
