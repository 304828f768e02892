"""Slow and obvious versions: the specification that the package is tested against."""

import torch

from setblock.masks import Layout


def decode(model, prompt: list[int], settings, row: int = 0) -> tuple[list[int], int, list[int]]:
    """(answer ids, forwards, forward that revealed each id): one row, no cache, the whole text every time."""
    block_size = settings.block_size if settings.mode == "sbd" else 0
    eos = set() if settings.ignore_eos else model.eos_token_ids
    mask, limit = model.mask_token_id, settings.max_new_tokens
    answer: list[int] = []
    revealed_at: list[int] = []
    forwards = 0
    while True:
        start = len(prompt) + len(answer)
        block, steps = [mask] * block_size, [0] * block_size
        while True:
            forwards += 1
            text = prompt + answer + block
            logits = model.forward(torch.tensor([text]), _layout(len(text), start))[0]
            if not block_size:
                position = torch.tensor([[start]])
                block = settings.sampler.pick(logits[-1:][None], torch.tensor([row]), position)[0].tolist()
                steps = [forwards]
                break
            first_eos = min((i for i, t in enumerate(block) if t in eos), default=block_size)
            open_slots = [
                token == mask and len(answer) + i < limit and i < first_eos
                for i, token in enumerate(block)
            ]
            if not any(open_slots):
                forwards -= 1  # nothing was left to reveal: this forward is not part of the method
                break
            reveal = settings.solver.reveal(logits[None, start:], torch.tensor([open_slots]))[0]
            position = torch.arange(start, len(text))[None]
            chosen = settings.sampler.pick(logits[None, start:], torch.tensor([row]), position)[0]
            for i in reveal.nonzero()[:, 0].tolist():
                block[i], steps[i] = int(chosen[i]), forwards
        for token, step in zip(block, steps, strict=True):
            answer.append(token)
            revealed_at.append(step)
            text = model.decode(answer)
            if token in eos or len(answer) == limit or any(stop in text for stop in settings.stop):
                return answer, revealed_at and max(revealed_at), revealed_at


def _layout(length: int, start: int) -> Layout:
    position = torch.arange(length)[None]
    noisy = position >= start
    return Layout(
        position=position,
        horizon=torch.where(noisy, start, position + 1),
        block=torch.where(noisy, start, -1),
        document=torch.zeros_like(position),
    )
