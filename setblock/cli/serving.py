"""Commands for other tools: export."""

from pathlib import Path
from typing import Annotated

import typer

from setblock.cli.common import (
    DtypeOption,
    JsonOption,
    MaskTokenOption,
    ModelName,
    app,
    load_model,
    out,
    print_json,
)


@app.command()
def export(
    model_name: ModelName,
    output_dir: Annotated[Path, typer.Argument(metavar="OUT", help="An empty or new folder.")],
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint that stock transformers decodes by blocks.

    With trust_remote_code=True, `AutoModelForCausalLM...generate(input_ids=...)` then decodes as
    the checkpoint's settings say; without, token by token. An adapter is folded into its base; a
    gated one is refused.
    """
    from setblock.export import export as write

    # As it is stored, where nothing is said.
    model = load_model(model_name, dtype or "auto", "cpu", mask_token_id)
    write(model, output_dir)
    if as_json:
        print_json({"model": model_name, "output_dir": str(output_dir), **model.defaults})
        return
    out.print(f"{model_name} is now in {output_dir}, for stock transformers")
