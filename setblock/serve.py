"""An OpenAI-compatible endpoint: transformers' own server, its answers decoded by this package.

Routes, messages, responses and server-sent events are those of `transformers serve`. Ours are
what it is told to do: which fields a request may have, and how the tokens are found.
"""

import asyncio
import json
import logging
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar

import transformers
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.server import build_server

from setblock.calls import Hearing, templated
from setblock.choices import Prompts, as_events, interleaved, prompts_of, together
from setblock.engine import MOST_ANSWERS, Engine, Failed, State, why
from setblock.fields import (
    MOST_CHOICES,
    NO_SUCH_MODEL,
    OPTIONS,
    TEXTS_OF_MESSAGE,
    TOO_LONG,
    Asked,
    Refused,
    as_json,
    biases_of,
    check,
    check_message,
    checked_tools,
    forced_tools,
    json_schema_of,
    shown,
    without_nulls,
)
from setblock.generation import settings_for
from setblock.grammar import compiled
from setblock.leaving import GONE, Events, Watched
from setblock.logprobs import Piece, Placed
from setblock.model import Model
from setblock.prompt_cache import MOST_TOKENS, PromptCache
from setblock.reading import tried
from setblock.served import Served
from setblock.settings import MOST_LOGPROBS

logger = logging.getLogger(__name__)

TEXT = {"type": "text"}  # the format of an answer, unless a request says another
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")


