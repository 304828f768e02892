"""Records: where they come from, safe writing, and journals that go on after a stop."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from setblock import records
from setblock.records import Journal, save_record


def test_a_new_record_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/setblock", "evaluate", "my model", "--json"])
    record = records.new_record()
    assert record["command"] == "setblock evaluate 'my model' --json"
    monkeypatch.setattr("sys.argv", ["/somewhere/setblock/__main__.py", "info"])
    assert records.new_record()["command"] == "setblock info"
    assert record["results"] == []
    assert set(record["versions"]) == {"setblock", "torch", "transformers", "python"}
    assert all(record["versions"].values())
    assert set(record["machine"]) == {"cpu", "cores", "threads", "cuda"}
    assert record["machine"]["cpu"]
    assert record["date"].endswith("+00:00")
    assert json.loads(json.dumps(record)) == record


def repository(folder: Path, tracked: bool) -> str:
    """A checkout that holds an records.py; its commit."""
    folder.mkdir()
    name = "records.py" if tracked else "other.py"
    (folder / "records.py").write_text("")
    (folder / name).write_text("")
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for words in (["init", "-q"], ["add", name], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    head = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(
        head, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("tracked", [True, False])
def test_the_commit_is_that_of_the_package(tmp_path, monkeypatch, tracked):
    """None where the package is only installed below somebody's checkout."""
    commit = repository(tmp_path / "checkout", tracked)
    file = tmp_path / "checkout" / "records.py"
    monkeypatch.setattr(records, "__file__", str(file))
    assert records._commit() == (commit if tracked else None)
    file.write_text("changed")
    assert records._commit() == (f"{commit}+" if tracked else None)


def test_no_commit_outside_a_checkout_or_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert records._commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert records._commit() is None


