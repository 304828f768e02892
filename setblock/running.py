"""Answers on their way: decoded together, with others that join them and leave as they end."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Bool
from numpy import ndarray

from setblock.branches import BranchDrafts
from setblock.decode import DecodeState
from setblock.grammar import Grammar
from setblock.model import Model
from setblock.pieces import TextPieces
from setblock.prompt_cache import Beginning, PromptCache
from setblock.results import Generation, Reveal, TokenLogprob
from setblock.settings import Settings
from setblock.state import Rows
from setblock.verified import SolverDrafts, VerifiedRows

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Answer:
    """One answer on its way.

    row: what its reveals call it. noise: the row of its sampling noise.
    model: whose text it is. in_pieces: whether that is wanted piece by piece, or at the end alone.
    among: its settings among so many answers, with other drafts that change no token; None if they
    are always the same.
    ids: its gapless tokens so far. told: how many of them a reveal has told of.
    """

    row: int
    prompt: Sequence[int]
    model: Model
    settings: Settings
    noise: int
    in_pieces: bool
    grammar: Grammar | None = None
    among: Callable[[int], Settings] | None = None
    ids: list[int] = field(default_factory=list)
    told: int = 0
    began: float = 0.0
    prefill_s: float | None = None

    def __post_init__(self) -> None:
        self.pieces = TextPieces(self.model, self.settings.stop)


class Running:
    """Answers that are decoded together, their settings the same in what `Settings.shared` has.

    Those who come have their prompts encoded by forwards of their own, up to the first that reveals
    tokens, and then take part in the others'. How much is drafted for each may depend on how many
    there are.
    answers: those that are there, in the order of the state's rows. coming: those that come.
    failed: those that have gone by an error, and what it was: by one in a forward all that are in
    it, else those that it is of. Whoever calls takes them out.
    """

    def __init__(
        self,
        room: int | None = None,
        prompt_cache: PromptCache | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        """room: answers at most, where others may join the first; None if none will.

        prompt_cache: where prompts come from and answers go to; answers come one by one then.
        beginning: that of all prompts, without a prompt cache.
        """
        self.room, self.prompt_cache, self.beginning = room, prompt_cache, beginning
        self.answers: list[Answer] = []
        self.coming: list[Answer] = []
        self.failed: list[tuple[Answer, Exception]] = []
        self._state: Rows | None = None
        self._arriving: Rows | None = None
        self._drafting_for = 0  # answers that the state's drafts were chosen for, if they were
        self._seconds = 0.0  # that its forwards took

    def __len__(self) -> int:
        return len(self.answers) + len(self.coming)

    def suits(self, answer: Answer) -> bool:
        """Whether this one can be decoded together with those of the batch, if there is room."""
        one = next(iter((*self.answers, *self.coming)))
        same = one.settings.shared == answer.settings.shared
        return self.room is not None and same and one.model.network is answer.model.network

    def begin(self, answers: Sequence[Answer]) -> bool:
        """Have these come, of the same settings if there are several, unless there is no room for
        them yet; nobody else may be coming.
        """
        assert not self.coming, "others are still coming"
        state = self._state
        if state is not None and (self.room is None or len(self) + len(answers) > self.room):
            return False
        arriving = _start(answers, self.room if state is None else 0)
        if state is not None and not state.cache.has_room_for(
            len(answers), arriving.longest + max(arriving.beyond, state.beyond)
        ):
            return False
        arriving.follow([answer.grammar for answer in answers])
        begin = time.perf_counter()
        for answer in answers:
            answer.began = self._seconds
        if self.prompt_cache is not None:
            self.prompt_cache.fill(arriving)
        elif self.beginning is not None:
            self.beginning.fill(arriving)
        self._arriving, self.coming = arriving, list(answers)
        self._seconds += time.perf_counter() - begin
        return True

    def come(self) -> list[Reveal]:
        """A forward of those who come: of a part of a long prompt, or their first step, with which
        they are there.
        """
        begin, state = time.perf_counter(), self._arriving
        assert state is not None, "nobody comes"
        reveals, going = [], self.coming
        try:
            if state.encode():
                self._seconds += time.perf_counter() - begin
                return []
            reveals, going = self._step(state, self.coming, begin)
            if going and self.room is not None:  # others with the same beginning may wait already
                for slot in range(len(going)):
                    self._keep(state, slot)
            if going:
                self._join(state, going)
        except Exception as error:
            self._fail(going, error)
        self._gone(coming=True)
        return reveals

    def step(self) -> list[Reveal]:
        """A forward of those who are there."""
        reveals, going = [], self.answers
        try:
            self._draft_for(len(self.answers))
            assert self._state is not None
            reveals, self.answers = self._step(self._state, self.answers, time.perf_counter())
        except Exception as error:
            self._fail(going, error)
            self._empty()
        self._gone()
        return reveals

    def _fail(self, answers: list[Answer], error: Exception) -> None:
        self.failed += [(answer, error) for answer in answers]

    def _empty(self) -> None:
        """Have nobody be there any more, after an error; those who come are to be in the same
        memory.
        """
        self.answers = []
        try:
            if self._state is not None:
                self._state.select([])
        except Exception as error:  # what is in that memory is not known then
            self._fail(self.coming, error)
            self._state, self._arriving, self.coming = None, None, []

    def _gone(self, coming: bool = False) -> None:
        """Give back what nobody needs any more. coming: nobody comes."""
        if coming:
            self._arriving, self.coming = None, []
        if not len(self):
            self._state = None

    def _join(self, state: Rows, answers: list[Answer]) -> None:
        """Have the rows of those who came among those who are there."""
        if self._state is not None and self.answers:
            self._draft_for(len(self.answers) + len(answers))
            self._state.join(redrafted(state, self._state.settings))
        else:
            if self._state is not None:  # whose memory is the one to be in
                cache = self._state.cache
                fits = cache.widen(state.longest + state.beyond)
                assert fits, "no room for these rows"
                cache.join(state.cache)
                state.cache = cache
            self._state, self._drafting_for = state, 0
        self.answers += answers

    def _draft_for(self, count: int) -> None:
        """Have drafts made as is best among so many answers, unless memory is too small for it."""
        state, among = self._state, self.answers[0].among
        if state is None or among is None or count == self._drafting_for:
            return
        self._drafting_for = count
        both = [state] if self._arriving is None else [state, self._arriving]
        most = max(int((one.limit - one.prompt_end).max()) for one in both)
        other = redrafted(state, replace(among(count), max_new_tokens=most))
        if state.cache.widen(max(one.longest for one in both) + other.beyond):
            self._state = other

    def close(self) -> None:
        """Have what is encoded by now kept, where a forward was interrupted."""
        for state in (self._arriving, self._state):
            for slot in range(0 if state is None else len(state.tokens)):
                self._keep(state, slot)

    def leave(self, leaving: Sequence[Answer]) -> None:
        """Let these go before their end."""
        if self._arriving is not None:
            self.coming = self._without(self._arriving, self.coming, leaving)
        if self._state is not None:
            self.answers = self._without(self._state, self.answers, leaving)
        self._gone(coming=not self.coming)

    def _without(
        self, state: Rows, answers: list[Answer], leaving: Sequence[Answer]
    ) -> list[Answer]:
        going = [slot for slot, answer in enumerate(answers) if answer not in leaving]
        for slot in set(range(len(answers))) - set(going):
            self._keep(state, slot)
        return self._going_on(state, answers, going)

    def _going_on(self, state: Rows, answers: list[Answer], going: list[int]) -> list[Answer]:
        """Those in these slots; the state has no others any more. Nobody, if that is an error."""
        try:
            if len(going) < len(answers):
                going = closed_up(going)
                state.select(going)
        except Exception as error:
            self._fail([answers[slot] for slot in going], error)
            if state is self._state:
                self._empty()
            return []
        return [answers[slot] for slot in going]

    def _keep(self, state: Any, slot: int) -> None:
        """Keep what the prompt cache's next prompts may begin like, if there is memory for it."""
        if self.prompt_cache is None:
            return
        try:
            self.prompt_cache.keep(state, slot)
        except (MemoryError, RuntimeError) as error:  # the latter is torch's, of any device
            self.prompt_cache.clear()
            why = str(error) or type(error).__name__
            log.warning("the prompt cache is empty again, as keeping a text failed: %s", why)

    def _step(
        self, state: Rows, answers: list[Answer], begin: float
    ) -> tuple[list[Reveal], list[Answer]]:
        """(what one forward brings, those who go on). begin: when the work for it was begun."""
        reveals, going = [], []
        revealed = state.step()
        now = self._seconds + time.perf_counter() - begin
        for slot, answer in enumerate(answers):
            try:
                reveal, ended = _heard(state, slot, answer, revealed[slot], now)
            except Exception as error:
                self.failed.append((answer, error))
                continue
            if reveal is not None:
                reveals.append(reveal)
            if ended:
                self._keep(state, slot)
            else:
                going.append(slot)
        staying = self._going_on(state, answers, going)
        self._seconds += time.perf_counter() - begin
        return reveals, staying


