"""--import: code of the user's own before a command, and the solvers that it makes known."""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

from setblock import imported, solvers


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch) -> None:
    monkeypatch.setattr(solvers, "FORMS", dict(solvers.FORMS))
    monkeypatch.setattr(imported, "FILES", {})
    monkeypatch.setattr(sys, "path", [*sys.path])


RULE = """
from setblock.solvers import register

class Mine:
    def __str__(self):
        return "mine:2"

    def reveal(self, predictions, masked):
        return masked if predictions.logits.shape[0] == 1 else masked + "a"

register("mine", lambda n: Mine(), int, "N")
"""


def test_import(run, tmp_path, monkeypatch):
    """A rule of the user's own at the command line; records name its file."""
    monkeypatch.chdir(tmp_path)
    Path("rule.py").write_text(RULE, encoding="utf-8")
    own, out = ["--import", "rule.py"], tmp_path / "scores.json"
    words = ["evaluate", "nano", "--task", "json", "--limit", 2, "--mode", "sbd", "--no-slide"]
    words += ["--max-new-tokens", 16, "--solver", "mine:2", "--out", out]
    told = run(*own, *words, "--batch-size", 1, "--json")
    record = json.loads(told.out)
    digest = hashlib.sha256(RULE.encode()).hexdigest()
    assert record["imported"] == {"rule.py": digest}
    assert record["results"][0]["solver"] == "mine:2"
    assert record["results"][0]["tokens_per_forward"] > 8
    solvers.FORMS.pop("mine")
    Path("rule.py").write_text(RULE + "# changed", encoding="utf-8")
    told = run(*own, *words, "--batch-size", 1, "--resume")
    changed = hashlib.sha256((RULE + "# changed").encode()).hexdigest()
    files = f"--import rule.py ({digest[:8]}), now with --import rule.py ({changed[:8]})"
    assert told.error.endswith(f"was made with {files}")
    assert "solver must be one of" not in told.err
    solvers.FORMS.pop("mine")
    Path("rule.py").write_text(RULE, encoding="utf-8")
    monkeypatch.setattr(imported, "FILES", {})
    told = run("--import", tmp_path / "rule.py", *words, "--batch-size", 1, "--resume", "--json")
    assert json.loads(told.out)["results"] == record["results"], "the same file by another name"
    assert run("report", out, "--out", tmp_path / "report").code == 0
    assert f", rule.py ({digest}), " in (tmp_path / "report" / "report.md").read_text()
    solvers.FORMS.pop("mine")
    out.unlink()
    out.with_suffix(".samples.jsonl").unlink()
    told = run("--import=rule.py", *words, "--batch-size", 2)
    assert re.search(r"unsupported operand.* \(\S+rule.py, line 9\)$", told.err.strip())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1\ny = x / 0", r"--import a.py: ZeroDivisionError: .* \(\S+a.py, line 2\)$"),
        ("a.py", "x = (", r"--import a.py: SyntaxError: '\(' was never closed \(a.py, line 1\)$"),
        ("a.txt", "x = 1", r"--import must be a Python file, FILE.py, got 'a.txt'$"),
        ("a.py", None, r"No such file or directory: 'a.py'$"),
    ],
)
def test_import_of_what_is_no_code(run, tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text, encoding="utf-8")
    assert re.search(message, run("--import", name, "generate", "nano", "a").err.strip())


def test_import_goes_first(run):
    told = run("generate", "nano", "--import", "a.py")
    assert "--import goes before the command: setblock --import FILE.py COMMAND" in told.err
    for command in ("train", "speedup"):
        words = ["--model", "nano", "--data", "a.jsonl", "--output-dir", "a"]
        told = run(command, *words, "--import", "a.py")
        assert "--import goes before the command: setblock --import FILE.py COMMAND" in told.err


def test_an_imported_file_has_modules_beside_it_and_errors_a_place(run, tmp_path, monkeypatch):
    (tmp_path / "beside_the_rule.py").write_text("def fails(): return [].none")
    rule = tmp_path / "rule.py"
    more = "import beside_the_rule\nregister('fails', lambda n: beside_the_rule.fails())\n"
    rule.write_text(RULE + more)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    told = run("--import", "../rule.py", "generate", "nano", "a", "--solver", "fails:1")
    line = len((RULE + more).splitlines())
    assert told.code == 1
    assert told.error == (
        f"AttributeError: 'list' object has no attribute 'none' ({rule}, line {line})"
    )


def test_what_runs_is_what_the_file_holds(tmp_path, monkeypatch):
    """Not what Python keeps of an earlier one of that size and second."""
    for number in (1, 2):
        (tmp_path / "a.py").write_text(f"import sys\nsys.number = {number}")
        os.utime(tmp_path / "a.py", (1, 1))
        imported.run(tmp_path / "a.py")
        assert sys.number == number  # type: ignore[attr-defined]
    assert not (tmp_path / "__pycache__").exists()
    del sys.number  # type: ignore[attr-defined]


def test_a_checkpoint_s_own_rule_needs_its_file(run, checkpoint):
    folder = checkpoint("llama", settings={"trained": True, "solver": "mine:2"})
    told = run("generate", folder, "a").error
    assert f"the solver that {folder} names by itself: solver must be one of entropy:" in told
    assert told.endswith("a rule of your own is made known by setblock --import FILE.py")
