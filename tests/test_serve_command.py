"""`setblock serve` in a process of its own, the load example, and `transformers serve`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import QUESTIONS, client_of, streamed, wait_for
from starlette.testclient import TestClient

from setblock.cli import serving
from setblock.export import export
from setblock.generation import checked, generate, settings_for
from setblock.loading import load
from setblock.model import Model
from setblock.running import Running


def test_an_exported_checkpoint_behind_stock_transformers_serve(nano, tmp_path):
    """`transformers serve` itself, which runs the checkpoint's own code."""
    folder = str(tmp_path / "exported")
    export(nano, tmp_path / "exported")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [str(Path(sys.executable).with_name("transformers")), "serve", folder]
    words = ["--trust-remote-code", "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen(
        [*program, *words, "--host", "127.0.0.1", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        with client_of(f"http://127.0.0.1:{port}") as client:
            for question in QUESTIONS:
                given: Any = {"model": folder, "messages": [{"role": "user", "content": question}]}
                given["max_tokens"] = 256  # its own default of 1,024 is all of the model's context
                expected = generate(nano, question, chat=True)[0].text
                answer = client.chat.completions.create(**given)
                assert answer.choices[0].message.content == expected
                pieces, _ = streamed(client.chat.completions.create(**given, stream=True))
                assert "".join(pieces) == expected
    finally:
        process.kill()
        process.wait()


def test_the_load_example(address, tmp_path):
    """Every mode is asked; a share of the clients leave, and none of the others is lost."""
    script = Path(__file__).parent.parent / "examples" / "serve_load.py"
    words = ["--url", f"{address}/v1", "--model", "nano", "--mode", "ntp", "--mode", "verified"]
    words += ["--concurrency", "2", "--requests", "6", "--repeats", "1", "--leave-every", "3"]
    words += ["--transformers", "--out", str(tmp_path / "load.json")]
    words += ["--server-pid", str(os.getpid())]
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, check=False,
        env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "per forward" in done.stdout
    lines = json.loads((tmp_path / "load.json").read_text())["results"]
    assert [(one["mode"], one["concurrency"]) for one in lines] == [("ntp", 2), ("verified", 2)]
    for line in lines:
        assert (line["requests"], line["left"], line["lost"]) == (6, 2, 0)
        assert line["tokens"] > 40
        assert line["after"]["rss_bytes"] > 1e6
        assert line["after_each_round"] == [line["after"]]
        assert line["first_text_s"][0] <= line["first_text_s"][1]
    assert lines[0]["throughput_ratio"] == 1
    assert lines[0]["tokens"] == lines[1]["tokens"], "verified says what ntp says"
    assert [line["same"] for line in lines] == [4, 4]


def test_the_load_example_with_questions_of_ones_own(address, tmp_path):
    script = Path(__file__).parent.parent / "examples" / "serve_load.py"
    rows = [{"problem": "What is 47 + 85?"}, {"problem": "What is 384 + 967?"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    way = json.dumps({"mode": "verified", "block_size": 4})
    words = ["--url", f"{address}/v1", "--data", str(tmp_path / "rows.jsonl"), "--field", "problem"]
    words += ["--url", f"{address.replace('127.0.0.1', 'localhost')}/v1"]  # another, to the example
    words += ["--max-tokens", "9", "--mode", "ntp", "--mode", way, "--concurrency", "1"]
    words += ["--repeats", "1", "--transformers", "--out", str(tmp_path / "load.json")]
    subprocess.run([sys.executable, str(script), *words], check=True, capture_output=True)
    lines = json.loads((tmp_path / "load.json").read_text())["results"]
    assert [line["mode"] for line in lines] == ["ntp", "ntp", way, way]
    assert [line["url"] for line in lines] == words[1:8:6] * 2
    for line in lines:
        assert (line["requests"], line["same"]) == (2, 2)
        assert 2 <= line["tokens"] <= 18


def test_the_load_example_with_a_common_beginning(address, tmp_path):
    script = Path(__file__).parent.parent / "examples" / "serve_load.py"
    (tmp_path / "before.txt").write_text("1 2 " * 100)
    words = ["--url", f"{address}/v1", "--before", str(tmp_path / "before.txt"), "--mode", "ntp"]
    words += ["--concurrency", "2", "--requests", "2", "--max-tokens", "2", "--repeats", "1"]
    words += ["--transformers", "--out", str(tmp_path / "load.json")]
    subprocess.run([sys.executable, str(script), *words], check=True, capture_output=True)
    [line] = json.loads((tmp_path / "load.json").read_text())["results"]
    assert (line["requests"], line["lost"]) == (2, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--before", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["--data", "nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
        (["--data", "rows.jsonl"], "rows.jsonl, row 1: question must be a text"),
        (["--mode", '{"mode": '], "--mode must be a mode or JSON, got"),
        (["--url", "a", "--url", "b", "--server-pid", "1"], "--server-pid is for one server, got"),
    ],
)
def test_what_the_load_example_can_not_ask(tmp_path, words, message):
    (tmp_path / "rows.jsonl").write_text('{"problem": "What is 47 + 85?"}')
    script = Path(__file__).parent.parent / "examples" / "serve_load.py"
    done = subprocess.run(
        [sys.executable, str(script), *words], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("quiet", [True, False])
def test_the_command_serves_until_it_is_told_to_stop(trained, quiet):
    """And tells of each request and answer, unless told not to; but not what they say."""
    words = ["--host", "127.0.0.1", "--port", "0", "--mode", "sbd", "--solver", "fixed:2"]
    words += ["--block-size", "4", "--dtype", "float32", "--device", "cpu", "--pack", "off"]
    words += ["--json", *(["--quiet"] if quiet else [])]
    program = [str(Path(sys.executable).with_name("setblock")), "serve", str(trained), *words]
    process = subprocess.Popen(
        program, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["solver"] == "fixed:2"
        with client_of(told["url"].removesuffix("/v1")) as client:
            answer: Any = client.completions.create(
                model=str(trained), prompt="hi secret", max_tokens=8,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
        expected = generate(
            load(trained), "hi secret", solver="fixed:2", block_size=4, max_new_tokens=8
        )[0]
        assert answer.setblock["token_ids"] == list(expected.token_ids)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "")
    found = [re.sub(r"^[-\d]+ [:,\d]+ ", "", line) for line in err.splitlines()]
    if quiet:
        assert found == []
        return
    answered, access = sorted(found, key=lambda line: "HTTP" in line)
    numbers = f"tokens {len(expected.token_ids)}, forwards {expected.nfe}, seconds "
    assert answered.startswith(f"INFO:     mode sbd: {numbers}")
    assert f"; prompt: tokens {expected.prompt_tokens}, cached 0, seconds " in answered
    assert re.fullmatch(r'INFO: +127.0.0.1:\d+ - "POST /v1/completions HTTP/1.1" 200 OK', access)


def test_a_compiled_model_is_warmed_up_before_it_answers(run, trained, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(Model, "compile", lambda model, how: told.append(f"compile {how}"))
    monkeypatch.setattr(serving, "warm_up", lambda model, options: told.append("warm up"))
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: told.append("serve"))
    shown = run("serve", trained, "--port", "0", "--compile", "kernels").out
    assert told == ["compile kernels", "warm up", "serve"]
    assert f"{trained} answers at http://127.0.0.1:" in shown
    told.clear()
    run("serve", trained, "--port", "0")
    assert told == ["serve"]


def test_a_block_size_given_to_the_server_wins_over_a_tuned_one(run, checkpoint, monkeypatch):
    """As it does on the command line of generate; a request's own wins over both."""
    tuned = {"trained": True, "mode": "verified", "verified": {"block_size": 8, "branches": 1}}
    folder, sizes = checkpoint("llama", settings=tuned), []

    def checks(model: Model, ids: Any, rows: int, options: Any) -> Any:
        sizes.append(settings_for(model, **options).block_size)
        return checked(model, ids, rows, options)

    def ask(server: Any, sockets: Any) -> None:
        with TestClient(server.config.app) as client:
            for own in ({}, {"block_size": 2}):
                body = {"prompt": "hi secret", "max_tokens": 4, **own}
                assert client.post("/v1/completions", json=body).status_code == 200

    monkeypatch.setattr("setblock.engine.checked", checks)
    monkeypatch.setattr("uvicorn.Server.run", ask)
    told = json.loads(run("serve", folder, "--port", "0", "--block-size", "4", "--json").out)
    assert (told["mode"], told["block_size"], sizes) == ("verified", 4, [4, 2])
    run("serve", folder, "--port", "0")
    assert sizes[2:] == [8, 2]


def test_how_much_of_earlier_prompts_is_kept(run, trained, monkeypatch):
    found = []

    def ask(server: Any, sockets: Any) -> None:
        with TestClient(server.config.app) as client:
            for _ in range(2):
                body = {"prompt": "hi secret", "max_tokens": 1, "mode": "ntp"}
                usage = client.post("/v1/completions", json=body).json()["usage"]
                found.append(usage["prompt_tokens_details"]["cached_tokens"])

    monkeypatch.setattr("uvicorn.Server.run", ask)
    for words in ((), ("--prompt-cache", "4"), ("--prompt-cache", "0")):
        run("serve", trained, "--port", "0", *words)
    assert found == [0, len("hi secret"), 0, 4, 0, 0]  # and BOS, but not the last one
    assert "greater than or equal to 0" in run("serve", trained, "--prompt-cache", "-1").error


def test_how_many_are_answered_at_a_time(run, trained, monkeypatch):
    found, step = [], Running.step

    def counted(batch: Running) -> Any:
        found[-1].append(len(batch.answers))
        return step(batch)

    def ask(server: Any, sockets: Any) -> None:
        body = {"prompt": "hi", "max_tokens": 40, "mode": "ntp", "ignore_eos": True}
        with TestClient(server.config.app) as client, ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(4)))
        assert {one.status_code for one in answers} == {200}

    monkeypatch.setattr(Running, "step", counted)
    monkeypatch.setattr("uvicorn.Server.run", ask)
    for words in ((), ("--batch-size", "2"), ("--batch-size", "1")):
        found.append([])
        run("serve", trained, "--port", "0", *words)
    assert max(found[0]) > 2
    assert [max(some) for some in found[1:]] == [2, 1]
    assert "greater than or equal to 1" in run("serve", trained, "--batch-size", "0").error


def test_blocks_slide_where_the_server_or_the_checkpoint_says_so(run, checkpoint, monkeypatch):
    """A request without a limit then goes on to the last token of the context."""
    folder = checkpoint("llama", settings={"trained": True, "slide": True, "solver": "fixed:2"})
    room = load(folder).context_length
    found = []

    def ask(server: Any, sockets: Any) -> None:
        with TestClient(server.config.app) as client:
            for own in ({}, {"slide": False}, {"slide": True}):
                body = {"prompt": "hi secret", "ignore_eos": True, **own}
                found.append(client.post("/v1/completions", json=body).json()["usage"])

    monkeypatch.setattr("uvicorn.Server.run", ask)
    for word, slides in (((), True), (("--slide",), True), (("--no-slide",), False)):
        told = run("serve", folder, "--port", "0", "--block-size", "7", "--json", *word).json
        assert told["slide"] is slides
    free = room - found[0]["prompt_tokens"]
    whole = free // 7 * 7
    assert whole < free
    assert [one["completion_tokens"] for one in found] == [
        *(free, whole, free), *(free, whole, free), *(whole, whole, free)
    ]  # fmt: skip


SLOW = """
import time
from setblock.model import Model
forward = Model.forward
def slow(*given, **more):
    time.sleep(0.2)
    return forward(*given, **more)
Model.forward = slow
from setblock.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_answers_under_way(number):
    """One is streamed, others wait for their turn; each would take minutes."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "serve", "nano", "--port", "0", "--device", "cpu", "--json"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"] + "/completions"
        body: Any = {"prompt": "2 + 2", "mode": "ntp", "ignore_eos": True, "max_tokens": 900}
        begun = threading.Event()

        def streamed_text() -> str:
            text = ""
            with httpx.stream("POST", url, json={**body, "stream": True}, timeout=30) as response:
                for piece in response.iter_text():
                    text += piece
                    begun.set()
            return text

        with ThreadPoolExecutor(2) as pool:
            streaming = pool.submit(streamed_text)
            assert begun.wait(60)
            waiting = pool.submit(httpx.post, url, json=body, timeout=30)
            time.sleep(0.5)
            process.send_signal(number)
            process.communicate(timeout=30)
            assert '"message": "the server is shutting down"' in streaming.result()
            answer = waiting.result()
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the server is shutting down"
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if number == signal.SIGINT else -number)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "was never trained for set block decoding"),
        (["--allow-untrained", "--solver", "best"], "solver must be one of"),
        (["--allow-untrained", "--mask-token-id", "99999"], "mask token 99999"),
        (
            ["--allow-untrained", "--mode", "verified", "--solver", "fixed:1"],
            "solver is for mode 'sbd', and for mode 'verified' with draft 'solver', got fixed:1",
        ),
        (["--host", ""], "--host must be an address, got ''; 0.0.0.0 is every network's"),
        (["--host", "no.such.host.example"], "can't listen on no.such.host.example:0"),
        (["--api-key", "secret"], "--api-key is for engine vllm"),
        (["--adaptive"], "--adaptive is for engine vllm"),
        (["--no-adaptive"], "--no-adaptive is for engine vllm"),
        (["--fused"], "--fused is for engine vllm"),
        (["--no-fused"], "--no-fused is for engine vllm"),
        (["--", "--tensor-parallel-size", "2"], "--tensor-parallel-size 2 is for engine vllm"),
        (["--engine", "vllm", "--device", "cpu"], "--device is for engine transformers"),
        (["--engine", "vllm", "--json"], "--json is for engine transformers"),
        (["--engine", "vllm", "--quiet"], "--quiet is for engine transformers"),
        (
            ["--engine", "vllm", "--prompt-cache", "0"],
            "--prompt-cache is for engine transformers",
        ),
        (
            ["--engine", "vllm", "--batch-size", "4"],
            "--batch-size is for engine transformers: -- --max-num-seqs 4 is vLLM's",
        ),
        (["--engine", "vllm", "--pack", "off"], "--pack is for engine transformers"),
        (["--engine", "vllm", "--compile", "graphs"], "--compile must be off, kernels or on"),
        (["--engine", "fast"], "Invalid value for '--engine'"),
    ],
)
def test_refused_before_it_listens(run, untrained, words, message):
    assert message in run("serve", untrained, "--port", "0", *words).error


def test_a_port_that_is_taken(run, trained):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = run("serve", trained, "--port", port).error
    assert error == f"can't listen on 127.0.0.1:{port}: Address already in use"


def test_a_port_that_is_taken_meanwhile(run, trained, monkeypatch):
    """Two that start at once may both bind."""
    taken: list[socket.socket] = []
    load_model = serving.load_model

    def late(*given: Any) -> Any:
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        taken.append(other)
        return load_model(*given)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(serving, "load_model", late)
    error = run("serve", trained, "--port", port).error
    taken[0].close()
    assert error == f"can't listen on 127.0.0.1:{port}: Address already in use"
