"""The command that turns records into pages: report."""

from pathlib import Path
from typing import Annotated

import typer

from setblock.cli.common import (
    app,
    out,
    print_json,
    starting,
)
from setblock.cli.options import (
    JsonOption,
)


@app.command()
def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORDS...",
            help="Files of `evaluate`, `benchmark` and `tune` (--out), and of `demo --json`. The "
            "file of samples beside a record is read as well.",
        ),
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", help="Folder of the report; files of these names are replaced.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Turn records into report.md with plots, and index.html, a page that needs nothing else.

    Answers of `demo --json` replay in the page forward by forward, each mode beside the others.
    """
    with starting():
        from setblock.report import write

    files = write(records, out_dir)
    if as_json:
        print_json({"files": [str(file) for file in files]})
        return
    for file in files:
        out.print(str(file))
