"""vLLM's own schedulers of diffusion models, with what blocks need beyond them."""

from typing import Any

from setblock.vllm.adaptive import Width, Widths
from setblock.vllm.requests import commits_always, mask_of, settings_of, width_of


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
    if settings.get("adaptive", False):
        widest = made.num_spec_tokens
        tokens = {1, max(widest // 4, 1), max(widest // 2, 1), widest}
        copies = [Width(max(widest // 2, 1), masks=False)] if fused else []
        made.widths = Widths(sorted([*map(Width, tokens), *copies]))
    made.fused, made.mask = fused, mask_of(config.model_config)
    return made


class Blocks:
    """In front of a scheduler of vLLM's.

    widths: chooses how much of each block is scheduled; None is all.
    fused: the worker says how many tokens each request's next forward takes.
    mask: the mask token.
    """

    running: list[Any]
    num_spec_tokens: int
    widths: Widths | None = None
    fused: bool = False
    mask: int | None = None

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Of speculative decoding by name, and vLLM's configuration allows it there alone; but each
        # of our steps is one of theirs, and so an answer's own forwards are in its metrics.
        self.spec_decode_metrics_level = "summary"
        # Of each request whose tokens a step cut: what is left, and all of them.
        self._cut: dict[str, tuple[list[int], list[int]]] = {}

    def schedule(self, *words: Any, **given: Any) -> Any:
        if self.widths is not None:
            own = [
                width_of(request.sampling_params, self.num_spec_tokens) for request in self.running
            ]
            drafting = [
                one > 1 or commits_always(request.sampling_params)  # then by copies
                for one, request in zip(own, self.running, strict=True)
            ]
            width = self.widths.choose(len(own), sum(drafting))
            before, self._cut = self._cut, {}
            for request in self.running:
                left, whole = before.get(request.request_id, (None, None))
                if whole is not None and request.spec_token_ids is left:  # the step had no room
                    request.spec_token_ids = whole
                self._cut_to(width, request)
        return super().schedule(*words, **given)  # type: ignore[misc]

    def _cut_to(self, width: Width, request: Any) -> None:
        whole = request.spec_token_ids
        ids = whole[: width.tokens]
        if self.mask in ids and commits_always(request.sampling_params):
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
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            if request is not None and not request.is_finished():
                width = ids.index(-1) if -1 in ids else len(ids)
                request.spec_token_ids = [] if request.is_prefill_chunk else ids[:width]

    def _update_request_with_output(self, request: Any, ids: list[int], **more: Any) -> Any:
        if self.widths is not None:
            self.widths.count(len(ids))
        return super()._update_request_with_output(request, ids, **more)  # type: ignore[misc]
