"""Slow and obvious versions: the specification that the package is tested against."""

import torch

from setblock import gated
from setblock.architectures import attention_mask
from setblock.chain import CANDIDATES
from setblock.masks import Layout
from setblock.solvers import Predictions, entropy


def decode(model, prompt: list[int], settings, row: int = 0) -> tuple[list[int], int, list[int]]:
    """(answer, forwards, forward that revealed each token) of one row, with no cache at all."""
    sbd = settings.mode == "sbd"
    eos = frozenset() if settings.ignore_eos else model.eos_token_ids
    answer, revealed_at, forwards = [], [], 0

    def next_logits(text):
        return model.forward(torch.tensor([text]), _layout(len(text), len(text)))[:, -1:]

    while True:
        start = len(prompt) + len(answer)
        size = settings.block_size if sbd else 1
        block, steps = [model.mask_token_id] * size, [0] * size
        by_token, seed = not sbd, settings.next_token_seed
        while any(
            eligible := [
                token == model.mask_token_id
                and len(answer) + i < settings.max_new_tokens
                and eos.isdisjoint(block[:i])
                for i, token in enumerate(block)
            ]
        ):
            forwards += 1
            masked = torch.tensor([eligible])
            text = prompt + answer
            logits = block_logits(model, text, block) if sbd else next_logits(text)
            exact = None  # the slot that next-token decoding fills in this forward
            if by_token:
                exact = eligible.index(True)
            elif seed:
                exact, seed = 0, False
            reveal = torch.zeros_like(masked)
            if exact is not None:
                filled = next_logits(text + block[:exact])
                logits = torch.cat([logits[:, :exact], filled, logits[:, exact + 1 :]], dim=1)
                masked[0, exact], reveal[0, exact] = False, True
            # A seeded first block gets its first token from the prompt's own forward.
            if not by_token and not (exact == 0 and not answer):
                bound = float("inf") if settings.fallback is None else settings.fallback
                by_token = bool(masked.any()) and not bool((entropy(logits)[masked] <= bound).any())
                if not by_token:
                    reveal |= settings.solver.reveal(Predictions(logits), masked)
            position = torch.arange(start, start + size)[None]
            chosen = settings.sampler.pick(logits, torch.tensor([row]), position)
            for i in reveal[0].nonzero()[:, 0].tolist():
                block[i], steps[i] = int(chosen[0, i]), forwards
        for token, step in zip(block, steps, strict=True):
            answer.append(token)
            revealed_at.append(step)
            stopped = any(stop in model.decode(answer) for stop in settings.stop)
            if stopped or token in eos or len(answer) == settings.max_new_tokens:
                # Forwards after the last of these served only what is cut off here.
                return answer, max(revealed_at), revealed_at


def block_logits(model, text: list[int], block: list[int]):
    """What each slot of a noisy block behind a text predicts for itself."""
    tokens = torch.tensor([text + block])
    return model.forward(tokens, _layout(len(text) + len(block), len(text)))[:, len(text) :]


def _layout(length: int, start: int) -> Layout:
    """Clean tokens before `start`, one noisy block from there on."""
    position = torch.arange(length)[None]
    noisy = position >= start
    return Layout(
        position=position,
        horizon=torch.where(noisy, start, position + 1),
        block=torch.where(noisy, start, -1),
        document=torch.zeros_like(position),
    )


def regrets(model, prompt: list[int], answer: list[int], settings, row: int = 0) -> list[tuple]:
    """For each token of an answer (next-token decoding's there, how much higher its score is)."""
    found = []
    for place, token in enumerate(answer):
        text = prompt + answer[:place]
        logits = model.forward(torch.tensor([text]), _layout(len(text), len(text)))[:, -1:]
        position = torch.tensor([[len(text)]])
        [[scores]] = settings.sampler.perturbed(logits, torch.tensor([row]), position)
        found.append((int(scores.argmax()), float(scores.max() - scores[token])))
    return found


def joined(model, prompt: list[int], size: int) -> list[int]:
    """What a model with a chain drafts greedily behind a prompt and the token after it.

    From a block of `size` masks that sees the prompt alone, of which the first gives nothing.
    """
    length = len(prompt) + size
    tokens = torch.tensor([[*prompt, *[model.mask_token_id] * size]])
    layout = _layout(length, len(prompt))
    mask = attention_mask(model.network, layout, layout)
    inputs = {"input_ids": tokens, "position_ids": layout.position, "attention_mask": mask}
    with torch.no_grad(), gated.opened(model.network, layout, layout) as told:
        output = model.network(**inputs, output_hidden_states=True, **told)
    embedding = model.network.get_input_embeddings().weight
    chain, words = model.chain, [int(output.logits[0, len(prompt) - 1].argmax())]
    for place in range(len(prompt) + 1, length):
        hidden, logits = output.hidden_states[-1][0, place], output.logits[0, place].clone()
        logits[model.mask_token_id] = -torch.inf
        normed, before = (
            vector / (vector.pow(2).mean() + torch.finfo().eps).sqrt()
            for vector in (hidden, embedding[words[-1]])
        )
        inner = chain.slot.weight @ normed + chain.slot.bias + chain.before.weight @ before
        direction = chain.out.weight @ (inner * inner.sigmoid())
        best = logits.topk(min(CANDIDATES, len(logits))).indices.tolist()
        scores = {token: float(logits[token] + embedding[token] @ direction) for token in best}
        words.append(max(scores, key=lambda token, scores=scores: scores[token]))
    return words[1:]


def looked_up(text: list[int], count: int, most: int) -> tuple[list[int], int]:
    """(the `count` tokens behind the latest of the longest matches of the text's end, its length).

    A match has at most `most` tokens; what was copied beyond the text's end is copied on.
    """
    best = 0, 0
    for place in range(1, len(text)):
        run = 0
        while run < min(most, place) and text[place - 1 - run] == text[-1 - run]:
            run += 1
        best = max(best, (run, place))
    run, place = best
    copied = list(text)
    for offset in range(count):
        copied.append(copied[place + offset])
    return copied[len(text) :], run
