"""Commands for other tools: export, serve."""

import copy
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from setblock.cli.common import (
    app,
    err,
    load_model,
    out,
    print_json,
    starting,
    warm_up,
)
from setblock.cli.options import (
    BlockSizeOption,
    Compile,
    CompileOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    MaskTokenOption,
    ModelName,
    ModeOption,
    PackOption,
    SlideOption,
    SolverOption,
    Switch,
)


@app.command()
def export(
    model_name: ModelName,
    output_dir: Annotated[Path, typer.Argument(metavar="OUT", help="An empty or new folder.")],
    mask_token_id: MaskTokenOption = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the weights that are written.", show_default="as they are stored"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint that stock transformers decodes by blocks.

    With trust_remote_code=True, `AutoModelForCausalLM...generate(input_ids=...)` then decodes as
    the checkpoint's settings say; without, token by token. An adapter is folded into its base; a
    gated one is refused.
    """
    with starting(model_name):
        from setblock.export import export as write

    # As it is stored, where nothing is said.
    model = load_model(model_name, dtype or "auto", "cpu", mask_token_id, pack=Switch.off)
    write(model, output_dir)
    kind = str(model.dtype).removeprefix("torch.")
    if as_json:
        told = {"model": model_name, "output_dir": str(output_dir), "dtype": kind}
        print_json({**told, **model.defaults})
        return
    out.print(f"{model_name} is now in {output_dir}, in {kind}, for stock transformers")
    if not model.chooses_mode:
        err.print(
            "it was never trained for blocks, so that it decodes token by token; "
            "generate(mode='sbd') or 'verified' there asks for another mode",
            style="dim",
        )


class Engine(StrEnum):
    """Whose server."""

    transformers = "transformers"
    vllm = "vllm"


@app.command()
def serve(
    model_name: ModelName,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- WORDS",
            help="Engine vllm: words for vLLM's own command line.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(
            help="transformers: a server for some users, without further installation. vllm: for "
            "many, where it is installed."
        ),
    ] = Engine.transformers,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every network's.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    mode: ModeOption = None,
    solver: SolverOption = None,
    block_size: BlockSizeOption = None,
    slide: SlideOption = None,
    allow_untrained: Annotated[
        bool,
        typer.Option(
            "--allow-untrained", help="Serve a model that was never trained for set block decoding."
        ),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Engine transformers: answers under way at a time at most, of which those with "
            "the same settings share forwards; 1 answers one request after the other.",
            show_default="8",
        ),
    ] = None,
    prompt_cache: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Engine transformers: tokens of earlier prompts and answers whose keys and values "
            "are kept, so that a prompt that begins like one of them, as each turn of a "
            "conversation does, is encoded from there on; 0 for none.",
            show_default="16384",
        ),
    ] = None,
    mask_token_id: MaskTokenOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    compile: CompileOption = Compile.off,
    pack: PackOption = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_API_KEY",
            show_envvar=True,
            help="Engine vllm: the key that every POST must bring, and everything below /v1.",
        ),
    ] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option(
            "--adaptive/--no-adaptive",
            help="Engine vllm: forwards as wide as pays under the load at hand, down to one token, "
            "of all requests or of none. Mode verified says the same as ever, but for lenience; "
            "what mode sbd says then depends on the load.",
            show_default="requests in mode verified without lenience",
        ),
    ] = None,
    fused: Annotated[
        bool | None,
        typer.Option(
            "--fused/--no-fused",
            help="Engine vllm: the forward that commits a block begins the next one. Needs vLLM's "
            "synchronous scheduler; without, its asynchronous one may run, and blocks are whole.",
            show_default="fused",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            help="Engine transformers: no lines on standard error about requests and answers "
            "(they hold no texts).",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve an OpenAI-compatible endpoint: /v1/chat/completions and /v1/completions.

    Mode, solver and block size are what a request gets that names none. Engine transformers answers
    several requests at a time and has no authentication: listen on other addresses than the
    loopback behind a proxy alone; with --json, one line says where it listens. Engine vllm is
    vLLM's own server.
    """
    given: Any = {"mode": mode, "solver": solver, "block_size": block_size, "slide": slide}
    if not host:
        raise ValueError("--host must be an address, got ''; 0.0.0.0 is every network's")
    if engine is Engine.vllm:
        with starting(model_name):
            from setblock.vllm.command import command

        ours = {"--device": device, "--json": as_json, "--pack": pack}
        ours |= {"--quiet": quiet, "--prompt-cache": prompt_cache is not None}
        if name := next((name for name, value in ours.items() if value), None):
            raise ValueError(f"{name} is for engine transformers")
        if batch_size is not None:
            own = f"-- --max-num-seqs {batch_size} is vLLM's"
            raise ValueError(f"--batch-size is for engine transformers: {own}")
        more = ["--host", host, "--port", str(port), *(words or ())]
        settings = {**given, "mask_token_id": mask_token_id, "dtype": dtype and dtype.value}
        settings["mode"] = mode and mode.value
        how = adaptive, fused is not False, compile.value
        program = command(model_name, settings, allow_untrained, more, *how)
        # Diffusion models run on vLLM's second model runner alone.
        own = {"VLLM_USE_V2_MODEL_RUNNER": "1", **({"VLLM_API_KEY": api_key} if api_key else {})}
        os.execve(program[0], program, {**os.environ, **own})  # does not come back
        return
    theirs: dict[str, Any] = {"--api-key": api_key, "--adaptive": adaptive}
    theirs |= {"--no-adaptive": adaptive is False, "--fused": fused, "--no-fused": fused is False}
    theirs[" ".join(words or ())] = words
    if name := next((name for name, value in theirs.items() if value), None):
        raise ValueError(f"{name} is for engine vllm: transformers' server has no such option")
    try:
        with starting(model_name):
            import uvicorn

            from setblock.engine import MOST_ANSWERS
            from setblock.prompt_cache import MOST_TOKENS
            from setblock.serve import build
    except ImportError as error:
        raise ImportError(
            f"serve needs more packages ({error}): make setup in the checkout, or "
            "pip install '.[serve]'"
        ) from None
    from setblock.generation import settings_for
    from setblock.settings import MODES

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _naming(host, port):
            listening.bind((host, port))
        model = load_model(model_name, dtype, device, mask_token_id, compile, pack)
        if not model.trained and not allow_untrained:
            raise ValueError(
                f"{model_name} was never trained for set block decoding: its blocks would hardly "
                "make sense; --allow-untrained serves it, token by token unless a request asks for "
                "blocks"
            )
        if not model.trained:
            model.told.update(MODES)  # --allow-untrained has heard of it
        chosen = settings_for(model, **given)  # bad values are refused here
        model.slides = model.slides if slide is None else slide
        del given["slide"]
        model.defaults |= {name: value for name, value in given.items() if value is not None}
        model.defaults["mode"] = chosen.mode
        if compile is not Compile.off:
            with err.status(Text(f"making kernels of {model_name}")):
                warm_up(model, {} if chosen.mode == "ntp" else {"block_size": block_size})
        kept = MOST_TOKENS if prompt_cache is None else prompt_cache
        most = batch_size or MOST_ANSWERS
        application = build(model, model_name, block_size, kept, most)
        with _naming(host, port):  # another may have come first meanwhile
            listening.listen()
        place = f"[{host}]" if ":" in host else host
        address = f"http://{place}:{listening.getsockname()[1]}/v1"
        if as_json:
            told = {**model.defaults, "slide": chosen.slide}
            print_json({"model": model_name, "url": address, **told})
        else:
            out.print(f"{model_name} answers at {address} until Ctrl-C")
        # A client that never sends the rest of its request does not keep the server from ending.
        settings = uvicorn.Config(
            application, log_config=_logging(quiet), timeout_graceful_shutdown=5
        )
        uvicorn.Server(settings).run(sockets=[listening])


def _logging(quiet: bool) -> dict[str, Any]:
    """What is told of requests, by uvicorn, and of answers, by the engine; and of errors anyway."""
    from uvicorn.config import LOGGING_CONFIG

    told = copy.deepcopy(LOGGING_CONFIG)
    for form in told["formatters"].values():
        form["fmt"] = f"%(asctime)s {form['fmt']}"
        form["use_colors"] = err.is_terminal and not err.no_color
    told["handlers"]["access"]["stream"] = "ext://sys.stderr"
    level = "WARNING" if quiet else "INFO"
    answers = {"handlers": ["default"], "level": level, "propagate": False}
    told["loggers"] |= {"setblock.answers": answers}
    told["loggers"]["uvicorn.access"]["level"] = level
    told["loggers"]["uvicorn.error"]["level"] = "WARNING"  # not of the server's own start
    return told


@contextmanager
def _naming(host: str, port: int) -> Iterator[None]:
    """An error says where it is that nobody can listen."""
    try:
        yield
    except OSError as error:
        raise OSError(f"can't listen on {host}:{port}: {error.strerror or error}") from None
