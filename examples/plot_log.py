"""Plot the losses of training runs from their log.jsonl files.

pip install matplotlib
python examples/plot_log.py runs/mine/log.jsonl --out losses.svg
"""

import json
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer

SHOWN = ("ntp_loss", "matp_loss", "matp_accuracy")


def main(
    logs: Annotated[list[Path], typer.Argument(help="Files named log.jsonl.")],
    out: Annotated[Path, typer.Option(help="PNG or SVG file.")] = Path("losses.svg"),
) -> None:
    """Draw one panel for each quantity, one line for each run."""
    figure, panels = plt.subplots(1, len(SHOWN), figsize=(4 * len(SHOWN), 3), layout="constrained")
    for log in logs:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        for name, panel in zip(SHOWN, panels, strict=True):
            points = [(line["step"], line[name]) for line in lines if name in line]
            panel.plot(*zip(*points, strict=True) if points else ((), ()), label=log.parent.name)
            panel.set(title=name, xlabel="step")
    panels[0].set_ylabel("nats per label")
    panels[-1].legend()
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
