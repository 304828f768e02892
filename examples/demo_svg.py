"""Draw an answer twice, token by token and by set block decoding, as an animation of its forwards.

Its blocks are whole, so that their gaps show.

python examples/demo_svg.py --out docs/demo.svg
"""

from html import escape
from pathlib import Path
from typing import Annotated

import typer

import setblock

# One for each forward, from the first again after the last; legible on the dark ground.
COLORS = ("#8be9fd", "#ff79c6", "#f1fa8c", "#50fa7b", "#8aadff", "#ff8b8b", "#e2e2e2")
GROUND, FAINT = "#1e1f29", "#8b8d9b"
WIDE, HIGH, MARGIN = 8.43, 20, 16  # of a character of 14 pixels, of a line, around a panel


def main(
    model: Annotated[str, typer.Option(help="MODEL, one with a chat template.")] = "nano",
    prompt: Annotated[str, typer.Option(help="What is asked.")] = "What is 384 + 967?",
    solver: Annotated[str, typer.Option(help="Of the second answer.")] = "confidence:0.99",
    tick_ms: Annotated[int, typer.Option(help="Milliseconds of a forward.", min=1)] = 120,
    out: Annotated[Path, typer.Option(help="SVG file.")] = Path("demo.svg"),
) -> None:
    """Both panels run at the same pace: one forward a tick, whatever it takes on a clock."""
    loaded = setblock.load(model)
    answers = [
        *setblock.generate(loaded, prompt, chat=True, mode="ntp"),
        *setblock.generate(loaded, prompt, chat=True, mode="sbd", solver=solver, slide=False),
    ]
    lines = max(answer.text.count("\n") for answer in answers) + 1
    columns = max(len(line) for answer in answers for line in answer.text.split("\n"))
    columns = max(columns, 34)
    panel = columns * WIDE + 2 * MARGIN
    size = f'width="{2 * panel:.0f}" height="{(lines + 3) * HIGH + 2 * MARGIN:.0f}"'
    ticks = max(answer.nfe for answer in answers) + 16  # and a while to look at the end
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="14">',
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
    ]
    for answer, x, title in zip(
        answers, (MARGIN, panel + MARGIN), ("token by token", "set block decoding"), strict=True
    ):
        drawn.append(words(x, 0, title, FAINT))
        place, line = 0, 1.5
        for token, nfe in zip(answer.token_ids, answer.reveal_step, strict=True):
            appears = appearing(nfe / ticks, ticks * tick_ms)
            color = COLORS[(nfe - 1) % len(COLORS)]
            for number, piece in enumerate(loaded.decode([token]).split("\n")):
                if number:
                    place, line = 0, line + 1
                if piece.strip():
                    drawn.append(words(x + place * WIDE, line, piece, color, appears))
                place += len(piece)
        told = f"{answer.num_tokens} tokens, {answer.nfe} forwards"
        appears = appearing(answer.nfe / ticks, ticks * tick_ms)
        drawn.append(words(x, lines + 2, told, FAINT, appears))
    out.write_text("\n".join([*drawn, "</svg>", ""]), encoding="utf-8")
    typer.echo(f"{out}: {', '.join(f'{answer.nfe} forwards' for answer in answers)}")


def appearing(share: float, total_ms: int) -> str:
    """Shown from this share of the loop on; all the time where nothing moves."""
    times = f'values="0;1;1" keyTimes="0;{share:.4f};1" dur="{total_ms}ms"'
    return (
        f'<animate attributeName="opacity" {times} calcMode="discrete" repeatCount="indefinite"/>'
    )


def words(x: float, line: float, text: str, color: str, inside: str = "") -> str:
    """Text at a distance from the left and on a line."""
    y = MARGIN + (line + 0.75) * HIGH
    place = f'x="{x:.1f}" y="{y:.0f}" textLength="{len(text) * WIDE:.1f}" fill="{color}"'
    return f'<text {place} xml:space="preserve">{escape(text)}{inside}</text>'


if __name__ == "__main__":
    typer.run(main)
