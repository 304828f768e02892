"""Every command and every Python snippet that README and docs show runs."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Run by other means: make targets by CI and users; the training recipe takes hours.
NOT_HERE = ("make ", "examples/train_demo.py", "examples/nano_table.py")


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, block) of every fenced block of that language."""
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
    ]


COMMANDS = [
    pytest.param(line, id=f"{page}: {line}")
    for page, block in blocks("console")
    for line in block.splitlines()
    if line.strip() and not any(word in line for word in NOT_HERE)
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the commands read, so that what they write lands beside it."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", folder / "examples")
    some = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")[:1000]  # for a perplexity
    (folder / "CONTRIBUTING.md").write_text(some, encoding="utf-8")
    return folder


def run(words: list[str], folder: Path) -> str:
    done = forked.run(words, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line: str, checkout: Path) -> None:
    assert run(shlex.split(line), checkout)


@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_snippet_runs(page: str, block: str, checkout: Path) -> None:
    assert run(["python", "-c", block], checkout)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5
    assert blocks("python")


def anchors(page: Path) -> set[str]:
    """What a page's headings are linked by."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    names = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", name.lower()).strip().replace(" ", "-") for name in names}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" in target:
                continue
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name} links to {target}"
            if anchor and place.suffix == ".md":
                assert anchor in anchors(place), f"{page.name} links to {target}#{anchor}"


def test_the_table_of_lossless_decoding_is_the_records() -> None:
    table = (ROOT / "benchmarks" / "records" / "nano-lossless.md").read_text().strip()
    assert table in (ROOT / "docs" / "lossless.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "records" / "nano-lossless.json").read_text())
    exact = [one for one in record["results"] if one["mode"] == "verified"]
    exact = [one for one in exact if one["dtype"] == "float32"]
    assert len(exact) == 6 * 5
    assert all((one["n"], one["identical_share"]) == (1000, 1) for one in exact)


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "benchmarks" / "records" / "smollm2-bundled.json",
        *sorted((ROOT / "benchmarks" / "records").glob("smollm2-verified*.json")),
    ],
)
def test_verified_smollm2_says_what_its_frozen_base_says(path: Path) -> None:
    """A gated adapter in float32: the ids of next-token decoding, in every answer."""
    record = json.loads(path.read_text(encoding="utf-8"))
    [comparison] = record["comparisons"]
    exact, verified = record["results"]
    assert (exact["mode"], verified["mode"]) == ("ntp", "verified")
    assert {exact["dtype"], verified["dtype"]} == {"float32"}
    assert comparison["identical_share"] == 1
    assert verified["tokens_per_forward"] > 1


def test_the_table_of_branches_and_seeds_is_the_records() -> None:
    page = (ROOT / "docs" / "smollm2.md").read_text()
    for branches, seeds in ((1, 0), (6, 0), (6, 1), (6, 4)):
        path = ROOT / "benchmarks" / "records" / f"smollm2-verified-{branches}-{seeds}.json"
        verified = json.loads(path.read_text())["results"][1]
        settings = verified["settings"]
        found = (settings["block_size"], settings["branches"], settings["seeds"], verified["n"])
        assert found == (6, branches, seeds, 20)
        name = "6 (all)" if branches == 6 else "1"
        queries = 6 * (1 + branches * (1 + seeds))
        rate = f"{verified['tokens_per_forward']:.2f}"
        assert f"| {name} | {seeds} | {queries} | {rate} |" in page


def test_the_card_quotes_the_record() -> None:
    summary = (ROOT / "benchmarks" / "records" / "nano-summary.md").read_text().strip()
    assert summary in (ROOT / "setblock" / "demo" / "CARD.md").read_text()


def test_the_summary_follows_from_the_records() -> None:
    spec = importlib.util.spec_from_file_location("nano_table", ROOT / "examples" / "nano_table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = table  # its dataclass looks there
    spec.loader.exec_module(table)
    folder = ROOT / "benchmarks" / "records"
    records = {
        name: json.loads((folder / f"nano-{name}.json").read_text())
        for name in ("validation", "test", "held-out", "latency")
    }
    picked = table.pick_setting(records["validation"]["results"]) or table.DEFAULT
    held_out, clock = records["held-out"]["results"], records["latency"]
    assert "later" not in clock, "its ratios are of one commit"
    text = table.summary(records["test"], held_out, clock, picked)
    assert text == (folder / "nano-summary.md").read_text()
