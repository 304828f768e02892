"""What decodes behind transformers' server: several requests at a time, each a stream of text."""

import asyncio
import functools
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import GenerateManager, GenerationState

from setblock.calls import Hearing
from setblock.fields import TOO_LONG, Asked, Refused
from setblock.generation import TooLong, checked, settings_for
from setblock.grammar import Grammar
from setblock.logprobs import Piece, Placed, Placing
from setblock.model import Model
from setblock.prompt_cache import PromptCache
from setblock.results import Generation, Reveal
from setblock.running import Answer, Running
from setblock.settings import Settings

logger = logging.getLogger(__name__)
told_answers = logging.getLogger("setblock.answers")  # a line about each, without its text

MOST_ANSWERS = 8  # under way at a time

LEFT = (None, "the client has left", 499)
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


@dataclass(eq=False)
class Job:
    """A request whose answer is under way, or waits. hear, fail: called on the engine's thread.

    began, first, ended: by the clock, when its prompt's turn came, when that was encoded and the
    first tokens there, and when the last were.
    """

    answer: Answer
    asked: Asked
    hear: Callable[[Reveal], None]
    fail: Callable[[Exception], None]
    began: float = 0.0
    first: float = 0.0
    ended: float = 0.0


class Engine(GenerateManager):
    """Answers requests on a thread of its own, in the order in which they came, several at a time:
    those whose settings are alike are decoded together, others take turns.
    """

    def __init__(
        self, model: Model, prompt_cache: PromptCache | None = None, most: int = MOST_ANSWERS
    ) -> None:
        """prompt_cache: what requests leave for later ones; None for nothing.

        most: answers under way at a time.
        Raises: ValueError for less than one.
        """
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        super().__init__()
        self.model, self.prompt_cache, self.most = model, prompt_cache, most
        self.ending = threading.Event()  # the process is told to end
        self.done: dict[str, dict[str, Any]] = {}  # by request: what its last message tells of it
        self._numbers = itertools.count()
        self._waiting: deque[Job] = deque()
        # The thread's own:
        self._jobs: dict[int, Job] = {}  # under way, by the row of their reveals
        self._batches: list[Running] = []

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **_: Any
    ) -> tuple[asyncio.Queue, Stream]:
        """A queue of the committed pieces of text, in order, None at its end; and its stream.

        processor: Served, or a Hearing, of whose answer the queue has thoughts and calls as well.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        streamed = Stream()
        answer = self._answer(processor, inputs, gen_config, in_pieces=True)
        placing = None if answer.settings.logprobs is None else Placing(processor.told)
        listener = processor.listener if isinstance(processor, Hearing) else None
        waiting: list[Placed] = []
        length = 0  # characters that the client has

        def put(item: Any) -> None:
            # The loop may be closed while a server that is shut down still answers.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def hear(reveal: Reveal) -> None:
            nonlocal length
            if placing is not None:
                waiting.extend(placing.of(reveal.logprobs, reveal.generation is not None))
                length += len(reveal.text)
                there = [one for one in waiting if one.offset < length]
                del waiting[: len(there)]  # others wait for the text that they begin
                if reveal.text or there:
                    put(Piece(reveal.text, there))
            elif listener is not None:
                for part in listener.hear(reveal.text, reveal.generation is not None):
                    put(part)
            elif reveal.text:
                put(reveal.text)
            if reveal.generation is not None:
                streamed.total_tokens = reveal.generation.num_tokens
                self._finish(request_id, job, reveal.generation)
                if gen_config.left.is_set():
                    self.done.pop(request_id, None)
                put(None)

        def fail(error: Exception) -> None:
            put(Failed(error))
            put(None)

        job = Job(answer, gen_config, hear, fail)
        self._ask(job)
        return queue, streamed

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """(text, tokens of the prompt, ids of the answer)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation | Exception] = loop.create_future()
        answer = self._answer(processor, inputs, gen_config, in_pieces=False)

        def tell(outcome: Generation | Exception) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: future.done() or future.set_result(outcome))

        def hear(reveal: Reveal) -> None:
            if reveal.generation is None:
                return
            if isinstance(processor, Hearing):
                processor.parts = processor.listener.hear(reveal.generation.text, ended=True)
            tell(reveal.generation)

        job = Job(answer, gen_config, hear, tell)
        self._ask(job)
        outcome = await future
        if isinstance(outcome, Refused):
            raise outcome
        if isinstance(outcome, Exception):
            raise Refused(None, why(outcome), 500)
        self._finish(request_id, job, outcome)
        if outcome.logprobs is not None:
            tokens, length = Placing(processor.told).of(outcome.logprobs, True), len(outcome.text)
            self.done[request_id]["logprobs"] = [one for one in tokens if one.offset < length]
        return outcome.text, outcome.prompt_tokens, list(outcome.token_ids)

    def _answer(self, processor: Any, inputs: Any, asked: Asked, in_pieces: bool) -> Answer:
        """The answer to come; what is wrong with the request is raised here, before any forward."""
        self.settle(processor, inputs, asked)
        model, ids = processor.model, inputs["input_ids"][0].tolist()
        [(settings, grammar, among)] = asked.settled
        in_pieces |= bool(settings.stop)
        number = next(self._numbers)
        return Answer(number, ids, model, settings, asked.row, in_pieces, grammar, among)

    def settle(self, processor: Any, inputs: Any, asked: Asked) -> None:
        """Effects: `asked.settled` is there. Raises: Refused for what is wrong with the request."""
        if not asked.settled:
            ids = inputs["input_ids"][0].tolist()
            asked.settled.append(self._settled(processor.model, ids, asked, processor.form))
        [settled] = asked.settled
        if isinstance(settled, Refused):
            raise settled

    def _settled(
        self, model: Model, ids: list[int], asked: Asked, form: dict[str, Any]
    ) -> tuple[Settings, Grammar | None, Callable[[int], Settings] | None] | Refused:
        """Settings, grammar and `among` of the answers to a request, or what is wrong with it."""
        given: Any = {**asked.options, **form}
        context, limit = model.context_length, asked.limit
        try:
            if limit is None:  # what is left of the context, in mode "sbd" in whole blocks
                settings = settings_for(model, **given)
                limit = settings.room(context - len(ids))
                if limit < 1:
                    size = settings.stride
                    block = "a token" if size == 1 else f"a block of {size}"
                    return Refused(
                        asked.prompt,
                        f"must leave room for {block} in the model's context of {context} tokens, "
                        f"got {len(ids)} tokens",
                        code=TOO_LONG,
                    )
            given["max_new_tokens"] = limit
            settings, grammar = checked(model, [ids], 1, given)
        except (ValueError, TypeError) as error:
            return _refusal(error, asked)
        among = None
        if settings.mode == "verified" and settings.lenience == 1:
            among = functools.cache(lambda rows: settings_for(model, rows, **given))
        return settings, grammar, among

    def _ask(self, job: Job) -> None:
        self._waiting.append(job)
        self.submit(self._work)

    # ------------------------------------------------------------------ on the engine's thread

    def _work(self) -> None:
        """Answer until nobody waits any more."""
        try:
            while self._waiting or self._batches:
                self._let_go()
                self._batches = [batch for batch in self._batches if len(batch)]
                self._admit()
                for batch in self._batches:
                    self._turn(batch)
        except BaseException as error:  # of this class itself, or a panic in a library of Rust
            self._end_all(error)  # nobody shall wait for ever

    def _end_all(self, error: BaseException) -> None:
        jobs, self._jobs, self._batches = self._jobs, {}, []
        for job in jobs.values():
            _fail(job, error)
        while self._waiting:  # others may ask meanwhile
            _fail(self._waiting.popleft(), error)

    def _let_go(self) -> None:
        """Have those go whose clients have left, and all if the process is told to end."""
        if self.ending.is_set():
            self._end_all(Refused(None, "the server is shutting down", 503))
        for job in [job for job in self._jobs.values() if job.asked.left.is_set()]:
            del self._jobs[job.answer.row]
            _fail(job, Refused(*LEFT))
            for batch in self._batches:
                self._leave(batch, job.answer)

    def _leave(self, batch: Running, answer: Answer) -> None:
        batch.leave([answer])
        self._tell_failures(batch)

    def _tell_failures(self, batch: Running) -> None:
        failed, batch.failed = batch.failed, []
        for answer, error in failed:
            if (job := self._jobs.pop(answer.row, None)) is not None:  # unless it has ended
                _fail(job, error)

    def _admit(self) -> None:
        """Have those begin who may, one for each batch: of the requests with the fewest answers
        under way, the one that came first.
        """
        while self._waiting and len(self._jobs) < self.most:
            under_way = Counter(job.asked.left for job in self._jobs.values())
            job = min(list(self._waiting), key=lambda job: under_way[job.asked.left])
            if job.asked.left.is_set():
                self._waiting.remove(job)
                _fail(job, Refused(*LEFT))
                continue
            try:
                job.began = time.perf_counter()
                if not self._begin(job.answer):
                    return
                self._jobs[job.answer.row] = job
            except Exception as error:
                _fail(job, error)
            self._waiting.remove(job)

    def _begin(self, answer: Answer) -> bool:
        """Whether the answer begins, in a batch of its like or in one of its own."""
        if batch := next((one for one in self._batches if one.suits(answer)), None):
            return not batch.coming and batch.begin([answer])
        if self._batches and self.model.replays:
            return False  # each batch would have memory of its own for as many as may come
        batch = Running(self.most if self.most > 1 else None, self.prompt_cache)
        batch.begin([answer])
        self._batches.append(batch)
        return True

    def _turn(self, batch: Running) -> None:
        """A forward of a batch, and one of the answer that comes."""
        if batch.answers:
            self._forward(batch, batch.answers, batch.step)
        if batch.coming:
            self._forward(batch, batch.coming, batch.come)

    def _forward(
        self, batch: Running, answers: list[Answer], forward: Callable[[], list[Reveal]]
    ) -> None:
        """Tell these answers' requests what a forward brings, and by which errors some are gone."""
        reveals = forward()
        now = time.perf_counter()
        for job in (self._jobs[answer.row] for answer in answers):
            if job.answer.prefill_s is not None:
                job.first, job.ended = job.first or now, now
        for reveal in reveals:
            self._hear(batch, reveal)
        self._tell_failures(batch)

    def _hear(self, batch: Running, reveal: Reveal) -> None:
        if (job := self._jobs.get(reveal.row)) is None:  # by what happened as another left
            return
        try:
            job.hear(reveal)
        except Exception as error:
            del self._jobs[reveal.row]
            _fail(job, error)
            self._leave(batch, job.answer)
            return
        if reveal.generation is not None:
            del self._jobs[reveal.row]

    def _finish(self, request_id: str, job: Job, generation: Generation) -> None:
        asked = job.asked
        if generation.finish_reason == "length":
            asked.max_new_tokens = generation.num_tokens
        settings = generation.settings
        told = {
            "mode": settings.mode,
            "cached_tokens": generation.cached_tokens,
            "forwards": generation.nfe,
            "tokens_per_forward": generation.tokens_per_forward,
            "prefill_s": job.first - job.began,
            "decode_s": job.ended - job.first,
            "apart": asked.usage,
        }
        if settings.uses_solver:
            told["solver"] = str(settings.solver)
        if settings.sampler.temperature:
            told["seed"] = settings.sampler.seed
        told_answers.info(
            "mode %s: tokens %d, forwards %d, seconds %.2f; "
            "prompt: tokens %d, cached %d, seconds %.2f",
            *(settings.mode, generation.num_tokens, generation.nfe, told["decode_s"]),
            *(generation.prompt_tokens, generation.cached_tokens, told["prefill_s"]),
        )
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
    message = message.replace("min_new_tokens", "min_tokens")
    message = message.replace(", or name another by mask_token_id", "")  # not a client's
    if message.startswith("prompt 0 "):  # the only one
        message = message.replace("prompt 0", asked.prompt, 1)
        message = message.replace("messages has", "messages have", 1)
    field, _, why = message.partition(" ")
    if field == "json_schema":
        field = "response_format"
    elif field == "grammar" and "tools" in asked.fields:  # which nobody wrote
        field, why = "tool_choice", why.partition(" 1 | start: ")[0]
    code = TOO_LONG if isinstance(error, TooLong) else None
    if field != asked.prompt and field not in asked.fields:
        field, why = None, message
    return Refused(field, why, code=code)


def _fail(job: Job, error: BaseException) -> None:
    """Tell a request by which error its answer is gone."""
    told = error if isinstance(error, Exception) else RuntimeError(why(error))
    # A form of the answer that turns out to be too much on the way is the request's.
    if isinstance(error, ValueError) and (refused := _refusal(error, job.asked)).field in FORMS:
        told = refused
    if not isinstance(told, Refused):
        logger.error("an answer failed", exc_info=error)
    told.__context__ = told.__cause__ = told.__traceback__ = None  # these would hold its batch
    job.fail(told)


def why(error: BaseException) -> str:
    """What an error says, or else its kind."""
    return str(error) or type(error).__name__
