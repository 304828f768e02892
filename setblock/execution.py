"""Run generated Python code in a limited subprocess.

What it guards against: endless loops (CPU and wall-clock limits), memory blow-ups, endless output,
files (own temporary directory, and Python's audit events end the process at the first attempt to
write or remove one), the network and new processes (likewise), and, for functions, a look at the
expected results (only arguments are sent).
macOS has no limit of memory, Windows none but the wall clock's.
What it does not protect from: code that sets out to harm the machine or to forge its result. Audit
events are no security boundary, the frames of the interpreter hold what the checks know, everything
readable can be read; run untrusted models' code in a container.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

CPU_S = 2
WALL_S = 20  # generous: a busy machine must not turn a right answer into a wrong one
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20  # of each file written, the results included

# Reads a job from stdin: {"code", "name", "arguments"}, answered by the list of results as JSON on
# the real stdout, or {"code", "tests"}, answered by its "nonce" once the tests have passed.
# Whatever the code itself prints goes nowhere. The child limits itself: between fork and exec a
# large parent would be over the limit of memory already.
_CHILD = """
import importlib.util, json, os, pathlib, shutil, subprocess, sys  # whose imports are denied below

def main():
    job = json.load(sys.stdin)
    if job["limits"]:
        import resource
        for name, value in job["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
    system = sys.modules.get("posix") or sys.modules["nt"]
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
    denied = ("socket.", "subprocess.", "ctypes.", "shutil.", "sqlite3.", "os.exec", "os.fork",
              "os.posix_spawn", "os.spawn", "os.system", "os.remove", "os.rename", "os.rmdir",
              "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "os.chown", "os.kill",
              "os.putenv", "os.utime", "os.setxattr", "os.removexattr", "signal.")
    # Modules below those that tell: loaded already, or ways around what was taken out of them.
    below = (system.__name__, "_posixsubprocess", "_imp", "_ctypes", "_socket", "_sqlite3")
    if system.__name__ == "nt":  # elsewhere the standard library asks in vain
        below += ("_winapi",)

    def guard(event, words, end=os._exit):
        if event.startswith(denied) or (event == "open" and words[2] & writing):
            end(3)
        if event == "import" and words[0] in below:
            end(3)

    for name in ("mkfifo", "mknod", "writev", "pwrite", "pwritev", "sendfile"):  # no event tells
        for module in (os, system):
            if hasattr(module, name):
                delattr(module, name)
    subprocess._fork_exec = None
    for name in below:
        sys.modules.pop(name, None)
    sys.addaudithook(guard)
    nonce = job.pop("nonce", None)
    scope = {"__name__": "answer"}
    exec(job["code"], scope)
    if nonce is not None:
        exec(job["tests"], scope)
        return out, nonce
    return out, [scope[job["name"]](argument) for argument in job["arguments"]]

def write(answer, say=os.write, form=json.dumps):
    say(answer[0], form(answer[1]).encode())

# The code finds neither these functions nor what they hold by name.
sys.modules.pop("__main__")
(lambda run, tell: tell(run()))(globals().pop("main"), globals().pop("write"))
"""


def calls_agree(code: str, name: str, cases: Sequence[tuple[object, object]]) -> bool:
    """Whether function `name` defined by `code` maps every case's argument to its result.

    Arguments and results are JSON values. Code that fails, hangs or grows past the limits does not
    agree.
    """
    results = run_function(code, name, [argument for argument, _ in cases])
    return results == [result for _, result in cases]


def run_function(code: str, name: str, arguments: Sequence[object]) -> list | None:
    """Results of `name(argument)` for each argument; None if a call failed or a limit was met."""
    check_here()
    results = _run({"code": code, "name": name, "arguments": list(arguments)})
    return results if isinstance(results, list) else None


def passes(code: str, tests: str) -> bool:
    """Whether `tests`, run behind `code` in the same scope, come to their end without an error."""
    check_here()
    nonce = secrets.token_hex(16)  # an early exit prints nothing, let alone this
    return _run({"code": code, "tests": tests, "nonce": nonce}) == nonce


def limits_on(platform: str) -> dict[str, int]:
    """Of `setrlimit`, by name, as far as this system has them."""
    if platform == "win32":
        return {}
    limits = {"RLIMIT_CPU": CPU_S, "RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_CORE": 0}
    return limits if platform == "darwin" else limits | {"RLIMIT_AS": MEMORY_BYTES}


@cache
def check_here() -> None:
    """Raises: OSError where no code runs, be it right or wrong: all of it would count as wrong."""
    if _run({"code": "def same(x):\n    return x", "name": "same", "arguments": [1]}) != [1]:
        raise OSError(
            f"generated code can't be run on this system ({sys.platform}): even code that returns "
            "its argument fails under the limits that it is run with"
        )


def _run(job: dict[str, Any]) -> Any:
    """What the child answers; None if it failed, met a limit, or tried what it must not."""
    # Windows starts no Python without it.
    needed = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}
    # Files, not pipes: a process that the code leaves behind would hold a pipe open.
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
    ):
        stdin.write(json.dumps({**job, "limits": limits_on(sys.platform)}).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _CHILD],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, **needed},
            start_new_session=True,
        )
        try:
            process.wait(timeout=WALL_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
        stdout.seek(0)
        output = stdout.read()
    if process.returncode != 0:
        return None
    try:
        return json.loads(output)
    except ValueError:
        return None


def _end(process: subprocess.Popen) -> None:
    """Kill the child and whatever it started in its session."""
    if not hasattr(os, "killpg"):  # Windows
        process.kill()
    else:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