def _heard(
    state: Rows, slot: int, answer: Answer, revealed: Bool[ndarray, " length"], now: float
) -> tuple[Reveal | None, bool]:
    """(what a forward brought to an answer, unless that is nothing or not wanted; whether it has
    ended). now: as `Answer.began`, where the forward ended.
    """
    if answer.prefill_s is None:
        answer.prefill_s = now - answer.began
    if (error := state.errors[slot]) is not None:
        raise error
    fresh, ended = state.committed(slot, len(answer.ids))
    answer.ids += fresh
    text, stopped, generation = "", False, None
    if answer.in_pieces or ended:
        answer.ids, text, stopped = answer.pieces.extend(answer.ids, ended)
    if ended or stopped:
        generation = _finish(state, slot, answer, stopped, now)
    if generation is None and not answer.in_pieces:
        return None, False
    first = int(state.prompt_end[slot])
    [places] = revealed.nonzero()
    tokens = state.tokens[slot, places].tolist()
    drafts = tuple(zip((places - first).tolist(), tokens, strict=True))
    if not drafts and generation is None:
        return None, False
    logprobs = _logprobs(state, slot, answer.told, len(answer.ids)) or ()
    answer.told = len(answer.ids)
    reveal = Reveal(answer.row, int(state.nfe[slot]), drafts, text, generation, logprobs)
    return reveal, generation is not None


