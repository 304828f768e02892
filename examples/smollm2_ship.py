"""Put a trained gated adapter of SmolLM2 into the package, as the bundled model `smollm2`.

    python examples/smollm2_ship.py runs/smollm2/gated --block-size 6 --acceptance 0.62

The adapter is stored in bfloat16, names `smollm2-base` as its base, and decodes in mode verified.
Its card is written by hand.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file

from setblock.checkpoint import write_settings
from setblock.names import ADAPTER_CONFIG, BUNDLED, SMOLLM2

WEIGHTS = "adapter_model.safetensors"
LIMIT = 40_000_000  # bytes; more has no place in a source repository


def main(
    adapter: Annotated[Path, typer.Argument(help="Output folder of `setblock train`.")],
    block_size: Annotated[int, typer.Option(help="Of verified decoding, by default.")],
    acceptance: Annotated[float, typer.Option(help="Of drafts, as `setblock evaluate` reports.")],
    lookup: Annotated[int, typer.Option(help="Tokens of a copied draft, by default.")] = 8,
    output_dir: Annotated[Path, typer.Option(help="Where it goes.")] = BUNDLED["smollm2"],
) -> None:
    """Write the folder."""
    weights = {
        name: tensor.to(torch.bfloat16) for name, tensor in load_file(adapter / WEIGHTS).items()
    }
    size = sum(tensor.nbytes for tensor in weights.values())
    if size > LIMIT:
        raise typer.BadParameter(f"{adapter} has {size:,} bytes, more than {LIMIT:,}")
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if not config.get("alora_invocation_tokens"):
        raise typer.BadParameter(f"{adapter} is no gated adapter")
    config["base_model_name_or_path"] = SMOLLM2
    output_dir.mkdir(parents=True, exist_ok=True)
    save_file(weights, output_dir / WEIGHTS, metadata={"format": "pt"})
    (output_dir / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(adapter / "generation_config.json", output_dir)
    own = {"block_size": block_size, "acceptance": acceptance, "verified": {"lookup": lookup}}
    # Mode "sbd" of an adapter that has learned no first slots, by what lost least of its text.
    own |= {"slide": True, "solver": "prefix:0.8"}
    write_settings(output_dir, mode="verified", **own)
    shutil.copy(adapter / "log.jsonl", output_dir)
    print(f"{adapter} -> {output_dir}")


if __name__ == "__main__":
    typer.run(main)
