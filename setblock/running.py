"""Answers on their way: decoded together, with others that join them and leave as they end."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from setblock.decode import DecodeState, Rows
from setblock.grammar import Grammar
from setblock.model import Model
from setblock.pieces import TextPieces
from setblock.prompt_cache import PromptCache
from setblock.settings import Settings
from setblock.verified import BranchDrafts, SolverDrafts


@dataclass(frozen=True)
class Generation:
    """One row's result.

    nfe: forwards the row took part in after its prompt's own, plus 1 if that one yielded a token.
    prefill_forwards: of the longest of the prompts that were encoded together, see `Rows.encode`.
    cached_tokens: of the prompt, those that a prompt_cache knew.
    reveal_step: for each token the forward (1 .. nfe) that revealed it.
    entropy: for each token the entropy in nats of what was predicted there, without temperature.
    prefill_s, decode_s: seconds of the prompt's forward and from there to the row's end, both of
    the batch that the row was part of, without what a caller of `stream` did in between.
    finish_reason: "eos", "stop" or "length".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    nfe: int
    prefill_forwards: int
    reveal_step: tuple[int, ...]
    entropy: tuple[float, ...]
    prefill_s: float
    decode_s: float
    settings: Settings
    cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Generated tokens, EOS included."""
        return len(self.token_ids)

    @property
    def tokens_per_forward(self) -> float:
        """num_tokens / nfe; exactly 1 for mode "ntp"."""
        return self.num_tokens / self.nfe

    @property
    def wall_s(self) -> float:
        """prefill_s + decode_s."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Reveal:
    """What one forward brought to one row.

    drafts: (offset in the answer, token id) of every token revealed now: never changed, maybe not
    yet adjacent to the committed text, and cut in the end if an EOS or stop text comes before it.
    text: the committed text that has grown since the row's last `Reveal`; never taken back.
    generation: the row's result, with its last `Reveal` only.
    """

    row: int
    nfe: int
    drafts: tuple[tuple[int, int], ...]
    text: str
    generation: Generation | None


