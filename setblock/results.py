"""What decoding gives: answers, and what each forward brought to them."""

from dataclasses import dataclass

from setblock.settings import Settings


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was where it was predicted, as natural logarithms.

    As its entropy this is of the distribution that the token was chosen from, without temperature,
    top_k and the like, but with penalties, biases and form: in modes "ntp" and "verified" the
    next-token one, in mode "sbd" that of the slot, or of a next token where a block begins with
    one.
    top: (token id, log-probability) of the likeliest in its place, the likeliest first; fewer than
    asked for where fewer are possible.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


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
    logprobs: for each token how likely it was, if that was asked for.
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
    logprobs: tuple[TokenLogprob, ...] | None = None

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
    logprobs: of the tokens without a gap since the row's last `Reveal`, if they are asked for.
    """

    row: int
    nfe: int
    drafts: tuple[tuple[int, int], ...]
    text: str
    generation: Generation | None
    logprobs: tuple[TokenLogprob, ...] = ()