def test_a_record_replaces_the_file_at_once(tmp_path):
    path = tmp_path / "new" / "folder" / "record.json"
    records.save_record({"results": [1]}, path)
    before = path.stat().st_ino
    records.save_record({"results": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"results": [1, 2]}
    assert path.read_text().endswith("}\n")
    assert path.stat().st_ino != before, "written in place: a reader could see half of it"
    assert list(path.parent.iterdir()) == [path]


def test_a_record_behind_a_link_is_written_where_it_leads(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, path = tmp_path / "record.json", tmp_path / "elsewhere" / "record.json"
    link.symlink_to(path)
    for results in ([1], [1, 2]):
        records.save_record({"results": results}, link)
        assert link.is_symlink()
        assert json.loads(path.read_text()) == {"results": results}
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_record(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    records.save_record({"results": [1]}, path)

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        records.save_record({"results": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"results": [1]}


REQUEST = {"models": ["m"], "limit": 2}


def test_numbers_that_json_has_no_word_for(tmp_path):
    save_record({"results": [{"score": math.inf, "interval": (0.5, math.nan)}]}, tmp_path / "r")
    assert json.loads((tmp_path / "r").read_text())["results"] == [
        {"score": None, "interval": [0.5, None]}
    ]


def test_a_place_where_nothing_can_be_written_is_told_first(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError) as raised:
        Journal({}, tmp_path / "file" / "deep" / "r.json")
    assert raised.value.filename == str(tmp_path / "file")
    with pytest.raises(OSError, match="/proc"):
        Journal({}, Path("/proc/r.json"))
    for name, target in (("file", "/proc/nothing.json"), ("folder", tmp_path / "gone")):
        (tmp_path / f"link-{name}").symlink_to(target)
    with pytest.raises(OSError, match="/proc"):
        Journal({}, tmp_path / "link-file")
    with pytest.raises(FileNotFoundError, match="link-folder"):
        Journal({}, tmp_path / "link-folder" / "r.json")
    (tmp_path / "deep").symlink_to(tmp_path / "made" / "then" / "r.json")
    Journal({}, tmp_path / "deep").save()
    assert (tmp_path / "made" / "then" / "r.json").is_file()
    Journal({}, tmp_path / "new" / "r.json")
    assert not (tmp_path / "new").exists(), "nothing is left behind"


def test_a_journal_without_a_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(REQUEST, None)
    journal.add(0, {"index": 0})
    journal.finish({"task": "t"})
    assert journal.record["results"] == [{"task": "t"}]
    assert journal.record["request"] == REQUEST
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_journal_goes_on(tmp_path):
    path = tmp_path / "new" / "record.json"
    journal = Journal(REQUEST, path)
    for run, index in ((0, 0), (0, 1), (1, 1)):
        journal.add(run, {"index": index})
        if (run, index) == (0, 1):
            journal.finish({"task": "a"}, {"p_value": 1})
    with journal.samples_path.open("a") as file:
        file.write('{"run": 1, "ind')  # killed while writing
    again = Journal(REQUEST, path, resume=True)
    assert again.finished(0) == {"task": "a"}
    assert again.finished(1) is None
    assert again.known(0) == [{"index": 0}, {"index": 1}]
    assert again.known(1) == [{"index": 1}]
    again.add(1, {"index": 0})
    again.finish({"task": "b"}, {"p_value": 0.5})
    last = Journal(REQUEST, path, resume=True)
    assert last.known(1) == [{"index": 1}, {"index": 0}]
    assert last.record["results"] == [{"task": "a"}, {"task": "b"}]
    assert last.record["comparisons"] == [{"p_value": 1}, {"p_value": 0.5}]
    assert last.record["date"] == journal.record["date"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"run": 0, "index": 1}', "has sample 1 of run 0 twice"),
        ("5", "holds a line that is no sample: 5"),
        ("{}", "holds a line that is no sample"),
    ],
)
def test_samples_that_can_not_be_gone_on_with(tmp_path, line, message):
    path = tmp_path / "record.json"
    journal = Journal(REQUEST, path)
    journal.add(0, {"index": 1})
    with journal.samples_path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        Journal(REQUEST, path, resume=True)


@pytest.mark.parametrize("content", ["[]", "{", "{}", "3"])
def test_records_that_are_none(tmp_path, content):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ValueError, match="is no record to go on with"):
        Journal(REQUEST, tmp_path / "record.json", resume=True)


WRITER = """
import sys
from pathlib import Path
from setblock.records import Journal
journal = Journal({"limit": 2}, Path(sys.argv[1]))
print("begun", flush=True)
sys.stdin.read()
"""


def test_a_record_has_one_writer(tmp_path):
    """From the start on, not only from the first answer; and again once that one is dead."""
    path = tmp_path / "record.json"
    words = [sys.executable, "-c", WRITER, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        with pytest.raises(ValueError, match=r"another command is writing to .*record\.json"):
            Journal(REQUEST, path)
        other.kill()
        other.wait()
    Journal(REQUEST, path).add(0, {"index": 0})


def test_journals_do_not_mix(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    with pytest.raises(ValueError, match="no record to go on with"):
        Journal(REQUEST, path, resume=True)
    with pytest.raises(ValueError, match="needs --out"):
        Journal(REQUEST, None, resume=True)
    Journal(REQUEST, path).add(0, {"index": 0})
    with pytest.raises(ValueError, match="is there already: go on with --resume"):
        Journal(REQUEST, path)
    (tmp_path / "other.samples.jsonl").touch()
    with pytest.raises(ValueError, match=r"other\.samples\.jsonl is there already"):
        Journal(REQUEST, tmp_path / "other.json")
    with pytest.raises(ValueError, match=r'another request: \{"limit": 2\}, now \{"limit": 3\}'):
        Journal({**REQUEST, "limit": 3}, path, resume=True)
    monkeypatch.setattr(records, "_commit", lambda: "other")
    with pytest.raises(ValueError, match=r'another commit: .*, now "other"'):
        Journal(REQUEST, path, resume=True)
