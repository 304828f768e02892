"""Commands that show a model: what it is, and how it answers by each mode."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from setblock.cli.answering import to_json
from setblock.cli.common import (
    app,
    busy_note,
    load_model,
    out,
    print_json,
    print_table,
    refuse_idle,
    refuse_without,
    starting,
    warm_up,
    warn_unfit,
)
from setblock.cli.options import (
    DECODING,
    BlockSizeOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaskTokenOption,
    Mode,
    ModelName,
    SlideOption,
    SolverOption,
    Switch,
)

if TYPE_CHECKING:
    from setblock.results import Generation


@app.command()
def info(
    model_name: ModelName,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's architecture, an adapter's base, the mask token, and what it decodes by."""
    model = load_model(model_name, dtype, device, mask_token_id, pack=Switch.off)
    config = model.network.config
    facts = {
        "model": model.name,
        "base": model.base,
        "adapter": model.base and ("gated" if model.gated else "lora"),
        "architecture": type(model.network).__name__,
        "parameters": model.num_parameters,
        "layers": config.num_hidden_layers,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "mask_token_id": model.mask_token_id,
        "mask_token_source": model.mask_token_source,
        "eos_token_ids": sorted(model.eos_token_ids),
        "sbd_trained": model.trained,
        **{f"default_{name}": value for name, value in model.defaults.items()},
        "acceptance": model.acceptance,
        "acceptance_source": "the checkpoint's" if model.acceptance_is_known else "assumed",
        "slide": model.slides,
        "verified": model.drafting or None,
    }
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    shown = {"parameters": ",", "acceptance": ".2f"}
    drafting = "chosen by arithmetic; setblock tune measures"
    if model.drafting:
        drafting = ", ".join(f"{name} {value}" for name, value in model.drafting.items())
    of_table = {"verified": drafting, "dtype": f"{facts['dtype']}, to compute in"}
    for name, value in (facts | of_table).items():
        told = format(value, shown[name]) if name in shown else str(value)
        if value is not None:  # as of a model without a base
            table.add_row(name, told)
    print_table(table)


# Parameters of a model whose products are so small that threads mostly wait for each other, all the
# more beside other work.
FEW = 20_000_000
# For a bundled model that was not trained on our own problems.
QUESTIONS = {
    "smollm2": [
        "A baker fills 6 trays with 8 rolls each and sells 30 of them. How many rolls are left?",
        "Mia reads 12 pages a day for a week and 5 pages more on Sunday. How many pages is that?",
        "What is the capital of France, and what is it known for?",
    ]
}


@app.command()
def demo(
    model_name: Annotated[str, typer.Option("--model", help="Which model answers.")] = "nano",
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Ask this instead of the built-in problems; may be given again."),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            help="May be given again. Default: ntp and the model's own, or sbd.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    slide: SlideOption = None,
    seed: Annotated[int, typer.Option(help="Other built-in problems.")] = 0,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Show tokens as forwards reveal them.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Watch a model answer prompts by each mode: token by token, then by set block decoding.

    `--model smollm2` is SmolLM2-135M-Instruct with an adapter; `make demo-smollm2` installs it.
    """
    with starting(model_name):
        import torch

        from setblock import live as show
        from setblock import nano
        from setblock.records import machine_of, new_record

    model = load_model(model_name, None, None, None)
    if model.num_parameters < FEW and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    own_mode = Mode(model.defaults["mode"])
    blocks = Mode.sbd if own_mode == Mode.ntp else own_mode
    modes = list(dict.fromkeys(mode or (Mode.ntp, blocks)))
    refuse_without(Mode.sbd, modes, solver=solver, slide=slide)
    refuse_idle(modes, block_size=block_size)
    for one in modes:
        warn_unfit(model, one)
    problems = []
    prompts = prompt or QUESTIONS.get(model.name)
    if prompts is None:
        problems = [nano.problems(name, "test", 1, seed)[0] for name in nano.FAMILIES]
        prompts = [problem.prompt for problem in problems]
    elif seed:
        raise ValueError(f"--seed chooses among our own problems, got {seed} for other prompts")
    for one in modes:
        own = {"solver": solver, "slide": slide} if one == Mode.sbd else {}
        warm_up(model, {"mode": one.value, "block_size": block_size, **own})
    if not as_json and out.is_terminal:
        out.print("A token's colour is that of the forward that revealed it.", style="dim")
    answers = []
    for number, question in enumerate(prompts):
        if not as_json:
            out.rule(Text(f"{number + 1} of {len(prompts)}", style="bold"))
            out.print(question, style="bold")
        for one in modes:
            options: dict[str, Any] = {"mode": one, "block_size": block_size}
            if one == Mode.sbd:
                options |= {"solver": solver, "slide": slide}
            console = None if as_json else out

            def remark(generation: "Generation", number: int = number) -> str:
                right = nano.check(problems[number], generation.text) if problems else None
                return "" if right is None else "right, " if right else "wrong, "

            generation = show.watch(model, question, options, console, live, remark)
            right = nano.check(problems[number], generation.text) if problems else None
            answers.append({"prompt": question, "correct": right, **to_json(generation, model)})
    totals = [show.total(answers, one) for one in modes]
    if as_json:
        facts = new_record() | {"machine": machine_of(model.device)}
        del facts["results"]
        print_json({**facts, "model": model.name, "answers": answers, "totals": totals})
        return
    print_table(show.table(totals))
    busy_note()
