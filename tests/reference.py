"""Slow and obvious versions: the specification that the package is tested against."""

import torch

from setblock.masks import Layout


def decode(model, prompt: list[int], settings, row: int = 0) -> tuple[list[int], int, list[int]]:
    """(answer, forwards, forward that revealed each token) of one row, with no cache at all."""
    sbd = settings.mode == "sbd"
    eos = frozenset() if settings.ignore_eos else model.eos_token_ids
    answer, revealed_at, forwards = [], [], 0
    while True:
        start = len(prompt) + len(answer)
        size = settings.block_size if sbd else 1
        block, steps = [model.mask_token_id] * size, [0] * size
        while any(
            eligible := [
                token == model.mask_token_id
                and len(answer) + i < settings.max_new_tokens
                and eos.isdisjoint(block[:i])
                for i, token in enumerate(block)
            ]
        ):
            forwards += 1
            text = prompt + answer + (block if sbd else [])
            logits = model.forward(torch.tensor([text]), _layout(len(text), start))
            # A mask predicts itself; without masks the last token predicts the next.
            logits = logits[:, -size:]
            masked = torch.tensor([eligible])
            reveal = settings.solver.reveal(logits, masked) if sbd else masked
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
