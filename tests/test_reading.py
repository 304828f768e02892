"""Forms of answers are read in time, or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from setblock import grammar, reading, serve
from setblock.generation import settings_for


def slow(count: int) -> str:
    """A grammar that takes twice as long to read with each more of these."""
    rules = (f"/(.|\\n)*a(.|\\n){{{number}}}b(.|\\n)*/" for number in range(1, count + 1))
    return f"start: T\nT: {' & '.join(rules)}"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("regex", "[0-9]+"),
        ("json_schema", '{"type": "object"}'),
        ("grammar", 'start: "a"'),
        # What is wrong with these is said by others.
        ("regex", "(unclosed"),
        ("json_schema", '{"x-guidance": 3}'),
        ("json_schema", '{"type": "nothing"}'),
        ("grammar", "start: a"),
        ("regex", "a" * (reading.LONGEST_FORM + 1)),
    ],
)
def test_forms_that_are_soon_read(name, form):
    reading.tried(name, form, 60)


def test_one_that_takes_too_long():
    with pytest.raises(ValueError, match=r"^grammar can't be used: to read it takes more than 1 s"):
        reading.tried("grammar", slow(30), 1)


def test_one_that_ends_the_process(monkeypatch):
    ended = subprocess.CompletedProcess((), -6, b"", b"all of it\nno memory\n")
    monkeypatch.setattr(reading.subprocess, "run", lambda *_, **__: ended)
    told = "regex can't be used: the process that read it ended with status -6: no memory"
    with pytest.raises(ValueError, match=re.escape(told)):
        reading.tried("regex", "ends the process")


def test_what_was_read_is_known(monkeypatch):
    reading.tried("regex", "read twice")
    monkeypatch.setattr(reading.subprocess, "run", None)
    reading.tried("regex", "read twice")


def test_without_llguidance(monkeypatch, tmp_path):
    """The process says nothing of that."""
    (tmp_path / "llguidance.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", "import llguidance"], capture_output=True)
    assert done.returncode
    reading.tried("regex", "without llguidance")


def test_no_interrupt_waits_for_a_form():
    """What reads it is left behind."""
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def interrupt() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    def read() -> None:
        begun.set()
        released.wait(60)
        ended.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        reading.with_room(read)
    assert not ended.is_set()
    released.set()


def test_errors_of_the_thread_are_raised_here():
    def fail() -> None:
        raise RecursionError("too deep")

    with pytest.raises(RecursionError, match="too deep"):
        reading.with_room(fail)
    assert reading.with_room(lambda: 3) == 3


def test_a_form_is_read_once(nano, monkeypatch):
    def asked(**form: Any) -> Any:
        return grammar.compiled(nano, settings_for(nano, mode="ntp", **form))

    reads: list[str] = []
    read = grammar._grammar
    monkeypatch.setattr(grammar, "_grammar", lambda *one: (reads.append(one[2]), read(*one))[1])
    first = asked(regex="[0-9]{9}")
    first.say(nano.tokenizer("1", add_special_tokens=False)["input_ids"])
    assert asked(regex="[0-9]{9}").fitted([], 1) == ([], [])  # not as the first goes on
    asked(grammar='start: "[0-9]{9}"')
    for _ in range(2):
        with pytest.raises(ValueError, match="regex can't be used") as caught:
            asked(regex="(unclosed")
        assert caught.value.__cause__ is None
    monkeypatch.setattr(grammar, "MOST_READ", 2)
    asked(regex="[0-9]{8}")
    asked(regex="[0-9]{9}")
    once = ["[0-9]{9}", 'start: "[0-9]{9}"', "(unclosed", "[0-9]{8}", "[0-9]{9}"]
    assert reads == once


# the server


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 5}
TOOL = {"type": "function", "function": {"name": "one", "parameters": {"pattern": "a"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"pattern": "a"}}}


def sent(client: Any, **fields: Any) -> httpx.Response:
    return httpx.post(f"{client.base_url}chat/completions", json={**CHAT, **fields}, timeout=60)


@pytest.mark.parametrize(
    ("fields", "option", "field"),
    [
        ({"regex": "a"}, "regex", "regex"),
        ({"grammar": 'start: "a"'}, "grammar", "grammar"),
        ({"response_format": SCHEMA}, "json_schema", "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "json_schema", "tools"),
    ],
)
def test_the_server_refuses_what_takes_too_long(client, monkeypatch, fields, option, field):
    def late(name: str, form: str) -> None:
        assert name == option
        if option == "json_schema":
            assert json.loads(form) == {"pattern": "a"}
        raise ValueError(f"{name} can't be used: to read it takes more than 5 s")

    monkeypatch.setattr(serve, "tried", late)
    for stream in (False, True):
        response = sent(client, **fields, stream=stream)
        told = response.json()["error"]
        assert (response.status_code, told["param"]) == (400, field)
        assert told["message"] == f"{field} can't be used: to read it takes more than 5 s"


def test_others_are_answered_while_a_form_is_read(client, monkeypatch):
    reads, released = threading.Event(), threading.Event()

    def wait(name: str, form: str) -> None:
        reads.set()
        assert released.wait(60)

    monkeypatch.setattr(serve, "tried", wait)
    found: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: found.append(sent(client, regex="[0-9]{3}")))
    asking.start()
    assert reads.wait(60)
    assert sent(client).status_code == 200
    assert not found
    released.set()
    asking.join()
    assert found[0].json()["choices"][0]["message"]["content"].isdecimal()


@pytest.mark.parametrize(
    ("body", "forms"),
    [
        ({}, []),
        ({"regex": 3, "grammar": None, "response_format": "text"}, []),
        ({"response_format": {"type": "poem"}}, []),
        ({"tools": [TOOL]}, []),
        ({"tools": [TOOL], "tool_choice": "auto"}, []),
        ({"tools": [3, {}, {"function": 3}, {"function": {}}], "tool_choice": "required"}, []),
        ({"tools": 3, "tool_choice": {}}, []),
        ({"response_format": {"type": "text"}}, [("response_format", {"json_schema": None})]),
    ],
)
def test_what_is_no_form_is_not_read(body, forms):
    assert serve._forms(body) == forms
