"""In front of vLLM's server: a field that would be ignored is refused, and a key guards every POST.

vLLM takes fields that it does not know without a word, and its own key guards only some paths.
"""

import json
import os
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from setblock.vllm.requests import OWN

KEY = "VLLM_API_KEY"  # of the environment, where `ps` does not show it

# Known to vLLM, and neither done nor refused by name where set block decoding is.
REFUSED = (
    "logprob_token_ids", "prompt_embeds", "repetition_detection", "suffix",
    "thinking_token_budget", "use_beam_search", "watermarking",
)  # fmt: skip
NEUTRAL = (None, False, 0, "", [], {})


class Fields:
    """The middleware, by vLLM's own `--middleware`."""

    def __init__(self, app: ASGIApp) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import (  # type: ignore
            BatchChatCompletionRequest,
            ChatCompletionRequest,
        )
        from vllm.entrypoints.openai.completion.protocol import (  # type: ignore
            CompletionRequest,
        )
        from vllm.entrypoints.serve.middleware.authenticate import (  # type: ignore
            AuthenticationMiddleware,
        )

        self.app = app
        self.known = {
            "/v1/chat/completions": frozenset(ChatCompletionRequest.model_fields),
            "/v1/chat/completions/batch": frozenset(BatchChatCompletionRequest.model_fields),
            "/v1/completions": frozenset(CompletionRequest.model_fields),
        }
        key = os.environ.get(KEY)
        self.guard: Any = AuthenticationMiddleware(app, [key]) if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if self.guard and not self.guard.verify_token(Headers(scope=scope)):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        known = self.known.get(scope["path"].removeprefix(scope.get("root_path", "")))
        if known is None:
            await self.app(scope, receive, send)
            return
        parts, message = [], {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
        body = b"".join(parts)
        if problem := problem_of(body, known):
            name, text = problem
            told = {"message": text, "type": "invalid_request_error", "param": name, "code": 400}
            await JSONResponse({"error": told}, 400)(scope, receive, send)
            return
        again = iter([{"type": "http.request", "body": body}])

        async def replay() -> Any:
            return next(again, None) or await receive()

        await self.app(scope, replay, send)


def problem_of(body: bytes, known: frozenset[str]) -> tuple[str | None, str] | None:
    """(its field, what is wrong); None where vLLM will say what is, or nothing is."""
    try:
        given = json.loads(body)
    except ValueError:  # not unicode, or no JSON
        return None
    except RecursionError:
        return None, "the body is nested too deeply"
    if not isinstance(given, dict):
        return None
    shown = {name: name.encode("ascii", "backslashreplace").decode() for name in given}
    for name, value in given.items():
        where = ": of set block decoding, put it into vllm_xargs" if name in OWN else ""
        if name not in known:
            return shown[name], f"{shown[name]} is not a field of this server{where}"
        if name in REFUSED and value not in NEUTRAL:
            return name, f"{name} is not supported by set block decoding"
        for index, tool in enumerate(value) if name == "tools" and isinstance(value, list) else ():
            function = tool.get("function") if isinstance(tool, dict) else None
            if isinstance(function, dict) and function.get("strict"):
                place = f"tools[{index}].function.strict"
                return place, f"{place} must be false: not all of vLLM's parsers follow it"
    own = given.get("vllm_xargs")
    for name, value in own.items() if isinstance(own, dict) else ():
        if name not in OWN:
            text = name.encode("ascii", "backslashreplace").decode()
            return "vllm_xargs", f"{text} is not one of {', '.join(OWN)}, the fields of vllm_xargs"
        if isinstance(value, bool):
            return "vllm_xargs", f"{name} of vllm_xargs must be a number or a text, got {value}"
    return None
