"""What decodes behind transformers' server: a request at a time, as a stream of committed text."""

import asyncio
import logging
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import Any

from transformers.cli.serving.utils import GenerateManager, GenerationState

from setblock.calls import Hearing
from setblock.fields import Asked, Refused
from setblock.generation import Generation, Reveal, settings_for, stream
from setblock.model import Model
from setblock.prompt_cache import PromptCache

logger = logging.getLogger(__name__)

FORMS = ("response_format", "regex", "grammar", "tool_choice")  # fields that bound an answer


class Failed(str):
    """In the place of a piece of text: the error that ended an answer on its way.

    refused: what is wrong with the request, if that is why.
    """

    def __new__(cls, error: Exception) -> "Failed":
        failed = super().__new__(cls, why(error))
        failed.refused = error if isinstance(error, Refused) else None
        return failed

    refused: Refused | None


class Stream:
    """One answer on its way: what the handlers ask of a streamer."""

    total_tokens = 0

    def cancel(self) -> None:
        """The client is gone, which `Asked.left` says sooner."""


class Engine(GenerateManager):
    """Answers one request at a time, on a thread of its own, in the order in which they came."""

    def __init__(self, model: Model, prompt_cache: PromptCache | None = None) -> None:
        """prompt_cache: what requests leave for later ones; None for nothing."""
        super().__init__()
        self.model, self.prompt_cache = model, prompt_cache
        self.ending = threading.Event()  # the process is told to end
        self.done: dict[str, dict[str, Any]] = {}  # by request: what its last message tells of it

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **_: Any
    ) -> tuple[asyncio.Queue, Stream]:
        """A queue of the committed pieces of text, in order, None at its end; and its stream.

        processor: Served, or a Hearing, of whose answer the queue has thoughts and calls as well.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        streamed = Stream()
        listener = processor.listener if isinstance(processor, Hearing) else None
        reveals = self._unless_ending(self._begin(processor, inputs, gen_config), gen_config)

        def put(item: Any) -> None:
            # The loop may be closed while a server that is shut down still answers.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def run() -> None:
            try:
                with closing(reveals):
                    for reveal in reveals:
                        if listener is not None:
                            for part in listener.hear(reveal.text, reveal.generation is not None):
                                put(part)
                        elif reveal.text:
                            put(reveal.text)
                        if reveal.generation is not None:
                            streamed.total_tokens = reveal.generation.num_tokens
                            self._finish(request_id, gen_config, reveal.generation)
                        if gen_config.left.is_set():
                            self.done.pop(request_id, None)
                            return
            except Refused as error:
                put(Failed(error))
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
        reveals = self._unless_ending(self._begin(processor, inputs, gen_config), gen_config)

        def run() -> Generation:
            with closing(reveals):
                found = (one.generation for one in reveals)
                generation = next(one for one in found if one is not None)
            if isinstance(processor, Hearing):
                processor.parts = processor.listener.hear(generation.text, ended=True)
            return generation

        generation = await self.async_submit(run)
        self._finish(request_id, gen_config, generation)
        return generation.text, generation.prompt_tokens, list(generation.token_ids)

    def _begin(self, processor: Any, inputs: Any, asked: Asked) -> Iterator[Reveal]:
        """The answer to come; what is wrong with the request is raised here, before any forward."""
        model: Model = processor.model
        given: Any = {**asked.options, **processor.form}
        ids = inputs["input_ids"][0].tolist()
        context, limit = model.context_length, asked.limit
        try:
            if limit is None:  # what is left of the context, in mode "sbd" in whole blocks
                settings = settings_for(model, **given)
                limit = settings.room(context - len(ids))
                if limit < 1:
                    size = settings.stride
                    block = "a token" if size == 1 else f"a block of {size}"
                    raise Refused(
                        asked.prompt,
                        f"must leave room for {block} in the model's context of {context} tokens, "
                        f"got {len(ids)} tokens",
                    )
            given["max_new_tokens"] = limit
            return iter(stream(model, [ids], prompt_cache=self.prompt_cache, **given))
        except (ValueError, TypeError) as error:
            raise _refusal(error, asked) from None

    def _unless_ending(
        self, reveals: Iterator[Reveal], asked: Asked
    ) -> Generator[Reveal, None, None]:
        """The reveals up to the answer's last; raises Refused once the process is told to end, and
        for a form of the answer that turns out to be too much on the way. To be closed.
        """
        going = True
        while going:
            if self.ending.is_set():
                raise Refused(None, "the server is shutting down", 503)
            try:
                reveal = next(reveals)
            except ValueError as error:
                if (refused := _refusal(error, asked)).field in FORMS:
                    raise refused from None
                raise
            yield reveal
            going = reveal.generation is None

    def _finish(self, request_id: str, asked: Asked, generation: Generation) -> None:
        if generation.finish_reason == "length":
            asked.max_new_tokens = generation.num_tokens
        settings = generation.settings
        told = {
            "mode": settings.mode,
            "cached_tokens": generation.cached_tokens,
            "forwards": generation.nfe,
            "tokens_per_forward": generation.tokens_per_forward,
            "prefill_s": generation.prefill_s,
            "decode_s": generation.decode_s,
        }
        if settings.uses_solver:
            told["solver"] = str(settings.solver)
        if settings.sampler.temperature:
            told["seed"] = settings.sampler.seed
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


def _refusal(error: Exception, asked: Asked) -> Refused:
    """What an error of `setblock.generate` says, in the words of the request."""
    message = str(error).replace("max_new_tokens", asked.limited_by)
    message = message.replace(", or name another by mask_token_id", "")  # not a client's
    if message.startswith("prompt 0 "):  # the only one
        message = message.replace("prompt 0", asked.prompt, 1)
    field, _, why = message.partition(" ")
    if field == "json_schema":
        field = "response_format"
    elif field == "grammar" and "tools" in asked.fields:  # which nobody wrote
        field, why = "tool_choice", why.partition(" 1 | start: ")[0]
    return Refused(field, why) if field in asked.fields else Refused(None, message)


def why(error: Exception) -> str:
    """What an error says, or else its kind."""
    return str(error) or type(error).__name__
