"""Run generated Python functions in a limited subprocess.

What it guards against: endless loops (CPU and wall-clock limits), memory and file-size blow-ups,
endless output, leftover files (own temporary directory), a look at the expected results (only
arguments are sent).
What it does not protect from: code that sets out to harm the machine. There is no network,
file-system or process isolation; run untrusted models' code in a container.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

CPU_S = 2
WALL_S = 20  # generous: a busy machine must not turn a right answer into a wrong one
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20  # of each file written, the results included

# Reads {"code", "name", "arguments"} from stdin and prints the list of results as JSON on the real
# stdout; whatever the code itself prints goes nowhere.
_CHILD = """
import json, os, sys
job = json.load(sys.stdin)
out = os.dup(1)
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1)
os.dup2(null, 2)
scope = {"__name__": "answer"}
exec(job["code"], scope)
results = [scope[job["name"]](argument) for argument in job["arguments"]]
os.write(out, json.dumps(results).encode())
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
    job = json.dumps({"code": code, "name": name, "arguments": list(arguments)})
    # Files, not pipes: a process that the code leaves behind would hold a pipe open.
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
    ):
        stdin.write(job.encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
            preexec_fn=_limit,
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
        results = json.loads(output)
    except ValueError:
        return None
    return results if isinstance(results, list) else None


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(process: subprocess.Popen) -> None:
    """Kill the child and whatever it started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended
    process.wait()
