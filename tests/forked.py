"""Commands in processes of their own that need not import torch and transformers again.

They are forks of a server that has them already, and runs nothing else.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
# What commands import once they know what to do.
SERVER.set_forkserver_preload(
    ["setblock.cli", "setblock.generation", "setblock.loading", "setblock.finetune"]
)


class Running:
    """`setblock WORDS`, or `python` with `SCRIPT WORDS`, `-m MODULE WORDS` or `-c SOURCE`.

    folder: where it runs. environment: variables beside this process's own.
    """

    def __init__(self, words: list[str], folder: Path, **environment: str) -> None:
        self.words = words
        self.kept = tempfile.TemporaryDirectory()
        self.told = Path(self.kept.name, "out"), Path(self.kept.name, "err")
        given = {**os.environ, **environment}
        self.process = SERVER.Process(target=_run, args=(words, folder, given, *self.told))
        self.process.start()

    def wait(self) -> subprocess.CompletedProcess[str]:
        """What it leaves behind."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        told = [path.read_text(encoding="utf-8") for path in self.told]
        self.kept.cleanup()
        return subprocess.CompletedProcess(self.words, code, *told)


def run(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same, once it has ended."""
    return Running(words, folder, **environment).wait()


def _run(words: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    program, *sys.argv = [Path(words[0]).name, *words[1:]]
    if program == "setblock":
        from setblock.cli import main

        sys.argv = words
        main()
    elif sys.argv[0] == "-c":
        exec(sys.argv[1], {"__name__": "__main__"})
    elif sys.argv[0] == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