def to_their_ends(
    answers: Sequence[Answer], together: int, prompt_cache: PromptCache | None
) -> Iterator[Reveal]:
    """What each forward brings to these answers, which begin in this order, so many at most
    together: as some end, the next ones take their places.

    Those who come have forwards of their own, so they come several at a time where answers are
    short: of B places g are left until so many are free. For answers of f forwards that makes
    f g / 2B forwards more of B, and B / g for those who come, the fewest with g = B sqrt(2 / f).

    What a prompt cache gets of answers that are not taken to their ends it has once the iterator is
    closed.
    """
    beginning = Beginning([answer.prompt for answer in answers]) if prompt_cache is None else None
    room = together if 1 < together < len(answers) else None
    running, waiting = Running(room, prompt_cache, beginning), list(answers)
    ended, forwards = 0, 0
    try:
        while waiting or len(running):
            free = 0 if running.coming else together - len(running)
            enough = round(together * math.sqrt(2 * ended / forwards)) if ended else 1
            if waiting and free >= min(max(enough, 1), together, len(waiting)):
                if running.begin(waiting[:free]):
                    del waiting[:free]
            for reveal in running.come() if running.coming else running.step():
                if reveal.generation is not None:
                    ended, forwards = ended + 1, forwards + reveal.generation.nfe
                yield reveal
            if running.failed:
                raise running.failed[0][1]
    except (GeneratorExit, KeyboardInterrupt):  # what the cache says it holds is whole
        running.close()
        raise


def closed_up(slots: list[int]) -> list[int]:
    """These slots, the last of them where others are missing, so that few rows have to be moved."""
    stay = [slot for slot in slots if slot < len(slots)]
    moved = slots[len(stay) :]
    free = iter(moved)
    kept = set(stay)
    return [slot if slot in kept else next(free) for slot in range(len(slots))]


def _start(answers: Sequence[Answer], room: int | None) -> Rows:
    """A state with these answers' prompts; room: as for Rows."""
    model, settings = answers[0].model, answers[0].settings
    prompts, rows = [answer.prompt for answer in answers], [answer.noise for answer in answers]
    return _kind(settings)(model, prompts, rows, settings, room)


def _kind(settings: Settings) -> type[DecodeState | BranchDrafts | SolverDrafts]:
    if settings.mode != "verified":
        return DecodeState
    return BranchDrafts if settings.draft == "branches" else SolverDrafts


def redrafted(state: Rows, settings: Settings) -> Rows:
    """The rows of a state of mode "verified", with settings that draft otherwise and no draft as
    yet; the state itself if they draft alike. Else that is of no use any more.
    """
    if settings.shared == state.settings.shared:
        return state
    texts = zip(state.tokens, state.prompt_end.tolist(), strict=True)
    prompts, rows = [text[:end].tolist() for text, end in texts], state.rows.tolist()
    other = _kind(settings)(state.model, prompts, rows, settings, 0)
    for name in Rows.PER_ROW:
        setattr(other, name, getattr(state, name))
    other.cache = state.cache
    if isinstance(other, VerifiedRows):
        other.fit()
    return other


def _finish(state: Rows, slot: int, answer: Answer, stopped: bool, now: float) -> Generation:
    """now: as `Answer.began`, where its last forward ended."""
    first, ids = int(state.prompt_end[slot]), answer.ids
    places = slice(first, first + len(ids))
    at_eos = not state.settings.ignore_eos and ids[-1] in state.model.eos_token_ids
    prefill_s = answer.prefill_s or 0.0
    return Generation(
        text=answer.pieces.text,
        token_ids=tuple(ids),
        finish_reason="stop" if stopped else "eos" if at_eos else "length",
        prompt_tokens=first,
        nfe=int(state.nfe[slot]),
        prefill_forwards=int(state.prefill_forwards[slot]),
        reveal_step=tuple(state.revealed_at[slot, places].tolist()),
        entropy=tuple(state.entropy[slot, places].tolist()),
        prefill_s=prefill_s,
        decode_s=now - answer.began - prefill_s,
        settings=answer.settings,
        cached_tokens=int(state.cached[slot]),
        logprobs=_logprobs(state, slot, 0, len(ids)),
    )


def _logprobs(state: Rows, slot: int, begin: int, end: int) -> tuple[TokenLogprob, ...] | None:
    """Of an answer's tokens from one to before another, if they are asked for."""
    if state.settings.logprobs is None:
        return None
    places = slice(int(state.prompt_end[slot]) + begin, int(state.prompt_end[slot]) + end)
    arrays = state.tokens, state.logprob, state.top, state.top_logprob
    lists, told = (one[slot, places].tolist() for one in arrays), []
    for token, own, ids, values in zip(*lists, strict=True):
        top = [pair for pair in zip(ids, values, strict=True) if math.isfinite(pair[1])]
        told.append(TokenLogprob(token, own, tuple(top)))
    return tuple(told)
