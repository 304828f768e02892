"""vLLM's own schedulers of diffusion models, with what blocks need beyond them."""

from typing import Any

import numpy as np

from setblock.vllm.adaptive import Width, Widths
from setblock.vllm.forms import fitted, only_end
from setblock.vllm.requests import cuts_of, ends_of, holds_of, mask_of, settings_of, width_of

OF_PROMPTS = ("prompt_logprobs_dict", "prompt_token_id_logprobs_dict")


def scheduler(**given: Any) -> Any:
    """The scheduler of a server; vLLM calls this by its name, as it would a class.

    Raises: ValueError if blocks are to be fused with the asynchronous scheduler, which settles a
    step before the last one has said how wide it must be.
    """
    from vllm.v1.core.sched import diffusion_scheduler as theirs  # type: ignore

    config = given["vllm_config"]
    settings = settings_of(config.model_config)
    asynchronous = config.scheduler_config.async_scheduling
    fused = settings.get("fused", False)
    if fused and asynchronous:
        raise ValueError(
            "fused blocks need the synchronous scheduler: --no-async-scheduling, or start the "
            "server with --no-fused"
        )
    base = theirs.DiffusionAsyncScheduler if asynchronous else theirs.DiffusionScheduler
    made = type("BlockScheduler", (Blocks, base), {})(**given)
    if settings.get("adaptive"):
        widest = made.num_spec_tokens
        tokens = {1, max(widest // 4, 1), max(widest // 2, 1), widest}
        copies = [Width(max(widest // 2, 1), masks=False)] if fused else []
        made.widths = Widths(sorted([*map(Width, tokens), *copies]))
    made.fused, made.mask = fused, mask_of(config.model_config)
    return made


class Blocks:
    """In front of a scheduler of vLLM's.

    widths: chooses how much is scheduled of blocks that the load may cut; None is all.
    fused: the worker says how many tokens each request's next forward takes.
    mask: the mask token.
    """

    running: list[Any]
    requests: dict[str, Any]
    structured_output_manager: Any
    max_model_len: int
    num_spec_tokens: int
    widths: Widths | None = None
    fused: bool = False
    mask: int = -1

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Of speculative decoding by name, and vLLM's configuration allows it there alone; but each
        # of our steps is one of theirs, and so an answer's own forwards are in its metrics.
        self.spec_decode_metrics_level = "summary"
        # Of each request whose tokens a step cut: what is left, and all of them.
        self._cut: dict[str, tuple[list[int], list[int]]] = {}
        self._line: Any = None  # room for a line of a grammar's bitmask
        # What is known of the prompts of requests that have said nothing yet, by vLLM's two names.
        self._prompts: dict[str, dict[str, Any]] = {name: {} for name in OF_PROMPTS}

    def schedule(self, *words: Any, **given: Any) -> Any:
        if self.widths is not None:
            drafting = [one for one in self.running if self._drafts(one.sampling_params)]
            width = self.widths.choose(len(self.running), len(drafting))
            before, self._cut = self._cut, {}
            for request in drafting:
                left, whole = before.get(request.request_id, (None, None))
                if whole is not None and request.spec_token_ids is left:  # the step had no room
                    request.spec_token_ids = whole
                self._cut_to(width, request)
        return super().schedule(*words, **given)  # type: ignore[misc]

    def _drafts(self, params: Any) -> bool:
        """Whether a request drafts, and as much as the load allows; of one token, by copies."""
        drafts = width_of(params, self.num_spec_tokens) > 1 or holds_of(params) > 0
        return drafts and cuts_of(params)

    def _cut_to(self, width: Width, request: Any) -> None:
        whole = request.spec_token_ids
        ids = whole[: width.tokens]
        if self.mask in ids and holds_of(request.sampling_params):
            # A mask alone would predict what is known then.
            if not width.masks or ids.count(self.mask) == 1:
                ids = ids[: ids.index(self.mask)]
        request.spec_token_ids = ids
        self._cut[request.request_id] = ids, whole

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        if not self.fused:
            super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
            return
        for request_id, ids in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                ids = ids[: ids.index(-1)] if -1 in ids else ids
                if ids and request.use_structured_output:
                    ids = self._fitted(request, ids)
                request.spec_token_ids = [] if request.is_prefill_chunk else ids

    def _fitted(self, request: Any, ids: list[int]) -> list[int]:
        """The tokens of a request's next forward, where its answer's form has a say: drafted ones
        are fitted to it, and masks stand behind these.
        """
        params, manager = request.sampling_params, self.structured_output_manager
        most, grammar = holds_of(params), request.structured_output_request.grammar
        # As while a model reasons.
        unbounded = manager._get_constraint_bounds(request, ()).grammar_start > 0
        if most == 0 or unbounded or request.is_prefill_chunk:
            return ids
        first = request.num_tokens  # where the block begins
        room = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len) - first
        held = ids[: ids.index(self.mask)] if self.mask in ids else ids
        if self._line is None:
            self._line = manager.backend.allocate_token_bitmask(1)
        ends = sorted(ends_of(params))

        def encode(text: str) -> list[int]:
            return manager.tokenizer.encode(text, add_special_tokens=False)

        tokens = fitted(
            grammar, encode, lambda: only_end(grammar, self._line, ends), held, min(most, room)
        )
        masks = 0
        if tokens[-1] not in ends and (len(ids) > len(held) or tokens != held):
            masks = min(
                width_of(params, most), room - len(tokens), self.num_spec_tokens - len(tokens)
            )
        return [*tokens, *[self.mask] * (masks if masks > 1 else 0)]

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Of answers of a given form, which tokens may come behind each token of a block, up to its
        first that may not, and behind a prompt. (vLLM's own says which may come instead of each.)
        """
        from vllm.v1.core.sched.output import GrammarOutput  # type: ignore

        manager, lines, names = self.structured_output_manager, [], []
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or not request.use_structured_output or request.is_prefill_chunk:
                continue
            tokens = scheduler_output.scheduled_spec_decode_tokens.get(name, [])
            held = tokens[: tokens.index(self.mask)] if self.mask in tokens else tokens
            held = manager.validate_tokens(request, held)
            found = manager.grammar_bitmask(self.requests, [name], {name: [*held, -1]})
            line = np.full((max(len(tokens), 1), found.shape[1]), -1, dtype=np.int32)
            told = found[1 : len(held) + 1] if tokens else found[:1]
            line[: len(told)] = told
            lines.append(line)
            names.append(name)
        return GrammarOutput(names, np.concatenate(lines)) if names else None

    def update_from_output(self, scheduler_output: Any, output: Any) -> Any:
        """A prompt's log-probabilities go with the first tokens of its answer: vLLM knows no step
        that ends a prompt and says nothing.
        """
        for name, held in self._prompts.items():
            held |= getattr(output, name)
            said = zip(output.req_ids, output.sampled_token_ids or [], strict=False)
            told = {one: held.pop(one) for one, ids in said if ids and one in held}
            setattr(output, name, told)
            for gone in held.keys() - self.requests.keys():
                del held[gone]
        return super().update_from_output(scheduler_output, output)  # type: ignore[misc]

    def _update_request_with_output(self, request: Any, ids: list[int], **more: Any) -> Any:
        if self.widths is not None:
            self.widths.count(len(ids))
        return super()._update_request_with_output(request, ids, **more)  # type: ignore[misc]
