"""Generated code: right answers pass, everything else counts as wrong and leaves nothing behind."""

import pytest

from setblock.execution import calls_agree, run_function

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


def test_files_stay_in_the_temporary_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_function("open('left', 'w').write('x')\n" + DOUBLE, "double", [1]) == [2]
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_hold_up_the_caller() -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n" + DOUBLE
    assert run_function(code, "double", [1]) == [2]  # a hang would meet WALL_S and give None