class Answers:
    """What both protocols share, in front of transformers' handler for each."""

    fields: ClassVar[dict[str, str]] = {}  # those of the one protocol
    model_manager: Any
    generation_state: Any

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        # A client names its requests itself, and may name two of them alike.
        own = f"{request_id}-{secrets.token_hex(8)}"
        try:
            if forms := _forms(body):  # others are served meanwhile
                await asyncio.to_thread(_read, self.model_manager.model, forms)
            return await super().handle_request(body, own)  # type: ignore[misc]
        except (Refused, HTTPException):
            raise
        except Exception as error:
            logger.exception("an answer failed")
            raise Refused(None, why(error), 500) from None

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        served: Served = self.model_manager
        if body.get("model") not in (None, served.name):
            named = f"must be {served.name!r}, got {shown(body['model'])}"
            raise Refused("model", named, 404, NO_SUCH_MODEL)
        if tools := body.get("tools"):
            forced = forced_tools(body.get("tool_choice", "auto"), tools)
            own = served.model, served.apply_chat_template, tools, forced, served.rendered
            return served.name, served, Hearing(*own)
        return served.name, served, served

    def _validate_request(self, body: dict[str, Any]) -> None:
        given = without_nulls(body)
        if "stream_options" in given:
            given["stream_options"] = without_nulls(given["stream_options"])
        body.clear()  # the handler's own
        body.update(given)
        check(body, self.fields)
        self.check(body)
        for name in ("max_tokens", "max_completion_tokens"):
            if body.get(name, 1) < 1:
                raise Refused(name, f"must be at least 1, got {body[name]}")
        for name, texts in self.texts(body).items():
            self.model_manager.check_length(name, sum(map(len, texts)))

    def check(self, body: dict[str, Any]) -> None:
        """Raises Refused for what this protocol has of its own."""

    def texts(self, body: dict[str, Any]) -> dict[str, list[str]]:
        """Those that the prompt is made of, by field."""
        raise NotImplementedError

    def logprobs(self, body: dict[str, Any]) -> int | None:
        """Of how many tokens in the place of each the log-probabilities are wanted; None: none."""
        raise NotImplementedError

    def told_of(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        """Log-probabilities in the form of this protocol."""
        raise NotImplementedError

    def _build_generation_config(self, body: dict[str, Any], *_: Any, **__: Any) -> Asked:
        options: Any = {name: body[name] for name in OPTIONS if name in body}
        if options.get("mode", self.model_manager.model.defaults["mode"]) != "ntp":
            options.setdefault("block_size", self.model_manager.block_size)
        if options.get("temperature"):
            options.setdefault("seed", secrets.randbits(53))  # exact in every JSON reader
        options["json_schema"] = json_schema_of(body.get("response_format", TEXT))
        options["logprobs"] = self.logprobs(body)
        options["min_new_tokens"] = body.get("min_tokens", 0)
        options["logit_bias"] = biases_of(body.get("logit_bias", {}))
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        told_ids, fields = body.get("return_token_ids", False), frozenset(body)
        usage = body.get("stream_options", {}).get("include_usage")
        count = body.get("n", 1)
        return Asked(options, limit, told_ids, fields, count, usage=usage, left=GONE.get())

    def _streaming(
        self, request_id: str, model: Any, processor: Any, model_id: str, inputs: Any,
        gen_config: Asked, *args: Any, **given: Any,
    ) -> StreamingResponse:  # fmt: skip
        answers = self._each(request_id, processor, inputs, gen_config)
        one, streams = super()._streaming, []  # type: ignore[misc]

        def leave() -> None:
            gen_config.left.set()
            for id, *_ in answers:
                self.generation_state.engine.done.pop(id, None)

        try:
            for id, hearer, ids, asked in answers:
                response = one(id, model, hearer, model_id, ids, asked, *args, **given)
                streams.append(response.body_iterator)
        except Exception:
            leave()  # those before it are of no use
            raise
        if len(answers) == 1:
            return Events(_then_done(streams[0]), leave)
        merged = interleaved(request_id, streams, gen_config.choices, gen_config.usage)
        return Events(_then_done(merged), leave)

    async def _non_streaming(
        self, request_id: str, model: Any, processor: Any, model_id: str, inputs: Any,
        gen_config: Asked, *args: Any, **given: Any,
    ) -> JSONResponse:  # fmt: skip
        tasks = [
            asyncio.ensure_future(
                self._one(id, model, hearer, model_id, ids, asked, *args, **given)
            )
            for id, hearer, ids, asked in self._each(request_id, processor, inputs, gen_config)
        ]
        try:
            bodies = await asyncio.gather(*tasks)
        except Exception:
            gen_config.left.set()  # the others are of no use
            for task in tasks:
                task.cancel()
            raise
        if len(bodies) > 1:
            return JSONResponse(together(request_id, bodies, gen_config.choices))
        return JSONResponse(bodies[0])

    def _each(
        self, request_id: str, processor: Any, inputs: Any, asked: Asked
    ) -> list[tuple[str, Any, Any, Asked]]:
        """(id, processor, inputs, what is asked) of each answer to a request.

        Raises: Refused for what is wrong with any of them.
        """
        prompts = inputs["input_ids"]
        prompts = prompts if isinstance(prompts, list) else [prompts]
        several = len(prompts) * asked.choices > 1
        usage = None if several else asked.usage  # of several it is put together
        found: list[tuple[str, Any, Any, Asked]] = []
        for number, ids in enumerate(prompts):
            place = f"[{number}]" if len(prompts) > 1 else ""
            own = replace(asked, settled=[], place=place, usage=usage)
            given = transformers.BatchEncoding({"input_ids": ids})
            self.generation_state.engine.settle(processor, given, own)
            for _ in range(asked.choices):
                row = len(found)
                id = f"{request_id}-{row}" if several else request_id
                hearer = processor.another() if row else processor
                found.append((id, hearer, given, replace(own, row=row)))
        return found

    async def _one(self, request_id: str, *args: Any, **given: Any) -> dict[str, Any]:
        """The body of a response with one answer."""
        response = await super()._non_streaming(request_id, *args, **given)  # type: ignore[misc]
        told = self.generation_state.engine.done.pop(request_id, None)
        del told["apart"]  # which is a stream's
        body = json.loads(response.body)
        if (logprobs := told.pop("logprobs", None)) is not None:
            body["choices"][0]["logprobs"] = self.told_of(logprobs)
        return _telling(body, told)

    def _build_chunk_sse(self, request_id: str = "", *args: Any, **given: Any) -> str:
        if isinstance(piece := given.get("content", given.get("text")), Failed):
            return as_events([_body(piece.refused or piece)])
        line = super()._build_chunk_sse(request_id, *args, **given)  # type: ignore[misc]
        chunk = json.loads(line.removeprefix("data: "))
        chunk["choices"][0].setdefault("finish_reason", None)
        if isinstance(piece, Piece):
            chunk["choices"][0]["logprobs"] = self.told_of(piece.tokens)
        told = self.generation_state.engine.done.get(request_id)
        if given.get("usage") is None or told is None:
            return as_events([chunk])
        del self.generation_state.engine.done[request_id]
        apart = told.pop("apart")
        chunk = _telling(chunk, told)
        if apart is None:
            return as_events([chunk])
        usage = {"choices": [], "usage": chunk.pop("usage")}
        own = {name: one for name, one in chunk.items() if name != "setblock"}
        return as_events([chunk, own | usage] if apart else [chunk])


class Chat(Answers, ChatCompletionHandler):
    """/v1/chat/completions."""

    fields: ClassVar = {
        "messages": "a list of messages",
        "tools": "a list of tools",
        "tool_choice": "a text or an object",
        "logprobs": "true or false",
        "top_logprobs": "an integer",
        "chat_template_kwargs": "an object",
    }

    @staticmethod
    def get_processor_inputs_from_messages(
        messages: list[dict[str, Any]], modality: Any
    ) -> list[dict[str, Any]]:
        return [templated(message) for message in messages]

    def check(self, body: dict[str, Any]) -> None:
        messages, context = body.get("messages"), self.model_manager.model.context_length
        if not messages:
            raise Refused("messages", "must be a list of messages, at least one")
        if len(messages) > context:
            raise Refused(
                "messages",
                f"must be at most {context}, the tokens of the context, got {len(messages)}",
                code=TOO_LONG,
            )
        body["messages"] = messages = [without_nulls(message) for message in messages]
        for message in messages:
            if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
                message["content"] = [without_nulls(part) for part in parts]
        for index, message in enumerate(messages):
            check_message(f"messages[{index}]", message)
        if messages[-1].get("tool_calls"):
            raise Refused(
                f"messages[{len(messages) - 1}].tool_calls",
                "must be followed by messages of role tool, with what the tools gave",
            )
        choice = body.get("tool_choice", "auto")
        tools = checked_tools(body.pop("tools", []), strict=choice not in ("none", "auto"))
        forced = forced_tools(choice, tools)
        if forced and body.get("mode") == "sbd":
            allowed = "must be auto or none in mode sbd, in which no answer has a form"
            raise Refused("tool_choice", f"{allowed}, got {shown(choice)}")
        if forced and messages[-1]["role"] == "assistant":
            why = "must be auto or none where a message of the assistant is gone on with, got"
            raise Refused("tool_choice", f"{why} {shown(choice)}")
        if tools and choice != "none":
            body["tools"] = tools
        if "tools" in body:
            for name in {"response_format", "regex", "grammar", "logprobs"} & body.keys():
                if body[name] not in (TEXT, False):
                    raise Refused(name, "can't be used with tools, which an answer may call")
        if "tools" in body and not forced and body.get("parallel_tool_calls") is False:
            why = "must be true with tools, unless one has to be called, got False"
            raise Refused("parallel_tool_calls", why)
        for name in body.get("chat_template_kwargs", {}):
            if name in self.model_manager.reserved:
                raise Refused(
                    "chat_template_kwargs",
                    f"may not hold {name}: only variables of the chat template are allowed",
                )
        if not 0 <= (count := body.get("top_logprobs", 0)) <= MOST_LOGPROBS:
            raise Refused("top_logprobs", f"must be in 0..{MOST_LOGPROBS}, got {count}")
        if count and not body.get("logprobs"):
            raise Refused("top_logprobs", f"is for logprobs true, got {count} without it")
        limits = {body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
        if len(limits) > 1:
            raise Refused(
                "max_completion_tokens",
                f"must be max_tokens={body['max_tokens']} where both are given, "
                f"got {body['max_completion_tokens']}",
            )
        if self.model_manager.model.tokenizer.chat_template is None:
            raise Refused(
                "messages", "need a chat template, and the model has none: /v1/completions"
            )

    def texts(self, body: dict[str, Any]) -> dict[str, list[str]]:
        found = []
        for message in body["messages"]:
            content = message.get("content", "")
            parts = [content] if isinstance(content, str) else [part["text"] for part in content]
            found += [message["role"], " ".join(parts), as_json(message.get("tool_calls", ""))]
            found += [message[name] for name in TEXTS_OF_MESSAGE & message.keys()]
        return {
            "messages": found,
            "tools": [as_json(body.get("tools", ""))],
            "chat_template_kwargs": [as_json(body.get("chat_template_kwargs"))],
        }

    def logprobs(self, body: dict[str, Any]) -> int | None:
        return body.get("top_logprobs", 0) if body.get("logprobs") else None

    def told_of(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        return self.model_manager.told.of_chat(tokens)


class Completions(Answers, CompletionHandler):
    """/v1/completions."""

    fields: ClassVar = {"prompt": "a text or a list", "logprobs": "an integer"}

    def check(self, body: dict[str, Any]) -> None:
        if "prompt" not in body:
            raise Refused("prompt", "must be a text or a list of them, and is missing")
        prompts = prompts_of(body["prompt"], self.model_manager.model.vocab_size)
        body["prompt"] = prompts
        count = len(prompts.each) if isinstance(prompts, Prompts) else 1
        if count * (choices := body.get("n", 1)) > MOST_CHOICES:
            most = MOST_CHOICES // count
            raise Refused("n", f"must be in 1..{most} with {count} prompts, got {choices}")
        if "max_completion_tokens" in body:
            raise Refused("max_completion_tokens", "is not supported, only max_tokens")

    def texts(self, body: dict[str, Any]) -> dict[str, list[str]]:
        if not isinstance(prompt := body["prompt"], Prompts):
            return {"prompt": [prompt]}
        return {place: [one] for place, one in prompt.named() if isinstance(one, str)}

    def logprobs(self, body: dict[str, Any]) -> int | None:
        return body.get("logprobs")

    def told_of(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        return self.model_manager.told.of_completion(tokens)


def build(
    model: Model,
    name: str,
    block_size: int | None = None,
    prompt_cache: int = MOST_TOKENS,
    most: int = MOST_ANSWERS,
) -> FastAPI:
    """The ASGI application that serves the model under this name.

    block_size: of a request that names none, as if it did: what `tune` wrote into the checkpoint,
    and arithmetic, give way to it, as they do not to the model's defaults.
    prompt_cache: tokens of prompts and answers whose keys and values are kept for later requests
    that begin alike.
    most: answers under way at a time.
    """
    transformers.logging.set_verbosity_error()
    engine = Engine(model, PromptCache(prompt_cache) if prompt_cache else None, most)
    served, state = Served(model, name, block_size), State(engine)
    handlers: dict[str, Any] = {name: None for name in signature(build_server).parameters}
    del handlers["enable_cors"]
    handlers |= {
        "model_manager": served,
        "generation_state": state,
        "chat_handler": Chat(served, state),  # type: ignore[arg-type]
        "completion_handler": Completions(served, state),  # type: ignore[arg-type]
    }
    app = build_server(**handlers)
    app.add_middleware(Watched)
    app.router.lifespan_context = lambda _: _ended_by_signals(engine)
    # What is left needs handlers that this server has not, or unloads the model.
    app.router.routes = [one for one in app.routes if getattr(one, "path", "") in PATHS]

    @app.get("/v1/models/{name:path}")
    def one_model(name: str) -> JSONResponse:
        if name != served.name:
            named = f"must be {served.name!r}, got {shown(name)}"
            raise Refused("model", named, 404, NO_SUCH_MODEL)
        return JSONResponse(served.list_models()[0])

    for kind in (Refused, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _error)
    return app


@asynccontextmanager
async def _ended_by_signals(engine: Engine) -> AsyncIterator[None]:
    """Meanwhile a signal that ends the server ends its answers, for which uvicorn would wait."""
    here = threading.current_thread() is threading.main_thread()  # signals are no other thread's
    numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
    before = {one: old for one in numbers if callable(old := signal.getsignal(one))}

    def end(number: int, frame: Any) -> None:
        engine.ending.set()
        before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _forms(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(field, option of an answer) of each form that a request has, as far as it is one."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("regex", "grammar"):
        if isinstance(body.get(name), str):
            found.append((name, {name: body[name]}))
    if isinstance(asked := body.get("response_format"), dict):
        with suppress(Refused):
            found.append(("response_format", {"json_schema": json_schema_of(asked)}))
    if body.get("tool_choice") not in (None, "none", "auto") and isinstance(
        body.get("tools"), list
    ):
        functions = [one.get("function") for one in body["tools"] if isinstance(one, dict)]
        schemas = [one.get("parameters") for one in functions if isinstance(one, dict)]
        found += [("tools", {"json_schema": one}) for one in schemas if isinstance(one, dict)]
    return found


def _read(model: Model, forms: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Read these, so that it takes no time when they are asked for. What else is wrong with them is
    said then.

    Raises: Refused for one that takes too long.
    """
    for field, option in forms:
        try:
            settings = settings_for(model, mode="ntp", **option)
        except (ValueError, TypeError, RecursionError):
            continue
        for name in option:
            if (form := getattr(settings, name)) is None:
                continue
            try:
                tried(name, form)
            except ValueError as error:
                raise Refused(field, str(error).partition(" ")[2]) from None
            with suppress(ValueError, ImportError):
                compiled(model, settings)


def _error(request: Request, error: Exception) -> JSONResponse:
    """An error in the protocol's own form."""
    told: Any = error
    status = error.status if isinstance(error, Refused) else 400
    if isinstance(error, RequestValidationError):
        told = f"the body is not a JSON object: {error.errors()[0]['msg']}"
        sent = request.headers.get("content-type", "")
        if sent.partition(";")[0].strip().lower() != "application/json":
            told = f"Content-Type must be application/json for a body of JSON, got {sent!r}"
    if isinstance(error, HTTPException):
        status, told = error.status_code, error.detail
    return JSONResponse(_body(told, status), status)


def _telling(body: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the last chunk of its stream, with what the engine tells of it."""
    cached = {"prompt_tokens_details": {"cached_tokens": told.pop("cached_tokens")}}
    return {**body, "usage": {**body["usage"], **cached}, "setblock": told}


def _body(told: Any, status: int = 500) -> dict[str, Any]:
    """told: a Refused, whose own status counts, or a message."""
    refused = isinstance(told, Refused)
    kind = (
        "server_error" if (told.status if refused else status) >= 500 else "invalid_request_error"
    )
    field, code = (told.field, told.code) if refused else (None, None)
    return {"error": {"message": str(told), "type": kind, "param": field, "code": code}}


async def _then_done(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for event in events:
        yield event
        if 'data: {"error"' in event:  # never a text's, whose quotes are escaped
            break
    yield "data: [DONE]\n\n"
