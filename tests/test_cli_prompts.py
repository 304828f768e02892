"""generate: prompts from every source."""

import io
import json

from conftest import SHORT, api
from fakes import TableModel

from setblock.model import Model


def test_a_prompt_is_the_same_from_every_source(run, trained, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n")
    answers = [
        run("generate", trained, "Grüße\n", "--json", *SHORT),
        run("generate", trained, "--prompt", "Grüße\n", "--json", *SHORT),
        run("generate", trained, "--prompt-file", file, "--json", *SHORT),
        run("generate", trained, "--json", *SHORT, stdin=io.StringIO("Grüße\n")),
    ]
    first, *others = [answer.json["token_ids"] for answer in answers]
    assert others == [first, first, first]
    assert tuple(first) == api(trained, "Grüße\n", max_new_tokens=8).token_ids


def test_prompt_ids_are_used_as_they_are(run, trained):
    """No BOS, no template."""
    answer = run("generate", trained, "--prompt-ids", "72, 105,72", "--json", *SHORT).json
    assert answer["prompt_tokens"] == 3
    assert tuple(answer["token_ids"]) == api(trained, [72, 105, 72], max_new_tokens=8).token_ids
    text = run("generate", trained, "--prompt", "abc", "--json", *SHORT).json
    assert text["prompt_tokens"] == 4


def test_chat_uses_the_template(run, trained):
    answer = run("generate", trained, "--prompt", "abc", "--chat", "--json", *SHORT).json
    assert answer["prompt_tokens"] == len("abc") + 3  # <user>, </s>, <model>
    assert tuple(answer["token_ids"]) == api(trained, "abc", True, max_new_tokens=8).token_ids


def test_messages_go_through_the_template(run, trained, tmp_path):
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Grüße"},
    ]
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(talk, ensure_ascii=False), encoding="utf-8")
    answer = run("generate", trained, "--messages", file, "--json", *SHORT).json
    assert tuple(answer["token_ids"]) == api(trained, talk, max_new_tokens=8).token_ids
    request = io.StringIO(json.dumps({"model": "m", "messages": talk}))
    again = run("generate", trained, "--messages", "-", "--json", *SHORT, stdin=request).json
    assert again["token_ids"] == answer["token_ids"]
    for content, error in (
        ('[{"role":', "is not one JSON list: "),
        ('{"role": "user", "content": "a"}', "must hold one JSON list of messages"),
        ("[]", "must hold one JSON list of messages"),
        ('[{"role": "user"}]', "message 0 must have a role and a content"),
    ):
        file.write_text(content)
        assert error in run("generate", trained, "--messages", file).error
    file.write_text(json.dumps(talk))
    given = run("generate", trained, "--messages", file, "--chat").error
    assert given == f"--chat is for texts: --messages {file} goes through the template"
    both = run("generate", trained, "abc", "--messages", file).error
    assert both == "give one prompt: PROMPT and --messages exclude each other"


def test_an_empty_prompt_is_the_bos_token(run, trained, tmp_path):
    assert run("generate", trained, "--prompt", "", "--json", *SHORT).json["prompt_tokens"] == 1
    for nothing in ("", "\n"):
        result = run("generate", trained, stdin=io.StringIO(nothing))
        assert result.error == (
            f"no prompt for MODEL {trained}: stdin is empty (--prompt '' is an empty prompt)"
        )
        (tmp_path / "p.txt").write_text(nothing)
        result = run("generate", trained, "--prompt-file", tmp_path / "p.txt")
        assert (
            result.error == f"no prompt: {tmp_path}/p.txt is empty (--prompt '' is an empty prompt)"
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_empty_answer_of_a_chat_model_says_what_to_try(run, trained, monkeypatch):
    """It ends at once where it was asked for more text, not for an answer."""
    monkeypatch.setattr(Model, "decode", lambda model, ids: "")
    hint = f"the answer is empty: {trained} knows chat turns, and --chat makes the prompt one"
    assert hint in run("generate", trained, "hi", *SHORT).err
    assert "the answer is empty" not in run("generate", trained, "--prompt-ids", "5", *SHORT).err
    assert "the answer is empty" not in run("generate", trained, "hi", "--chat", *SHORT).err


def test_a_turn_that_ends_at_once_is_told(run, answering):
    answering(TableModel.spelling("", start=2))
    words = ("generate", "any", "--prompt", "h", "--chat")
    assert "the answer is empty: table ended its turn at once" in run(*words).err
    assert "is empty" not in run(*words, "--json").err


def test_a_terminal_is_no_prompt(run, trained):
    result = run("generate", trained, stdin=Terminal("never read"))
    assert result.error == (
        f"no prompt for MODEL {trained}: give PROMPT, --prompt-file, --messages, --prompt-ids or "
        "stdin"
    )


def test_a_line_break_at_the_end_is_no_part_of_the_prompt(run, trained, tmp_path):
    wanted = run("generate", trained, "--prompt", "hi\n there", "--json", *SHORT).json["token_ids"]
    for end in ("", "\n", "\r\n"):
        file = tmp_path / "prompt.txt"
        file.write_bytes(f"hi\n there{end}".encode())
        words = ["--prompt-file", file, "--json", *SHORT]
        assert run("generate", trained, *words).json["token_ids"] == wanted
        typed = io.StringIO(f"hi\n there{end}", newline="")
        assert run("generate", trained, "--json", *SHORT, stdin=typed).json["token_ids"] == wanted
    file.write_bytes(b"\xff")
    assert f"--prompt-file {file} is not UTF-8" in run("generate", trained, *words).error