@dataclass(eq=False)
class Answer:
    """One answer on its way.

    row: what its reveals call it. noise: the row of its sampling noise.
    model: whose text it is. in_pieces: whether that is wanted piece by piece, or at the end alone.
    among: its settings among so many answers, with other drafts that change no token; None if they
    are always the same.
    ids: its gapless tokens so far.
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
    """

    def __init__(self, room: int | None = None, prompt_cache: PromptCache | None = None) -> None:
        """room: answers at most, where others may join the first; None if none will.

        prompt_cache: where prompts come from and answers go to; answers come one by one then.
        """
        self.room, self.prompt_cache = room, prompt_cache
        self.answers: list[Answer] = []
        self.coming: list[Answer] = []
        self._state: Rows | None = None
        self._arriving: Rows | None = None
        self._seconds = 0.0  # that its forwards took

    def __len__(self) -> int:
        return len(self.answers) + len(self.coming)

    def suits(self, answer: Answer) -> bool:
        """Whether this one can be decoded together with those of the batch, if there is room."""
        one = next(iter((*self.answers, *self.coming)))
        same = one.settings.shared == answer.settings.shared and one.grammar is answer.grammar
        return self.room is not None and same and one.model.network is answer.model.network

    def begin(self, answers: Sequence[Answer]) -> bool:
        """Have these come, unless there is no room for them yet; nobody else may be coming."""
        assert not self.coming, "others are still coming"
        arriving = _start(answers, self.room if self._state is None else 0)
        if self._state is not None and not self._state.cache.has_room_for(arriving.cache):
            return False
        if answers[0].grammar is not None:
            arriving.follow(answers[0].grammar)
        begin = time.perf_counter()
        for answer in answers:
            answer.began = self._seconds
        if self.prompt_cache is not None:
            self.prompt_cache.fill(arriving)
        self._arriving, self.coming = arriving, list(answers)
        self._seconds += time.perf_counter() - begin
        return True

    def come(self) -> list[Reveal]:
        """A forward of those who come: of a part of a long prompt, or their first step, with which
        they are there.
        """
        begin, state = time.perf_counter(), self._arriving
        assert state is not None, "nobody comes"
        if state.encode():
            self._seconds += time.perf_counter() - begin
            return []
        reveals, going = self._step(state, self.coming, begin)
        if going:
            self._join(state, going)
        self._arriving, self.coming = None, []
        self._tidy()
        return reveals

    def _join(self, state: Rows, answers: list[Answer]) -> None:
        """Have the rows of another state among those who are there."""
        if self._state is None:
            self._state = state
        elif not self.answers:  # whose memory is the one to be in
            self._state.cache.join(state.cache)
            state.cache = self._state.cache
            self._state = state
        else:
            how = self._settings_of(len(self.answers) + len(answers))
            there = redrafted(self._state, how)
            there.join(redrafted(state, there.settings))
            self._state = there
        self.answers += answers

    def _settings_of(self, count: int) -> Settings:
        """Those of the state if so many are there."""
        assert self._state is not None
        among = self.answers[0].among
        return self._state.settings if among is None else among(count)

    def step(self) -> list[Reveal]:
        """A forward of those who are there."""
        assert self._state is not None, "nobody is there"
        self._state = redrafted(self._state, self._settings_of(len(self.answers)))
        reveals, self.answers = self._step(self._state, self.answers, time.perf_counter())
        self._tidy()
        return reveals

    def close(self) -> None:
        """Have what is encoded by now kept, where a forward was interrupted."""
        for state in (self._arriving, self._state):
            if self.prompt_cache is not None and state is not None:
                for slot in range(len(state.tokens)):
                    self.prompt_cache.keep(state, slot)

    def give_up(self, failed: Sequence[Answer]) -> None:
        """Let those go, all that are there or all that come, whose forward has failed."""
        if failed is self.coming:
            self.coming, self._arriving = [], None
        else:
            self.answers, self._state = [], None
        self._tidy()

    def leave(self, leaving: Sequence[Answer]) -> None:
        """Let these go before their end."""
        if self._arriving is not None:
            self.coming = self._without(self._arriving, self.coming, leaving)
            self._arriving = self._arriving if self.coming else None
        if self._state is not None:
            self.answers = self._without(self._state, self.answers, leaving)
        self._tidy()

    def _without(
        self, state: Rows, answers: list[Answer], leaving: Sequence[Answer]
    ) -> list[Answer]:
        going = [slot for slot, answer in enumerate(answers) if answer not in leaving]
        return self._go_on(state, answers, going)

    def _go_on(self, state: Rows, answers: list[Answer], going: list[int]) -> list[Answer]:
        """Drop all answers of a state but these; what is encoded of the others is kept."""
        if self.prompt_cache is not None:
            for slot in set(range(len(answers))) - set(going):
                self.prompt_cache.keep(state, slot)
        if len(going) < len(answers):
            going = closed_up(going)
            state.select(going)
        return [answers[slot] for slot in going]

    def _tidy(self) -> None:
        """Give memory back that nobody is in, and nobody comes to."""
        if not len(self):
            self._state = None

    def _step(
        self, state: Rows, answers: list[Answer], begin: float
    ) -> tuple[list[Reveal], list[Answer]]:
        """(what one forward brings, those who go on). begin: when the work for it was begun."""
        reveals, going = [], []
        revealed = state.step()
        now = self._seconds + time.perf_counter() - begin
        for slot, answer in enumerate(answers):
            if answer.prefill_s is None:
                answer.prefill_s = now - answer.began
            fresh, ended = state.committed(slot, len(answer.ids))
            answer.ids += fresh
            text, stopped = "", False
            if answer.in_pieces or ended:
                answer.ids, text, stopped = answer.pieces.extend(answer.ids, ended)
            generation = None
            if ended or stopped:
                generation = _finish(state, slot, answer, stopped, now)
            else:
                going.append(slot)
            if generation is None and not answer.in_pieces:
                continue
            first = int(state.prompt_end[slot])
            [places] = revealed[slot].nonzero()
            drafts = tuple(
                zip((places - first).tolist(), state.tokens[slot, places].tolist(), strict=True)
            )
            if drafts:
                reveals.append(Reveal(answer.row, int(state.nfe[slot]), drafts, text, generation))
        staying = self._go_on(state, answers, going)
        self._seconds += time.perf_counter() - begin
        return reveals, staying


def to_their_ends(answers: Sequence[Answer], prompt_cache: PromptCache | None) -> Iterator[Reveal]:
    """What each forward brings to these answers, which begin and are decoded together.

    What a prompt cache gets of answers that are not taken to their ends it has once the iterator is
    closed.
    """
    running = Running(prompt_cache=prompt_cache)
    running.begin(answers)
    try:
        while running.coming:
            yield from running.come()
        while running.answers:
            yield from running.step()
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
    """The rows of a state of mode "verified" with settings that draft otherwise, and no draft as
    yet; the state itself if they do not, or if its memory is too small.
    """
    if settings is state.settings or settings.shared == state.settings.shared:
        return state
    texts = zip(state.tokens, state.prompt_end.tolist(), strict=True)
    prompts, rows = [text[:end].tolist() for text, end in texts], state.rows.tolist()
    other = _kind(settings)(state.model, prompts, rows, settings, 0)
    if not state.cache.widen(other.cache.capacity):
        return state
    for name in Rows.PER_ROW:
        setattr(other, name, getattr(state, name))
    other.cache = state.cache
    return other


def _finish(state: Rows, slot: int, answer: Answer, stopped: bool, now: float) -> Generation:
    """now: as `Answer.began`, where its last forward ended."""
    first, ids = int(state.prompt_end[slot]), answer.ids
    places = slice(first, first + len(ids))
    if np.isnan(state.entropy[slot, places]).any():
        raise ValueError(f"the logits of {state.model.name} are not numbers: look at its weights")
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
        cached_tokens=int(state.cache.restored[slot]),
    )
