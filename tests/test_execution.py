"""Generated code: right answers pass, everything else counts as wrong and leaves nothing behind."""

import os

import pytest

from setblock import execution
from setblock.execution import calls_agree, check_here, limits_on, passes, run_function

DOUBLE = "def double(x):\n    return 2 * x"


def test_right_code_agrees() -> None:
    assert calls_agree(DOUBLE, "double", [(1, 2), ([1], [1, 1]), ("a", "aa")])


def test_wrong_result_disagrees() -> None:
    assert not calls_agree(DOUBLE, "double", [(1, 2), (2, 5)])


@pytest.mark.parametrize(
    "code",
    [
        "def double(x) return",
        "",
        "def other(x):\n    return 2 * x",
        "def double(x):\n    return x.missing",
        "def double(x):\n    return {1, 2}",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "while True: pass",
        "x = 'a' * 10**12\ndef double(x):\n    return 2 * x",
        "open('big', 'wb').write(b'x' * 10**8)\ndef double(x):\n    return 2 * x",
        "import os\nos.write(1, b'[2]')\nos._exit(0)",
        "raise KeyboardInterrupt",
    ],
)
def test_bad_code_is_wrong(code: str) -> None:
    assert run_function(code, "double", [1]) is None


def test_what_the_code_prints_is_ignored() -> None:
    assert run_function("print('[7]')\n" + DOUBLE, "double", [1]) == [2]


@pytest.mark.parametrize(
    "code",
    [
        "open('left', 'w').write('x')",
        "import os\nos.open('left', os.O_CREAT)",
        "try:\n    open('left', 'a')\nexcept BaseException:\n    pass",
        "import os\nos.mkdir('left')",
        "import shutil\nshutil.rmtree('/nowhere', ignore_errors=True)",
        "import socket\nsocket.socket()",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
        "import os, time\nif os.fork() == 0:\n    time.sleep(600)",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os, sys\nos.execv('/bin/true', ['true'])",
        "import ctypes",
        "import os, signal\nos.kill(os.getppid(), 0)",
        "import sqlite3\nsqlite3.connect('left').execute('create table a(b)')",
        "import os\nos.mkfifo('left')",
        "import posix\nposix.mknod('left')",
        "import os\nos._exit = lambda code: None\nopen('left', 'w')",
        "import __main__\n__main__.end = lambda code: None\nopen('left', 'w')",
        "import _posixsubprocess",
        "import sys\nsys.modules.pop('posix', None)\nimport posix\nposix.mkfifo('left')",
        "import _imp",
        "import subprocess\nsubprocess.run(['touch', 'left'])",
        "import subprocess\nsubprocess._fork_exec()",
        "import shutil\nshutil.copy('/etc/hostname', 'left')",
        "import shutil\nshutil.posix.mkfifo('left')",
        "import tempfile\ntempfile.mkdtemp(dir='.')",
        "import socket",
        "import os\nos.utime('.', (0, 0))",
    ],
)
def test_files_processes_and_the_network_count_as_wrong(code: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_function(f"{code}\n{DOUBLE}", "double", [1]) is None
    assert not passes(f"{code}\n{DOUBLE}", "assert double(1) == 2")
    assert list(tmp_path.iterdir()) == []


def test_the_mark_of_passed_tests_is_not_found_by_name() -> None:
    forged = "import __main__, json, os\n"
    forged += "os.write(__main__.out, json.dumps(__main__.job['nonce']).encode())\nos._exit(0)"
    assert not passes(forged, "assert double(1) == 2")
    assert not passes("import json\njson.dumps = str\n" + DOUBLE, "assert double(1) == 3")


def test_reading_and_the_standard_library_stay_allowed() -> None:
    code = "import collections, heapq, itertools, math, re, typing, datetime, random\n" + DOUBLE
    assert run_function(f"open('/dev/null').read()\n{code}", "double", [1]) == [2]


@pytest.mark.parametrize(
    "module",
    [
        *("ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum"),
        *("fractions", "functools", "hashlib", "heapq", "importlib.util", "inspect", "io"),
        *("itertools", "math", "mimetypes", "operator", "pathlib", "pprint", "queue", "random"),
        *(
            "re",
            "shutil",
            "statistics",
            "string",
            "subprocess",
            "tempfile",
            "textwrap",
            "threading",
        ),
        *("typing", "unittest", "zipfile"),
    ],
)
def test_modules_that_right_code_may_import(module: str) -> None:
    assert run_function(f"import {module}\n{DOUBLE}", "double", [1]) == [2]


def test_tests_pass_or_not() -> None:
    assert passes(DOUBLE, "assert double(2) == 4\nassert double('a') == 'aa'")
    assert passes(DOUBLE, "")
    assert not passes(DOUBLE, "assert double(2) == 5")
    assert not passes(DOUBLE, "assert twice(2) == 4")
    assert not passes("def double(x) return", "")


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def double(x):\n    raise SystemExit",
        "def double(x):\n    while True: pass",
        "def double(x):\n    import os\n    os._exit(0)",
        "print('a' * 10**9)",
    ],
)
def test_code_that_ends_or_hangs_before_its_tests_fails_them(code: str) -> None:
    assert not passes(code, "assert double(1) == 2")


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_with_the_limits_of_each_system(platform: str, monkeypatch) -> None:
    limits = limits_on(platform)
    assert ("RLIMIT_AS" in limits, bool(limits)) == (platform == "linux", platform != "win32")
    monkeypatch.setattr(execution, "limits_on", lambda _: limits)
    monkeypatch.setattr(execution, "WALL_S", 2)
    if platform == "win32":
        monkeypatch.delattr(os, "killpg")
    assert run_function(DOUBLE, "double", [1]) == [2]
    assert run_function("while True: pass", "double", [1]) is None
    assert run_function(f"open('left', 'w')\n{DOUBLE}", "double", [1]) is None


def test_a_system_on_which_no_code_runs_is_an_error(monkeypatch) -> None:
    check_here.cache_clear()
    monkeypatch.setattr(execution, "limits_on", lambda _: {"RLIMIT_NONE": 1})
    with pytest.raises(OSError, match="generated code can't be run on this system"):
        calls_agree(DOUBLE, "double", [(1, 2)])
    with pytest.raises(OSError, match="generated code can't be run on this system"):
        passes(DOUBLE, "assert double(1) == 2")
    monkeypatch.undo()
    assert calls_agree(DOUBLE, "double", [(1, 2)])
