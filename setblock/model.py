"""One forward of a causal language model over any mix of clean and noisy tokens.

A Model is a network, its tokenizer and its mask token, ready to decode. The network's class is
transformers' own: masks and positions are handed in, no class is copied. `loading.load` makes a
Model out of a name.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from setblock import (
    adapters,
    attention,
    gated,
    graphs,
    kernels,
    machines,
    mask_token,
    norms,
    packed,
    roofline,
)
from setblock.architectures import (
    TESTED,
    attention_mask,
    check_architecture,
    context_of,
    decoding_mask,
    own_attention,
    windows_of,
)
from setblock.cache import CACHE, PrefixCache
from setblock.checkpoint import checked_settings
from setblock.conversations import prepared, refusal
from setblock.graphs import Graphs
from setblock.logits import after_head
from setblock.masks import Layout
from setblock.names import ModelError
from setblock.transfer import to_device
from setblock.unpadded import Line, in_line, line_of

COMPILE = ("on", "kernels", "graphs")
MOST_COMPILED = 512  # query tokens of a forward that is compiled; a prompt gains nothing

Conversation = Sequence[Mapping[str, str]]  # messages of role and content

DEFAULTS = {"mode": "sbd", "solver": "entropy:0.1", "block_size": 16}


class Model:
    """A causal language model, its tokenizer and its mask token, ready to decode."""

    def __init__(
        self,
        network: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "model",
        mask_token_id: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Wrap a network that is already loaded: a PreTrainedModel, or peft's wrapper of one.

        settings: the checkpoint's own, see SETTINGS.
        Effects: switches the network to eval mode, and from transformers' attention, "sdpa" where
        there is one, to `attention.attend` where its class allows that; adds a mask token to both
        where neither has one.
        Raises: ModelError.
        """
        check_architecture(network.config)
        if network.config._attn_implementation == own_attention(network.config):
            network.set_attn_implementation(attention.NAME)  # the same, without its copies
        self.gated = adapters.is_gated(network)
        self.base: str | None = None  # the MODEL that load() put an adapter on, if it did
        settings = checked_settings(settings or {})
        self.network, self.tokenizer, self.name = network.eval(), tokenizer, name
        generation: Any = network.generation_config
        self.eos_token_ids = ends_of(generation, tokenizer)
        self.bos_token_id: int | None = min(_ids(tokenizer.bos_token_id), default=None)
        pad = _ids(tokenizer.pad_token_id) or _ids(network.config.pad_token_id)
        taken = self.eos_token_ids | _ids(tokenizer.bos_token_id) | pad
        self.mask_token_id, self.mask_token_source = mask_token.resolve(
            network, tokenizer, mask_token_id, settings.get("mask_token_id"), taken
        )
        self.vocab_size = len(mask_token.rows_of(network.get_input_embeddings()))
        # Any id that the embedding holds will do where there is no padding token.
        self.pad_token_id = min((i for i in pad if 0 <= i < self.vocab_size), default=0)
        self.context_length = context_of(network.config)
        self.context_note = ""  # why it is shorter than the configuration says
        if self.context_length < network.config.max_position_embeddings:
            self.context_note = ", beyond which its longrope embeddings would change"
        # What decode() leaves out: more than those that the tokenizer has a name for.
        added = {i: one.content for i, one in tokenizer.added_tokens_decoder.items() if one.special}
        self.special_token_ids = frozenset([*tokenizer.all_special_ids, *added])
        self.special_tokens = tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added.values()]))
        self.byte_ids = _byte_ids(tokenizer)
        self.tells: frozenset[int] = frozenset()  # special tokens that decode() does not leave out
        self.trained: bool = settings.get("trained", False)
        self.defaults = {key: settings.get(key, value) for key, value in DEFAULTS.items()}
        # Blocks of a model that was never trained for them are poor text: only if asked for.
        self.chooses_mode = self.trained or "mode" in settings
        if not self.chooses_mode:
            self.defaults["mode"] = "ntp"
        self.slides: bool = settings.get("slide", False)  # its blocks, in mode "sbd"
        self.drafting: dict[str, int] = settings.get("verified", {})
        self.acceptance: float = settings.get("acceptance", roofline.ACCEPTANCE)
        self.acceptance_is_known = "acceptance" in settings
        self._windows = windows_of(network.config)
        self._after_head = after_head(network.config)
        # To look for one anew takes a while; the network alone keeps it alive.
        self._weight = weakref.ref(next(network.parameters()))
        self.weight_bytes = sum(weight.nbytes for weight in network.parameters())
        self.num_parameters = sum(weight.numel() for weight in network.parameters())
        # What joins a draft's tokens, beside a gated adapter that load() put on.
        chain = adapters.chain_of(network)
        self.chain = chain if getattr(network, "setblock_gate", None) is not None else None
        self.told: set[str] = set()  # modes whose fitness was spoken of
        self.packed = False  # whether pack() was called
        self._compiled: Any = None  # `_run` in kernels, once compile() made them
        self._graphs: Graphs | None = None  # likewise, on CUDA
        # Told of each forward with a cache: each row's tokens in it, the queries, a row's logits.
        self.watch: Callable[[list[int], Layout, int], None] | None = None

    @property
    def adapted(self) -> bool:
        """Whether load() put an adapter on."""
        return self.base is not None

    @property
    def author(self) -> str:
        """The MODEL whose next-token text it writes: of a gated adapter the base."""
        return self.base if self.gated and self.base is not None else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint of it says to us, as `write_settings` takes it."""
        return {
            **self.defaults,
            "mode": self.defaults["mode"] if self.chooses_mode else None,
            "mask_token_id": self.mask_token_id,
            "trained": self.trained,
            "acceptance": self.acceptance if self.acceptance_is_known else None,
            "slide": self.slides or None,
            "verified": self.drafting or None,
        }

    @property
    def device(self) -> torch.device:
        weight = self._weight()
        return self.network.device if weight is None else weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def compiled(self) -> bool:
        """Whether compile() was called."""
        return self._compiled is not None or self._graphs is not None

    @property
    def leaves_padding_out(self) -> bool:
        """Whether forwards behind a cache do, of rows of different lengths.

        On a CPU each token costs; elsewhere parting rows costs more than padding, mostly.
        """
        config = self.network.config
        ours = config._attn_implementation == attention.NAME and config.model_type in TESTED
        return ours and self.device.type == "cpu"

    @property
    def replays(self) -> bool:
        """Whether forwards are replayed as graphs, which hold a cache's memory in its place."""
        return self._graphs is not None

    def new_cache(self, batch: int, capacity: int, room: int | None = None) -> PrefixCache:
        """An empty cache for `batch` rows of up to `capacity` tokens, a forward's own included.

        room: how many rows it may come to by `join`, 0 for one that is to join another; None for
        these alone.
        """
        layers = self.network.config.num_hidden_layers
        if self._graphs is not None and room != 0:
            return self._graphs.cache(layers, batch, capacity, room or batch)
        return PrefixCache(layers, batch, capacity)

    def least_bytes(self, tokens: int) -> int:
        """Memory that the weights need, shared ones once, and the keys and values of so many
        tokens. Packed, a head that is the embedding is held twice.
        """
        sizes = self._dimensions
        return self.weight_bytes + 2 * sizes.layers * sizes.cache * tokens * self.dtype.itemsize

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        layout: Layout,
        cache: PrefixCache | None = None,
        logits_at: Int[Tensor, " picked"] | None = None,
    ) -> Float[Tensor, "batch picked vocab"]:
        """Logits in float32, the mask token's own at -inf: it is never generated, in any mode.

        As `forward_to_draft`, without its second part.
        """
        return self.forward_to_draft(tokens, layout, cache, logits_at)[0]

    @torch.no_grad()  # not inference_mode: nobody outside could change its tensors in place
    def forward_to_draft(
        self,
        tokens: Int[Tensor, "batch length"],
        layout: Layout,
        cache: PrefixCache | None = None,
        logits_at: Int[Tensor, " picked"] | None = None,
    ) -> tuple[Float[Tensor, "batch picked vocab"], Float[Tensor, "batch picked width"]]:
        """(logits, what the chain's scores depend on; of width 0 without a chain).

        tokens, layout, logits_at: on the host. The results are on the device.
        layout: the places of `tokens`; with a cache the tokens follow each row's prefix.
        logits_at: indices of the query tokens whose logits are wanted, for all rows; None for all.
        Effects: writes the tokens' keys and values to the cache as scratch.
        Raises: ValueError if they do not fit into the cache.
        """
        some = tokens[0, :0] if logits_at is None else logits_at
        lengths = tokens[:0, 0] if cache is None else cache.lengths
        given = tokens, *layout.tensors(), lengths, some
        run, replayed = self._run, None
        if cache is not None:
            wanted = tokens.shape[1] if logits_at is None else len(logits_at)
            if self.watch is not None:
                self.watch(cache.lengths.tolist(), layout, wanted)
            behind = (cache.lengths > cache.restored).all()  # prompts that have been encoded
            if wanted and tokens.shape[1] <= MOST_COMPILED and behind:
                run, replayed = self._compiled or self._run, self._graphs
            cache.stage(layout)
            if self.leaves_padding_out and (line := line_of(layout)) is not None:
                return self._in_line(run, line, tokens, layout, cache, logits_at)
        whole = logits_at is None
        forward = functools.partial(self._there, run, layout, cache, whole)
        if cache is None or replayed is None:
            return forward(*to_device(self.device, *given))
        kind = whole, gated.noisy_part(layout) if self.gated else None
        logits, context = replayed(forward, given, cache, kind)
        return logits, context

    def _there(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        layout: Layout,
        cache: PrefixCache | None,
        whole: bool,
        tokens: Int[Tensor, "batch length"],
        position: Int[Tensor, "batch length"],
        horizon: Int[Tensor, "batch length"],
        block: Int[Tensor, "batch length"],
        document: Int[Tensor, "batch length"],
        lengths: Int[Tensor, " batch_or_none"],
        picked: Int[Tensor, " some"],
    ) -> tuple[Float[Tensor, "batch picked vocab"], Float[Tensor, "batch picked width"]]:
        """The part of `forward_to_draft` that is the device's, where `tokens` and those after it
        are.

        run: `_run`, or the same compiled. whole: logits of all tokens are wanted, not of some.
        """
        queries = Layout(position, horizon, block, document)
        if cache is None:
            mask = attention_mask(self.network, queries, queries, self._windows)
        else:
            cache.locate(lengths, tokens.shape[1])
            mask = decoding_mask(self.network, queries, cache, self._windows)
        with gated.opened(self.network, layout, queries) as told:
            return run(tokens, position, mask, cache, None if whole else picked, told)

    def _in_line(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        line: Line,
        tokens: Int[Tensor, "batch length"],
        layout: Layout,
        cache: PrefixCache,
        logits_at: Int[Tensor, " picked"] | None,
    ) -> tuple[Float[Tensor, "batch picked vocab"], Float[Tensor, "batch picked width"]]:
        """As `_there`, of a staged forward in a line; where padding stands, another's results."""
        cache.locate(torch.from_numpy(cache.lengths), tokens.shape[1], line)
        mask = decoding_mask(self.network, layout, cache, self._windows)
        queries = layout.map(line.line)
        tokens_at, real = line.tokens.view_as(line.real), line.real
        if logits_at is not None:
            tokens_at, real = tokens_at[:, logits_at], real[:, logits_at]
        needed = tokens_at[real]
        with gated.opened(self.network, queries, queries) as told, in_line(line):
            given = line.line(tokens), queries.position, mask, cache, needed, told
            results = run(*given)
        place = torch.zeros_like(tokens_at)
        place[real] = torch.arange(len(needed))
        logits, context = (result[0, place] for result in results)
        return logits, context

    def _run(
        self,
        tokens: Int[Tensor, "batch length"],
        position: Int[Tensor, "batch length"],
        mask: Any,
        cache: PrefixCache | None,
        logits_at: Int[Tensor, " picked"] | None,
        told: dict[str, Any],
    ) -> tuple[Float[Tensor, "batch picked vocab"], Float[Tensor, "batch picked width"]]:
        """The part of `forward_to_draft` that is the network's."""
        given = {
            "input_ids": tokens,
            "position_ids": position,
            "attention_mask": mask,
            CACHE: cache,
            "use_cache": cache is not None,
            **told,
        }
        if self.chain is None:
            picked = 0 if logits_at is None else logits_at
            logits = self.network(**given, logits_to_keep=picked).logits.float()
            context = logits[..., :0]
        else:
            hidden = self.network.get_decoder()(**given).last_hidden_state
            hidden = hidden if logits_at is None else hidden[:, logits_at]
            logits = self._after_head(self.network.get_output_embeddings()(hidden)).float()
            context = self.chain.context(hidden).float()
        logits[..., self.mask_token_id] = -torch.inf
        return logits, context

    def pack(self) -> None:
        """Lay out the linear layers' weights in the order that a CPU's kernels compute in.

        Forwards of few tokens are quicker then; nothing can be trained or saved any more.
        Raises: ModelError where that is not possible.
        """
        if why := packed.missing(self.device, self.dtype):
            raise ModelError(f"pack: {why}")
        packed.pack(self.network)
        self.packed = True

    def compile(self, how: str = "on") -> None:
        """From now on forwards behind a prompt, of up to MOST_COMPILED tokens a row, are quicker.

        how: "kernels", they run in kernels that torch.compile makes at the first of each kind, one
        token or several, one row or more, of one length or not, and keeps on disk for the next
        process, on CUDA those of one layer for all; "graphs", they are recorded as CUDA graphs and
        replayed from the second of each shape on, see Graphs, and caches keep their memory for the
        next one, and the network's norms become torch's own kernel for good (norms.join); "on",
        kernels, and on CUDA graphs of them.
        Raises: ValueError for another word; ModelError on a CPU without a C++ compiler, and for a
        network that can't be recorded as a graph, as none can on a CPU.
        Hooks put on later, or layers replaced, may not be seen.
        """
        if how not in COMPILE:
            raise ValueError(f"compile must be one of {', '.join(COMPILE)}, got {how!r}")
        on_cuda, compiled, replayed = graphs.on_cuda(self.network), None, None
        if how != "graphs" and (why := kernels.missing(self.device)):
            raise ModelError(why)
        if how == "graphs" or (how == "on" and on_cuda):
            replayed = Graphs(self.network)
            norms.join(self.network)
        if how != "graphs":
            if self.device.type == "cpu":
                gated.to_compile(self.network)
            if on_cuda:
                compiled = kernels.layered(self.network, self._run)
            else:
                compiled = kernels.compiled(self._run)
        self._compiled, self._graphs = compiled, replayed

    def best_spending(self, block_size: int, rows: int, **fixed: Any) -> roofline.Spending:
        """Block length and branches of verified decoding that cost least on such a machine."""
        return roofline.best_spending(
            self._dimensions,
            machines.device_of(self.device, self.dtype),
            block_size,
            rows,
            acceptance=self.acceptance,
            dispatch_s=self._dispatch_s,
            additions_s=roofline.ADDITIONS_S if self.gated and self._graphs is None else 0.0,
            **fixed,
        )

    def worth(self, rows: int) -> float:
        """The chance from which on a drafted token pays on such a machine; see roofline.worth."""
        device = machines.device_of(self.device, self.dtype)
        return roofline.worth(self._dimensions, device, rows, dispatch_s=self._dispatch_s)

    @functools.cached_property
    def _dimensions(self) -> roofline.Dimensions:
        return machines.dimensions_of(self.network.config)

    @property
    def _dispatch_s(self) -> float:
        """Seconds a layer for the Python that drives it; a graph that is replayed needs none."""
        return roofline.DISPATCH_S if self._graphs is None else 0.0

    def encode(self, prompt: str | Conversation, chat: bool = False) -> list[int]:
        """Token ids of a prompt, never empty.

        prompt: a text; with `chat` it is a user's turn, and the model's cue follows. Or a
        conversation, messages of role and content, which the cue follows anyway, unless the last
        one is the assistant's: the model goes on with that.
        Raises: ModelError without a chat template, for a conversation that the template refuses,
        for half of a surrogate pair, or for an empty text without a BOS token.
        """
        plain = isinstance(prompt, str) and not chat
        if isinstance(prompt, str):
            text = prompt if plain else self.in_template([{"role": "user", "content": prompt}])
        else:
            text = self.in_template(prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ModelError(
                f"a prompt must be Unicode text, got the lone surrogate {half!r}"
            ) from None
        # A chat template writes the BOS token itself.
        ids = list(self.tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"])
        if ids:
            return ids
        if self.bos_token_id is None:
            raise ModelError(f"an empty prompt needs a BOS token, and {self.name} has none")
        return [self.bos_token_id]

    def __repr__(self) -> str:
        millions = self.num_parameters / 1e6
        kind, dtype = type(self.network).__name__, str(self.dtype).removeprefix("torch.")
        return (
            f"<setblock.Model {self.name!r}: {kind}, {millions:,.1f} million parameters, {dtype} "
            f"on {self.device}, mode {self.defaults['mode']!r}>"
        )

    def in_template(self, turns: Conversation) -> str:
        """The conversation in the chat template, up to where the model speaks; it goes on with a
        last message that is its own.

        Raises: ModelError without a template, for what are no messages, an unknown role, or a
        template's refusal.
        """
        if self.tokenizer.chat_template is None:
            raise ModelError(
                f"{self.name} has no chat template; only plain prompts work (generate: without "
                "--chat; evaluate, tune, speedup: --plain)"
            )
        for number, turn in enumerate(turns):
            known = isinstance(turn, Mapping) and turn.keys() == {"role", "content"}
            if not (known and all(isinstance(text, str) for text in turn.values())):
                raise ModelError(
                    f"message {number} must have a role and a content, both text, and nothing "
                    f"else, got {turn!r}"
                )
        try:
            messages, ending = prepared(self.tokenizer.chat_template, turns)
        except ValueError as error:
            raise ModelError(str(error)) from None
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **ending))
        except Exception as error:
            raise ModelError(
                f"the chat template of {self.name} refuses the messages: {refusal(error)}"
            ) from None

    def piece(self, token: int) -> str:
        """The text of one token; the name of a special one, which is no part of an answer, and the
        number of one that the tokenizer does not know.
        """
        name = self.tokenizer.convert_ids_to_tokens(token)
        return self.decode([token]) or (f"<token {token}>" if name is None else str(name))

    def decode(self, ids: list[int]) -> str:
        """The text of these tokens, special ones left out, but for those that are told."""
        if self.tells:
            ids = [token for token in ids if token not in self.special_token_ids]
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=not self.tells, clean_up_tokenization_spaces=False
            )
        )

    def telling(self, tokens: Iterable[str]) -> "Model":
        """The same model, whose texts hold these special tokens too, unless they end an answer."""
        ids: Any = self.tokenizer.convert_tokens_to_ids(list(tokens))
        other = copy.copy(self)
        other.tells = frozenset(ids) - self.eos_token_ids
        other.special_token_ids = self.special_token_ids - other.tells
        return other


def ends_of(generation: GenerationConfig | None, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: the generation_config's and the tokenizer's.

    A chat template may end turns with another one than the tokenizer calls its end.
    """
    return _ids(generation and generation.eos_token_id) | _ids(tokenizer.eos_token_id)


def _byte_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens for one byte each, which a tokenizer falls back to where it knows no other."""
    vocabulary = tokenizer.get_vocab()
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocabulary[name] for name in names if name in vocabulary)


def _ids(value: Any) -> frozenset[int]:
    """Token ids out of a setting that may be one, a list of them, or None."""
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)
