"""How llguidance reads a form of answers; first in a process that can be ended, where one may come
from anybody: it takes some hours, and as much memory.

Run as a script, this is that process: so it imports nothing of the package.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# White space in JSON, where a schema's "x-guidance" says no other: of any length, small models
# would write nothing else.
SPACE = r" |\n[ \t]{0,40}"
# Ten times llguidance's own: an object of 500 properties that may be left out needs more than that.
LIMITS: dict[str, Any] = {"max_items_in_row": 20_000, "step_max_items": 500_000}
# llguidance panics at some of these, beside other rules, and ignores others.
ATTRIBUTES = re.compile(r"(?m)^\s*[?!]*(\w+)\s*(\[[^\]\n]*\])\s*:")
# It goes from one part of a form to the next by recursion, and where the stack ends so does the
# process: the longest form that is taken, in characters, and bytes of stack that it can't fill.
LONGEST_FORM, STACK = 250_000, 2**28
SECONDS = 5  # that a form of anybody's may take
MEMORY = 2**32  # bytes that it may take
_starting = threading.Lock()


def tried(name: str, form: str, seconds: float | int = SECONDS) -> None:
    """Have another process read the form of an option, unless it was read before.

    Raises: ValueError where that takes too long, or ends the process.
    """
    if len(form) <= LONGEST_FORM:  # else it is refused unread
        _tried(name, form, seconds)


@lru_cache(maxsize=256)
def _tried(name: str, form: str, seconds: float | int) -> None:
    told = json.dumps([name, form])
    try:
        done = subprocess.run(
            [sys.executable, __file__], input=told.encode(), timeout=seconds, capture_output=True
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{name} can't be used: to read it takes more than {seconds} s") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = f"the process that read it ended with status {done.returncode}"
        raise ValueError(f"{name} can't be used: {': '.join([why, *last])}")


def written(name: str, form: str) -> str:
    """The form of an option as llguidance's grammar.

    Raises: ValueError; RecursionError.
    """
    from llguidance import LLMatcher

    if name == "json_schema":
        return LLMatcher.grammar_from_json_schema(spaced(json.loads(form)))
    if name == "regex":
        return LLMatcher.grammar_from_regex(form)
    if found := ATTRIBUTES.search(form):
        raise ValueError(f"attributes of rules are not supported, got {found[1]}{found[2]}")
    return LLMatcher.grammar_from_lark(form)


def spaced(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a bound on white space, unless it has its own.

    Raises: ValueError for an x-guidance that is no object.
    """
    if not isinstance(guidance := schema.get("x-guidance", {}), dict):
        raise ValueError(f"x-guidance must be an object, got {guidance!r}")
    if any(key.startswith("whitespace") for key in guidance):
        return schema
    return {**schema, "x-guidance": {**guidance, "whitespace_pattern": SPACE}}


def limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, **LIMITS)


def with_room(make: Callable[[], Any]) -> Any:
    """What this makes, on a thread with more room for recursion, which no interrupt waits for."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(make())
        except BaseException as error:  # a panic in a library of Rust is no Exception
            failed.append(error)

    with _starting:
        before = threading.stack_size(STACK)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    while thread.is_alive():
        thread.join(0.1)  # a signal that comes just before a wait without end does not end it
    if failed:
        raise failed[0]
    return found[0]


def main() -> None:
    """Read a form, as JSON of its option and text; what is wrong with it is for others to say."""
    try:
        from llguidance import LLMatcher, LLTokenizer
    except ImportError:
        return
    try:
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    name, form = json.load(sys.stdin)
    try:
        grammar = written(name, form)
    except (ValueError, RecursionError):
        return
    tokens = LLTokenizer("byte")  # hardly any: the form alone shall take time
    with_room(lambda: LLMatcher(tokens, grammar, log_level=0, limits=limits()).compute_bitmask())


if __name__ == "__main__":
    main()
