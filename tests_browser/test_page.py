"""The report's page in a real headless Chromium: press play, read the counters.

Run by `make test-browser`, which installs the browser where it is missing.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

HOSTILE = "</script> <!-- <script> <!--DATA--> <!--PLOTS--> <b>bold</b>"
SETBLOCK = [sys.executable, "-m", "setblock"]
expect.set_options(timeout=60_000)  # a busy machine is no fault of the page


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the bundled model answers to two prompts, the report's page beside it."""
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    prompts = ["--prompt", "What is 384 + 967?", "--prompt", "Who are you?"]
    words = [*SETBLOCK, "demo", *prompts, "--json"]
    file.write_bytes(subprocess.run(words, check=True, capture_output=True).stdout)
    record = json.loads(file.read_text())
    hostile = [{**one, "prompt": HOSTILE} for one in record["answers"][:1]]
    file.write_text(json.dumps(record | {"answers": record["answers"] + hostile}))
    words = [*SETBLOCK, "report", str(file), "--out", str(file.parent)]
    subprocess.run(words, check=True, capture_output=True)
    return file


@pytest.fixture
def page(demo: Path) -> Iterator[Page]:
    """The page of that report; whatever it asks of a network fails the test."""
    browser_file = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser_file, "no chromium: run make test-browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_file, args=["--no-sandbox"])
        opened = browser.new_page()
        asked: list[str] = []
        wrong: list[str] = []
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.goto((demo.parent / "index.html").as_uri())
        yield opened
        browser.close()
    assert not wrong
    assert all(url.startswith(("file:", "data:")) for url in asked)


def answers_of(demo: Path, prompt: str) -> dict[str, Any]:
    return {
        answer["mode"]: answer
        for answer in json.loads(demo.read_text(encoding="utf-8"))["answers"]
        if answer["prompt"] == prompt
    }


def counter(page: Page, mode: str) -> str:
    return page.locator(f"[data-mode={mode}] .counter").inner_text()


def text(forwards: int, tokens: int, of: int) -> str:
    rate = tokens / forwards if forwards else 0
    return f"{forwards} forwards, {tokens} of {of} tokens, {rate:.2f} tokens per forward"


def test_play_runs_to_the_end(page: Page, demo: Path) -> None:
    answers = answers_of(demo, "What is 384 + 967?")
    for mode, answer in answers.items():
        assert counter(page, mode) == text(0, 0, answer["num_tokens"])
    page.select_option("#speed", "400")
    page.click("#play")
    expect(page.locator("#play")).to_have_text("pause")
    page.select_option("#speed", "30")
    expect(page.locator("#play")).to_have_text("play")
    for mode, answer in answers.items():
        count = answer["num_tokens"]
        assert counter(page, mode) == text(answer["nfe"], count, count)
        shown = page.locator(f"[data-mode={mode}] .text").inner_text()
        assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", "".join(answer["tokens"]))
        assert page.locator(f"[data-mode={mode}] .hidden").count() == 0
    assert answers["sbd"]["nfe"] < answers["ntp"]["nfe"]


def test_the_slider_shows_a_forward(page: Page, demo: Path) -> None:
    answers = answers_of(demo, "What is 384 + 967?")
    page.locator("#step").fill("2")
    for mode, answer in answers.items():
        steps = answer["reveal_step"]
        seen = sum(step <= 2 for step in steps)
        assert counter(page, mode) == text(2, seen, len(steps))
        spans = page.locator(f"[data-mode={mode}] .text span")
        new = [place for place, step in enumerate(steps) if step == 2]
        assert [i for i in range(len(steps)) if spans.nth(i).get_attribute("class") == "new"] == new
        title = f"forward {steps[0]}, entropy {answer['entropy'][0]:.3f} nats"
        assert spans.first.get_attribute("title") == title


def test_text_is_text(page: Page, demo: Path) -> None:
    """A prompt made of markup stands in the list as it is and breaks nothing."""
    page.select_option("#prompt", label=HOSTILE)
    answer = answers_of(demo, HOSTILE)["ntp"]
    assert counter(page, "ntp") == text(0, 0, answer["num_tokens"])
    assert page.locator("b").count() == 0


def test_pause_and_another_prompt(page: Page, demo: Path) -> None:
    page.select_option("#speed", "400")
    page.click("#play")
    expect(page.locator("[data-mode=ntp] .counter")).to_have_text(re.compile("^[1-9]"))
    page.click("#play")
    held = counter(page, "ntp")
    page.wait_for_timeout(900)
    assert counter(page, "ntp") == held
    page.select_option("#prompt", label="Who are you?")
    answer = answers_of(demo, "Who are you?")["sbd"]
    assert counter(page, "sbd") == text(0, 0, answer["num_tokens"])
