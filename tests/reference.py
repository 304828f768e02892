"""Slow and obvious versions: the specification that the package is tested against."""

import numpy as np
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

    size = settings.block_size if sbd else 1
    block, steps = [], []
    while True:
        start = len(prompt) + len(answer)
        # A block that slides takes along what is revealed behind a gap, and ends at the limit.
        room = settings.max_new_tokens - len(answer) if settings.slide else size
        block += [model.mask_token_id] * (min(size, room) - len(block))
        steps += [0] * (len(block) - len(steps))
        by_token, seed, asked = not sbd, settings.slide or settings.next_token_seed, 0
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
            position = torch.arange(start, start + len(block))[None]
            rows = torch.tensor([row])
            if sbd and model.chain is not None:
                logits = chained(model, text, block, logits, exact, settings.sampler, row)
            chosen = settings.sampler.pick(logits, rows, position)
            # A seeded first block gets its first token from the prompt's own forward.
            alone = exact == 0 and not answer and not settings.slide
            if not by_token and not alone:
                bound = float("inf") if settings.fallback is None else settings.fallback
                by_token = bool(masked.any()) and not bool((entropy(logits)[masked] <= bound).any())
                if not by_token:
                    told = logits.clone()
                    if exact is not None:  # to the solver it is certain, and one token revealed
                        masked[0, exact], told[0, exact] = True, -torch.inf
                        told[0, exact, chosen[0, exact]] = 0
                    places = (position - len(prompt)).numpy(), np.array([asked])
                    reveal |= settings.solver.reveal(Predictions(told, *places), masked)
                    asked += 1
            for i in reveal[0].nonzero()[:, 0].tolist():
                block[i], steps[i] = int(chosen[0, i]), forwards
            if settings.slide:
                break
        final = [*block, model.mask_token_id].index(model.mask_token_id)
        for token, step in zip(block[:final], steps[:final], strict=True):
            answer.append(token)
            revealed_at.append(step)
            stopped = any(stop in model.decode(answer) for stop in settings.stop)
            if stopped or token in eos or len(answer) == settings.max_new_tokens:
                # Forwards after the last of these served only what is cut off here.
                return answer, max(revealed_at), revealed_at
        block, steps = block[final:], steps[final:]


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


def chained(model, text: list[int], block: list[int], logits, exact, sampler, row: int):
    """A block's logits by a model with a chain: each slot's given the token before it.

    exact: the slot whose distribution is the next-token one, None for none.
    """
    logits, before = logits.clone(), text[-1]
    for place, (token, hidden) in enumerate(
        zip(block, _hidden(model, text, block)[len(text) :], strict=True)
    ):
        if place != exact:
            scores = _scores(model, logits[0, place], hidden, before)
            ids = list(scores)
            mass = logits[0, place].softmax(-1)[ids].sum()
            among = torch.tensor([scores[one] for one in ids]).softmax(-1)
            new = logits[0, place].softmax(-1)
            new[ids] = among * mass
            logits[0, place] = new.log()
        position = torch.tensor([[len(text) + place]])
        [[said]] = sampler.pick(logits[:, place : place + 1], torch.tensor([row]), position)
        before = int(said) if token == model.mask_token_id else token
    return logits


def joined(model, prompt: list[int], size: int) -> list[int]:
    """What a model with a chain drafts greedily behind a prompt and the token after it.

    From a block of `size` masks that sees the prompt alone, of which the first gives nothing.
    """
    block = [model.mask_token_id] * size
    text = model.forward(torch.tensor([prompt]), _layout(len(prompt), len(prompt)))
    [logits], hidden = block_logits(model, prompt, block), _hidden(model, prompt, block)
    words = [int(text[0, -1].argmax())]
    for place in range(1, size):
        scores = _scores(model, logits[place], hidden[len(prompt) + place], words[-1])
        words.append(max(scores, key=lambda token, scores=scores: scores[token]))
    return words[1:]


def _hidden(model, text: list[int], block: list[int]):
    """What the head reads of each token of a text and of the slots behind it."""
    tokens = torch.tensor([text + block])
    layout = _layout(tokens.shape[1], len(text))
    mask = attention_mask(model.network, layout, layout)
    inputs = {"input_ids": tokens, "position_ids": layout.position, "attention_mask": mask}
    with torch.no_grad(), gated.opened(model.network, layout, layout) as told:
        return model.network(**inputs, output_hidden_states=True, **told).hidden_states[-1][0]


def _scores(model, logits, hidden, before: int) -> dict[int, float]:
    """What a chain makes of a slot's likeliest tokens, given the token before it."""
    chain, everything = model.chain, torch.arange(len(logits))
    embedding = model.network.get_input_embeddings()(everything).detach()  # some scale it
    normed, word = (
        vector / (vector.pow(2).mean() + torch.finfo().eps).sqrt()
        for vector in (hidden, embedding[before])
    )
    inner = chain.slot.weight @ normed + chain.slot.bias + chain.before.weight @ word
    direction = chain.out.weight @ (inner * inner.sigmoid())
    best = logits.topk(min(CANDIDATES, len(logits))).indices.tolist()
    return {token: float(logits[token] + embedding[token] @ direction) for token in best}


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
