"""An OpenAI-compatible endpoint: transformers' own server, its answers decoded by this package.

Routes, messages, responses and server-sent events are those of `transformers serve`. Ours are
what it is told to do: which fields a request may have, and how the tokens are found.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState, Modality

from setblock.generation import Generation, Options, Reveal, settings_for, stream
from setblock.model import Model

logger = logging.getLogger(__name__)

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
# Fields of a request that are options of `setblock.generate` as they are, and their values.
OPTIONS = {
    **dict.fromkeys(("temperature", "top_p", "fallback"), "a number"),
    **dict.fromkeys(("top_k", "seed", "block_size", "branches", "seeds"), "an integer"),
    **dict.fromkeys(("mode", "solver", "draft"), "a text"),
    **dict.fromkeys(("next_token_seed", "ignore_eos"), "true or false"),
    "stop": "a text or a list of texts",
}
# Other fields of both protocols that are taken.
TAKEN = {
    "model": "a text",
    "stream": "true or false",
    "stream_options": "an object",
    "return_token_ids": "true or false",
    "max_tokens": "an integer",
    "max_completion_tokens": "an integer",
}
KINDS: dict[str, tuple[type, ...]] = {
    "a number": (int, float),
    "an integer": (int,),
    "a text": (str,),
    "true or false": (bool,),
    "a text or a list of texts": (str, list),
    "an object": (dict,),
    "a list of messages": (list,),
}
# Fields that are taken with a value that asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logprobs": (False,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "tools": ([],),
    "tool_choice": ("none",), "response_format": ({"type": "text"},), "store": (False,),
}  # fmt: skip


# What a handler passes to a chat template besides the request's chat_template_kwargs.
FROM_HANDLER = (
    "conversation", "tools", "return_tensors", "return_dict", "tokenize", "add_generation_prompt",
    "load_audio_from_video",
)  # fmt: skip


class Refused(Exception):
    """A request that can't be answered: why, the field if it is one, and the HTTP status."""

    def __init__(self, field: str | None, why: str, status: int = 400) -> None:
        super().__init__(f"{field} {why}" if field else why)
        self.field, self.status = field, status


@dataclass
class Asked:
    """What one request asks for. The handlers read max_new_tokens once an answer is there: an
    answer as long as that ended for its length."""

    options: Options
    limit: int | None
    return_token_ids: bool
    max_new_tokens: int | None = None


