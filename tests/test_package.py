"""The package as a whole: public names, what importing it costs, which way imports point."""

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from conftest import UNCHECKED

import setblock

FOLDER = Path(setblock.__file__).parent
# A module imports only from levels below its own.
LEVELS = (
    (
        "files",
        "conversations",
        "signals",
        "names",
        "masks",
        "endings",
        "transfer",
        "imported",
        "leaving",
        "reading",
    ),
    (
        "solvers",
        "execution",
        "unpadded",
        "shared",
        "chain",
        "rows",
        "config",
        "roofline",
        "records",
        "scores",
        "checkpoint",
        "card",
        "kinds",
        "norms",
        "logits",
    ),
    (
        "objective",
        "data",
        "attention",
        "cache",
        "adapters",
        "nano",
        "machines",
        "packed",
        "tasks",
        "resume",
        "sampling",
    ),
    ("architectures", "mask_token", "gated", "batches", "head", "plan", "kernels", "settings"),
    ("graphs", "fields"),
    ("model", "totals", "timelimit", "order", "choices"),
    ("trial", "grammar"),
    ("loading", "state", "results", "pieces", "views", "forced"),
    ("decode", "verified", "likelihood", "train", "calls", "prompt_cache", "logprobs"),
    ("branches", "served"),
    ("running", "vllm"),
    ("generation",),
    ("evaluate", "live", "watch", "contenders", "lm_eval", "custom_generate", "engine", "run"),
    (
        "answers",
        "prompts",
        "benchmark",
        "profiling",
        "tune",
        "measured",
        "estimate",
        "serve",
        "export",
    ),
    ("corpus",),
    ("finetune", "report"),
    ("speedup",),
    ("cli",),
    ("__main__",),
)
LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules}
# Module, or package of modules at one level -> its files.
MODULES = {file.stem: [file] for file in FOLDER.glob("*.py") if file.stem != "__init__"} | {
    file.parent.name: sorted(file.parent.glob("*.py")) for file in FOLDER.glob("*/__init__.py")
}


def imported(source: str) -> set[str]:
    """Modules of the package that this source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {path[1] for path in parts if path[0] == "setblock" and len(path) > 1}
    return found


def test_every_import_is_seen():
    source = (
        "import setblock.masks, torch\nfrom setblock.model import Model\n"
        "def later():\n    from setblock import solvers\n"
    )
    assert imported(source) == {"masks", "model", "solvers"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_from_below(module):
    assert module in LEVEL, f"setblock/{module}.py is new: give it a level in LEVELS"
    files = MODULES[module]
    found = set.union(*(imported(file.read_text()) for file in files))
    for other in found - ({module} if len(files) > 1 else set()):
        # Public names are for users: inside the package they would hide where an import points.
        assert other in LEVEL, f"{module} imports setblock.{other}, which has no level in LEVELS"
        assert LEVEL[other] < LEVEL[module], (
            f"{module} (level {LEVEL[module]}) imports {other} (level {LEVEL[other]})"
        )


def test_files_without_type_checks_are_there():
    here = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert here >= UNCHECKED


def test_public_names():
    assert sorted(setblock.__all__) == setblock.__all__
    assert set(setblock.__all__) == set(setblock._HOMES)
    for name, home in setblock._HOMES.items():
        assert getattr(setblock, name) is getattr(import_module(f"setblock.{home}"), name)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="module 'setblock' has no attribute 'decoder'"):
        _ = setblock.decoder  # type: ignore[attr-defined]


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has imported after this statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_importing_the_package_is_cheap():
    heavy = {"torch", "transformers", "matplotlib", "trl"}
    assert not modules_after("import setblock") & heavy
    assert not modules_after("from setblock import ModelError") & heavy


def test_generating_needs_neither_training_nor_plots():
    loaded = modules_after("from setblock import generate, load")
    assert "transformers" in loaded
    assert not loaded & {"matplotlib", "trl", "datasets", "gguf"}


ELSEWHERE = """
import os, sys
import psutil  # which itself needs what is taken away here
sys.modules["fcntl"] = sys.modules["resource"] = None
del os.killpg, os.getloadavg
from setblock import execution
from setblock.cli import main
execution.limits_on = lambda platform: {}
assert execution.calls_agree("def f(x):\\n    return x", "f", [(1, 1)])
main()
"""


def test_without_what_windows_lacks(tmp_path):
    words = "evaluate nano --task code --limit 2 --mode sbd --out record.json".split()
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    [line] = json.loads((tmp_path / "record.json").read_text())["results"]
    assert (line["n"], line["correct"], line["peak_bytes"]) == (2, 2, None)


BARE = """
import sys
for name in ("accelerate", "datasets", "gguf", "matplotlib", "peft", "trl", "uvicorn"):
    sys.modules[name] = None
from setblock.cli import main
for words in sys.stdin.read().splitlines():
    sys.argv = ["setblock", *words.split()]
    main()
    print("ran:", words)
"""
NO_EXTRA = """
generate nano --prompt hi --max-new-tokens 4
info nano
evaluate nano --task lists --limit 1 --max-new-tokens 4
benchmark nano --limit 1 --repeats 1 --max-new-tokens 4
profile nano --limit 1 --repeats 1 --max-new-tokens 4
export nano exported
"""


def test_commands_that_need_no_extra(tmp_path):
    """They run without the packages that extras bring."""
    commands = NO_EXTRA.strip()
    run = subprocess.run(
        [sys.executable, "-c", BARE], input=commands, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert re.findall("(?m)^ran: (.*)$", run.stdout) == commands.splitlines()
