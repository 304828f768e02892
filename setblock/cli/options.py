"""Options that several commands have: their values, names and words."""

from enum import StrEnum
from typing import Annotated

import typer


class Mode(StrEnum):
    """How to decode."""

    sbd = "sbd"
    ntp = "ntp"
    verified = "verified"


class Draft(StrEnum):
    """Where mode verified takes its drafts from."""

    branches = "branches"
    solver = "solver"


class Dtype(StrEnum):
    """Floating-point type of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


# Parts of a long --help; what stands in none is printed first.
DECODING, SBD, VERIFIED = "Decoding", "Decoding in mode sbd", "Decoding in mode verified"
SAMPLING, MACHINE = "Sampling", "Model and machine"

SOLVERS_HELP = (
    "Which masked positions each forward reveals: entropy:GAMMA (the paper's), "
    "confidence-bound:GAMMA, margin-bound:GAMMA, entropy-threshold:TAU, confidence:TAU, factor:F, "
    "fixed:N or prefix:TAU. "
    "Default: the checkpoint's, else entropy:0.1."
)
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A bundled model (nano, nano-twin, smollm2, smollm2-base), a checkpoint folder, a "
        "GGUF file, or a hub name.",
    ),
]
MaskTokenOption = Annotated[
    int | None,
    typer.Option(
        "--mask-token-id",
        help="Mask token to use instead of the one `info` shows.",
        rich_help_panel=MACHINE,
    ),
]
ModeOption = Annotated[
    Mode | None,
    typer.Option(
        help="sbd: blocks. ntp: token by token. verified: blocks that give exactly the tokens of "
        "ntp (in float32; rounding in bfloat16 can change some, --lenience below 1 does). "
        "Default: the checkpoint's, else sbd, or ntp where a model was never trained for blocks "
        "and no option of blocks is given.",
        rich_help_panel=DECODING,
    ),
]
SolverOption = Annotated[str | None, typer.Option(help=SOLVERS_HELP, rich_help_panel=DECODING)]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a block. Default: the checkpoint's, else 16. Mode verified: what `tune` "
        "wrote, else the length, up to that one, that is quickest by arithmetic.",
        rich_help_panel=DECODING,
    ),
]
SlideOption = Annotated[
    bool | None,
    typer.Option(
        help="Begin the next block behind the last final token, instead of behind the whole block, "
        "each with the token that next-token decoding has there. Default: the checkpoint's, else "
        "whole blocks.",
        rich_help_panel=SBD,
    ),
]
SeedFirstOption = Annotated[
    bool,
    typer.Option(
        "--next-token-seed",
        help="Begin each block with the token that next-token decoding has there. It "
        "takes no forward of its own.",
        rich_help_panel=SBD,
    ),
]
FallbackOption = Annotated[
    float | None,
    typer.Option(
        help="Once every masked position of a block has an entropy above this many "
        "nats, finish the block token by token. Default: never.",
        rich_help_panel=SBD,
    ),
]
DraftOption = Annotated[
    Draft | None,
    typer.Option(
        help="Where drafts come from. branches: from the forward that verifies the "
        "draft before. solver: from forwards of their own, filled by --solver. Default: what is "
        "quicker by arithmetic.",
        rich_help_panel=VERIFIED,
    ),
]
BranchesOption = Annotated[
    int | None,
    typer.Option(
        help="How many drafts a forward makes ahead, each for another number of "
        "accepted tokens, the likeliest numbers first. Default: the checkpoint's, else what is "
        "quickest by arithmetic.",
        rich_help_panel=VERIFIED,
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        help="How many more drafts each of these branches gets, that begin with "
        "its likeliest next tokens. Default: the checkpoint's, else what is quickest by "
        "arithmetic.",
        rich_help_panel=VERIFIED,
    ),
]
LOOKUP_HELP = (
    "Tokens at most of a draft that is copied from the text itself: where its last tokens occurred "
    "before, what followed them there is likely to follow again. Copied if that promises more than "
    "the model's own draft. Needs no training; with --block-size 1 there are no other drafts. "
    "Default: the checkpoint's, where it pays for so many rows at once, else 0, never."
)
LookupOption = Annotated[int | None, typer.Option(help=LOOKUP_HELP, rich_help_panel=VERIFIED)]
LENIENCE_HELP = (
    "Accept a drafted token as well if its probability, with sampling's noise if "
    "any, is at least this share of that of the token that ntp says: fewer forwards, and no longer "
    "exactly the tokens of ntp."
)
LenienceOption = Annotated[
    float | None,
    typer.Option(help=f"{LENIENCE_HELP} Default: 1, exactly those.", rich_help_panel=VERIFIED),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopPOption = Annotated[
    float,
    typer.Option(help="Sample from the likeliest tokens of this mass.", rich_help_panel=SAMPLING),
]
TopKOption = Annotated[
    int, typer.Option(help="Sample from this many tokens; 0 is all.", rich_help_panel=SAMPLING)
]
MinPOption = Annotated[
    float,
    typer.Option(
        help="Sample from tokens of at least this share of the likeliest one's probability; 0 is "
        "off.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionOption = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        help="Modes ntp and verified: divide the logits of tokens that the prompt or the answer "
        "has, multiply negative ones; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
PresenceOption = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        help="Modes ntp and verified: taken from the logits of tokens that the answer has.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyOption = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="Modes ntp and verified: the same for each time that the answer has the token.",
        rich_help_panel=SAMPLING,
    ),
]
BiasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=BIAS",
        help="Modes ntp and verified: add so much, in -100..100, to the logit of the token with "
        "this id; may be given again.",
        rich_help_panel=SAMPLING,
    ),
]
LeastOption = Annotated[
    int,
    typer.Option(
        "--min-new-tokens",
        help="Modes ntp and verified: generated tokens before an end token may come.",
        rich_help_panel=SAMPLING,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Of the sampling noise.", rich_help_panel=SAMPLING)]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        metavar="TYPE",  # all of them would be wider than their column
        help="float32, bfloat16 or float16. Default: the checkpoint's, else float32 on a CPU and "
        "bfloat16 elsewhere, float16 on GPUs that compute in no bfloat16, such as T4 and V100.",
        rich_help_panel=MACHINE,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1 ... Default: the checkpoint's, else cuda if there is one.",
        rich_help_panel=MACHINE,
    ),
]


class Switch(StrEnum):
    """Whether."""

    on = "on"
    off = "off"


class Compile(StrEnum):
    """What forwards behind a prompt run as."""

    off = "off"
    on = "on"
    kernels = "kernels"
    graphs = "graphs"


CompileOption = Annotated[
    Compile,
    typer.Option(
        "--compile",
        help="kernels: decode in kernels that torch.compile makes at the first forwards, which "
        "takes a minute or more on a CPU, and less the next time. graphs: replay forwards of "
        "torch's own kernels as CUDA graphs; nothing to wait for. on: kernels, on a GPU as graphs.",
        rich_help_panel=MACHINE,
    ),
]
PackOption = Annotated[
    Switch | None,
    typer.Option(
        "--pack",
        help="on: lay out linear layers' weights for a CPU's kernels while loading. Default: on "
        "where that is possible.",
        rich_help_panel=MACHINE,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