class Served:
    """The model towards transformers' handlers: their model, processor and model manager in one."""

    force_model = None

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name, self.created = model, name, int(time.time())
        self.device = model.device
        self.generation_config = None
        # No architecture of transformers': its text is not parsed for thoughts and tool calls.
        self.config = SimpleNamespace(model_type="setblock")
        longest = max(map(len, model.tokenizer.get_vocab()), default=1)
        self.most_characters = longest * model.context_length

    def get_gen_models(self) -> list[dict[str, Any]]:
        """What /v1/models lists."""
        return [
            {
                "id": self.name,
                "object": "model",
                "created": self.created,
                "owned_by": "setblock",
                "max_model_len": self.model.context_length,
            }
        ]

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        return Modality.LLM

    def shutdown(self) -> None:
        """Nothing is unloaded."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], **given: Any
    ) -> transformers.BatchEncoding:
        """The ids of a conversation and the model's cue, as the handlers take them."""
        own = {name: value for name, value in given.items() if name not in FROM_HANDLER}
        try:
            text = self.model.tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False, **own
            )
        except TemplateError as error:
            raise Refused("messages", f"do not fit the chat template: {error}") from None
        return self._encoded(self.model.tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def __call__(self, text: str, **_: Any) -> transformers.BatchEncoding:
        """The ids of a plain prompt."""
        try:
            return self._encoded(self.model.encode(text))
        except ValueError as error:
            raise Refused("prompt", f"is refused: {error}") from None

    def _encoded(self, ids: Any) -> transformers.BatchEncoding:
        return transformers.BatchEncoding({"input_ids": torch.tensor([list(ids)])})


class Failed(str):
    """In the place of a piece of text: the error that ended an answer on its way."""


class Stream:
    """One answer on its way: what the handlers ask of a streamer."""

    def __init__(self, engine: "Engine", request_id: str) -> None:
        self.engine, self.request_id = engine, request_id
        self.total_tokens = 0
        self.left = threading.Event()

    def cancel(self) -> None:
        """The client is gone: the answer ends with the forward that runs."""
        self.left.set()
        self.engine.done.pop(self.request_id, None)


class Engine(GenerateManager):
    """Answers one request at a time, on a thread of its own, in the order in which they came."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.done: dict[str, dict[str, Any]] = {}  # by request: what its last message tells of it

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **_: Any
    ) -> tuple[asyncio.Queue, Stream]:
        """A queue of the committed pieces of text, in order, None at its end; and its stream."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        streamed = Stream(self, request_id)
        reveals = self._begin(inputs, gen_config)

        def put(item: Any) -> None:
            # The loop may be closed while a server that is shut down still answers.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def run() -> None:
            try:
                for reveal in reveals:
                    if reveal.text:
                        put(reveal.text)
                    if reveal.generation is not None:
                        streamed.total_tokens = reveal.generation.num_tokens
                        self._finish(request_id, gen_config, reveal.generation)
                    if streamed.left.is_set():
                        self.done.pop(request_id, None)
                        return
                put(None)
            except Exception as error:
                logger.exception("an answer failed")
                put(Failed(error))
                put(None)

        self.submit(run)
        return queue, streamed

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """(text, tokens of the prompt, ids of the answer)."""
        reveals = self._begin(inputs, gen_config)

        def run() -> Generation:
            return next(one.generation for one in reveals if one.generation is not None)

        try:
            generation = await self.async_submit(run)
        except Exception as error:
            logger.exception("an answer failed")
            raise Refused(None, str(error), 500) from None
        self._finish(request_id, gen_config, generation)
        return generation.text, generation.prompt_tokens, list(generation.token_ids)

    def _begin(self, inputs: Any, asked: Asked) -> Iterator[Reveal]:
        """The answer to come; what is wrong with the request is raised here, before any forward."""
        ids = inputs["input_ids"][0].tolist()
        limit = asked.limit
        try:
            if limit is None:  # what is left of the context, in mode "sbd" in whole blocks
                settings = settings_for(self.model, **asked.options)
                size = settings.block_size if settings.mode == "sbd" else 1
                limit = max((self.model.context_length - len(ids)) // size * size, 1)
            return iter(stream(self.model, [ids], **{**asked.options, "max_new_tokens": limit}))
        except (ValueError, TypeError) as error:
            raise Refused(None, str(error).replace("max_new_tokens", "max_tokens")) from None

    def _finish(self, request_id: str, asked: Asked, generation: Generation) -> None:
        if generation.finish_reason == "length":
            asked.max_new_tokens = generation.num_tokens
        settings = generation.settings
        told = {
            "mode": settings.mode,
            "forwards": generation.nfe,
            "tokens_per_forward": generation.tokens_per_forward,
            "prefill_s": generation.prefill_s,
            "decode_s": generation.decode_s,
        }
        if settings.uses_solver:
            told["solver"] = str(settings.solver)
        if asked.return_token_ids:
            told["token_ids"] = list(generation.token_ids)
        self.done[request_id] = told


class State(GenerationState):
    """Transformers' state of a server, with one engine for its one model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def get_manager(self, model_id: str, use_cb: bool = False) -> Engine:  # type: ignore[override]
        return self.engine


class Answers:
    """What both protocols share, in front of transformers' handler for each."""

    fields: ClassVar[dict[str, str]] = {}  # those of the one protocol
    model_manager: Any
    generation_state: Any

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        served: Served = self.model_manager
        if body.get("model") not in (None, served.name):
            raise Refused("model", f"must be {served.name!r}, got {body['model']!r}", 404)
        return served.name, served, served

    def _validate_request(self, body: dict[str, Any]) -> None:
        for name in [name for name, value in body.items() if value is None]:
            del body[name]  # as if it was not there
        for name, value in body.items():
            kind = {**OPTIONS, **TAKEN, **self.fields}.get(name)
            if kind and type(value) not in KINDS[kind]:
                raise Refused(name, f"must be {kind}, got {value!r}")
            if name in NEUTRAL and not any(_same(value, one) for one in NEUTRAL[name]):
                raise Refused(name, f"is not supported, only {NEUTRAL[name][0]!r}; got {value!r}")
            if kind is None and name not in NEUTRAL:
                raise Refused(name, "is not supported")
        if unknown := set(body.get("stream_options", {})) - {"include_usage"}:
            raise Refused("stream_options", f"may hold include_usage, got {sorted(unknown)}")
        self.check(body)
        for name in ("max_tokens", "max_completion_tokens"):
            if body.get(name, 1) < 1:
                raise Refused(name, f"must be at least 1, got {body[name]}")
        if sum(map(len, self.texts(body))) > self.model_manager.most_characters:
            context = self.model_manager.model.context_length
            raise Refused(None, f"the prompt exceeds the model's context of {context} tokens")

    def check(self, body: dict[str, Any]) -> None:
        """Raises Refused for what this protocol has of its own."""

    def texts(self, body: dict[str, Any]) -> list[str]:
        """The prompt's."""
        raise NotImplementedError

    def _build_generation_config(self, body: dict[str, Any], *_: Any, **__: Any) -> Asked:
        options: Any = {name: body[name] for name in OPTIONS if name in body}
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        return Asked(options, limit, body.get("return_token_ids", False))

    def _streaming(self, *args: Any, **given: Any) -> StreamingResponse:
        response = super()._streaming(*args, **given)  # type: ignore[misc]
        response.body_iterator = _then_done(response.body_iterator)
        return response

    async def _non_streaming(self, request_id: str, *args: Any, **given: Any) -> JSONResponse:
        response = await super()._non_streaming(request_id, *args, **given)  # type: ignore[misc]
        told = self.generation_state.engine.done.pop(request_id, None)
        return JSONResponse({**json.loads(response.body), "setblock": told})

    def _build_chunk_sse(self, request_id: str = "", *args: Any, **given: Any) -> str:
        if isinstance(failed := given.get("content", given.get("text")), Failed):
            return f"data: {json.dumps(_body(str(failed), 'server_error'))}\n\n"
        line = super()._build_chunk_sse(request_id, *args, **given)  # type: ignore[misc]
        told = self.generation_state.engine.done.get(request_id)
        if given.get("usage") is None or told is None:
            return line
        del self.generation_state.engine.done[request_id]
        chunk = json.loads(line.removeprefix("data: "))
        return f"data: {json.dumps({**chunk, 'setblock': told})}\n\n"


class Chat(Answers, ChatCompletionHandler):
    """/v1/chat/completions."""

    fields: ClassVar = {"messages": "a list of messages", "chat_template_kwargs": "an object"}

    def check(self, body: dict[str, Any]) -> None:
        if not body.get("messages"):
            raise Refused("messages", "must be a list of messages, at least one")
        for index, message in enumerate(body["messages"]):
            _check_message(f"messages[{index}]", message)
        if taken := set(body.get("chat_template_kwargs", {})) & set(FROM_HANDLER):
            raise Refused("chat_template_kwargs", f"may not hold {min(taken)}")
        if self.model_manager.model.tokenizer.chat_template is None:
            raise Refused(
                "messages", "need a chat template, and the model has none: /v1/completions"
            )

    def texts(self, body: dict[str, Any]) -> list[str]:
        contents = [message["content"] for message in body["messages"]]
        return [
            part if isinstance(part, str) else part["text"]
            for content in contents
            for part in ([content] if isinstance(content, str) else content)
        ]


class Completions(Answers, CompletionHandler):
    """/v1/completions."""

    fields: ClassVar = {"prompt": "a text"}

    def check(self, body: dict[str, Any]) -> None:
        if "prompt" not in body:
            raise Refused("prompt", "must be a text, and is missing")
        if "max_completion_tokens" in body:
            raise Refused("max_completion_tokens", "is not supported, only max_tokens")

    def texts(self, body: dict[str, Any]) -> list[str]:
        return [body["prompt"]]


def build(model: Model, name: str) -> FastAPI:
    """The ASGI application that serves the model under this name."""
    transformers.logging.set_verbosity_error()
    served, state = Served(model, name), State(Engine(model))
    handlers: dict[str, Any] = {name: None for name in signature(build_server).parameters}
    del handlers["enable_cors"]
    handlers |= {
        "model_manager": served,
        "generation_state": state,
        "chat_handler": Chat(served, state),  # type: ignore[arg-type]
        "completion_handler": Completions(served, state),  # type: ignore[arg-type]
    }
    app = build_server(**handlers)
    # What is left needs handlers that this server has not, or unloads the model.
    app.router.routes = [one for one in app.routes if getattr(one, "path", "") in PATHS]
    for kind in (Refused, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _error)
    return app


def _error(request: Request, error: Exception) -> JSONResponse:
    """An error in the protocol's own form."""
    status = error.status if isinstance(error, Refused) else 400
    message = str(error)
    if isinstance(error, RequestValidationError):
        message = f"the body is not a JSON object: {error.errors()[0]['msg']}"
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    field = error.field if isinstance(error, Refused) else None
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(_body(message, kind, field), status)


def _body(message: str, kind: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


async def _then_done(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for event in events:
        yield event
    yield "data: [DONE]\n\n"


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _check_message(place: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise Refused(place, "must be an object with role and content")
    if unknown := set(message) - {"role", "content"}:
        raise Refused(f"{place}.{min(unknown)}", "is not supported, only role and content")
    if not isinstance(message.get("role"), str):
        raise Refused(f"{place}.role", "must be a text")
    content = message.get("content")
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        raise Refused(f"{place}.content", "must be a text or a list of parts of type text")
