"""Rows of several turns: a turn's noisy blocks know nothing of what comes behind its end."""

import json
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objective import MASK, VOCAB, losses, random_text, run
from trainers import MASK as TRAINED_MASK
from trainers import logged, steps, trainer, weights
from transformers import LlamaConfig, LlamaForCausalLM

from setblock import objective
from setblock.masks import WholeRows, flex_block_mask, training_layout, visible
from setblock.objective import IGNORE

END, BREAK = 1, 2  # an end token and the template's line break behind it


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def chat(seed: int, *turns: tuple[int, int, list[int]]) -> tuple[list[int], list[int]]:
    """(tokens, labels) of turns (length of what is asked, length of what is said, its ending)."""
    tokens, labels = [], []
    for number, (asked, said, ending) in enumerate(turns):
        question = random_text(asked, seed + 2 * number)
        answer = random_text(said, seed + 2 * number + 1) + ending
        tokens += question + answer
        labels += [IGNORE] * asked + answer
    return tokens, labels


def batch(*rows_of_chats):
    """(tokens, labels, position, document) of rows of (tokens, labels)."""
    lengths = [[len(tokens) for tokens, _ in row] for row in rows_of_chats]
    length, most = max(map(sum, lengths)), max(map(len, lengths))
    places = objective.document_places(
        torch.tensor([row + [0] * (most - len(row)) for row in lengths]), length
    )

    def column(number: int, padding: int):
        rows = [[*chain(*(chat[number] for chat in row))] for row in rows_of_chats]
        return torch.tensor([row + [padding] * (length - len(row)) for row in rows])

    return column(0, 0), column(1, IGNORE), *places


def turns_of(labels: list[int]) -> list[tuple[int, int]]:
    """(first, behind the last) of each run of labels, a line break behind an end left out."""
    found, first = [], None
    for place, label in enumerate([*labels, IGNORE]):
        if label != IGNORE and first is None:
            first = place
        elif label == IGNORE and first is not None:
            inner = place < len(labels)
            said = labels[first:place][-3:]
            behind = place - (said[::-1].index(END) if inner and END in said else 0)
            found.append((first, behind))
            first = None
    return found


@torch.no_grad()
def brute_force(network, text, labels, masked, block_size, fill):
    """(MATP nats, labels): every block of every turn in a forward of its own.

    The clean text before it, then what of the block the turn holds; behind the last of it more of
    its end token where it ends in one, unless the next turn begins before the block would end.
    """
    nats, count = 0.0, 0
    turns = turns_of(labels)
    for number, (first, behind) in enumerate(turns):
        before = turns[number - 1][1] if number else 0
        for grid in range(first // block_size * block_size, behind, block_size):
            stop = min(grid + block_size, len(text))
            start = max(grid, before)
            noisy = [text[i] for i in range(start, min(stop, behind))]
            wanted = [labels[i] for i in range(start, min(stop, behind))]
            later = number + 1 < len(turns) and turns[number + 1][0] < stop
            inner = any(label == IGNORE for label in labels[behind:])
            if behind <= stop and text[behind - 1] == END and inner and not later:
                added = min(fill, stop - behind)
                noisy += [END] * added
                wanted += [END] * added
            block = [
                MASK if masked[start + i] and label != IGNORE else token
                for i, (token, label) in enumerate(zip(noisy, wanted, strict=True))
            ]
            end = start + len(block)
            sees = torch.ones(end, end, dtype=torch.bool).tril()
            sees[start:, start:] = True
            log_p = network(
                input_ids=torch.tensor([text[:start] + block]), attention_mask=sees[None, None]
            ).logits[0]
            for i, (token, label) in enumerate(zip(block, wanted, strict=True)):
                if token == MASK:
                    nats -= log_p[start + i].log_softmax(-1)[label].item()
                    count += 1
    return nats, count


CHATS = [
    chat(1, (4, 6, [END, BREAK]), (7, 5, [END, BREAK]), (6, 4, [END])),
    chat(20, (2, 3, [END]), (1, 3, [END]), (9, 1, [])),
    chat(40, (0, 5, []), (3, 4, [])),
    chat(60, (5, 2, [END, BREAK]), (4, 0, [])),
    chat(80, (0, 1, [END, BREAK, BREAK]), (12, 2, [END, BREAK])),
    # The end of another turn, and of another text, within three tokens of a turn's last.
    chat(100, (3, 2, [END]), (1, 1, []), (5, 1, [END])),
    chat(120, (0, 1, []), (5, 2, [])),
]


@pytest.mark.parametrize("fill", [0, 2, 15])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 16])
def test_losses_are_those_of_one_turn_and_block_at_a_time(network, block_size, fill):
    masks = [objective.draw_noise(0, 0, i, len(text))[1] for i, (text, _) in enumerate(CHATS)]
    nats, count = map(
        sum,
        zip(
            *(
                brute_force(network, text, labels, mask.tolist(), block_size, fill)
                for (text, labels), mask in zip(CHATS, masks, strict=True)
            ),
            strict=True,
        ),
    )
    for rows in ([[i] for i in range(7)], [[3, 1], [0, 6], [4, 2, 5]], [[4, 3, 2, 5, 6, 1, 0]]):
        parts = batch(*([CHATS[i] for i in row] for row in rows))
        masked = torch.zeros_like(parts[0], dtype=torch.bool)
        for line, row in zip(masked, rows, strict=True):
            together = torch.cat([masks[i] for i in row])
            line[: len(together)] = together
        whole = objective.noisy_view(
            *parts, masked, block_size, MASK, ends=frozenset([END]), end_fill=fill
        )
        for view in (whole, objective.drop_idle_blocks(whole)):
            found = losses(run(network, view), view)
            assert found.matp_count == count
            assert found.matp_sum.item() == pytest.approx(nats, abs=1e-3)
        plain = objective.clean_view(*parts)
        clean = slice(whole.num_clean)
        assert torch.equal(whole.labels[:, clean], plain.labels)
        assert torch.equal(whole.tokens[:, clean], plain.tokens)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 6), st.sampled_from([[], [END], [END, BREAK]])),
        min_size=2,
        max_size=4,
    ),
    st.integers(1, 16),
    st.integers(0, 15),
    st.integers(0, 10**6),
)
def test_nothing_said_later_reaches_a_turn(network, turns, block_size, fill, seed):
    text, labels = chat(seed, *turns)
    first, behind = turns_of(labels)[0]
    other = text[:behind] + [5 + (token - 4) % (VOCAB - 5) for token in text[behind:]]
    others = [
        token if label != IGNORE else label for token, label in zip(other, labels, strict=True)
    ]
    _, masked = objective.draw_noise(0, 0, seed, len(text))
    found = []
    for chat_of in ((text, labels), (other, others)):
        parts = batch([chat_of])
        view = objective.noisy_view(
            *parts, masked[None], block_size, MASK, ends=frozenset([END]), end_fill=fill
        )
        turn = slice(view.num_clean + first, view.num_clean + behind)
        found.append((view.matp_labels[0, first:behind], run(network, view)[0, turn]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_turns_by_hand():
    # asked 10 11, said 12 and its end with a line break, asked 20 to 24, said 13 14
    text = [10, 11, 12, END, BREAK, 20, 21, 22, 23, 24, 13, 14]
    labels = [IGNORE] * 2 + [12, END, BREAK] + [IGNORE] * 5 + [13, 14]
    parts = batch([(text, labels)])
    masked = torch.ones(1, 12, dtype=torch.bool)

    def noisy(block_size, fill):
        view = objective.noisy_view(
            *parts, masked, block_size, MASK, ends=frozenset([END]), end_fill=fill
        )
        assert view.filled is not None
        half = slice(12, None)
        return (
            view.matp_labels[0].tolist(),
            view.layout.block[0, half].tolist(),
            view.filled[0].int().tolist(),
            view,
        )

    # The block of 8 in which the turn ends is filled up, and holds nothing that comes behind it.
    wanted, block, filled, view = noisy(8, 15)
    assert wanted == [IGNORE] * 2 + [12] + [END] * 5 + [IGNORE] * 2 + [13, 14]
    assert view.tokens[0, 12:].tolist() == [10, 11] + [MASK] * 6 + [23, 24, MASK, MASK]
    assert block == [0] * 8 + [8] * 4
    assert filled == [0] * 4 + [1] * 4 + [0] * 4
    assert view.rows == WholeRows(12, 8)
    # Filled by two; what is left of the block is one of its own.
    wanted, block, filled, view = noisy(8, 2)
    assert wanted == [IGNORE] * 2 + [12] + [END] * 3 + [IGNORE] * 4 + [13, 14]
    assert block == [0] * 6 + [6] * 2 + [8] * 4
    assert filled == [0] * 4 + [1] * 2 + [0] * 6
    assert view.rows is None
    # The next turn begins in the same block: no fill, and it begins behind the end.
    wanted, block, filled, _ = noisy(16, 15)
    assert wanted == [IGNORE] * 2 + [12, END] + [IGNORE] * 6 + [13, 14]
    assert block == [0] * 4 + [4] * 8
    assert filled == [0] * 12


def test_fill_has_no_teacher_and_no_token_before():
    text = [10, 11, END, 20, END, 22, 23, 24, 13, END]
    labels = [10, 11, END] + [IGNORE] * 5 + [13, END]
    view = objective.noisy_view(
        *batch([(text, labels)]),
        torch.ones(1, 10, dtype=torch.bool),
        8,
        MASK,
        ends=frozenset([END]),
        end_fill=15,
    )
    assert view.matp_labels.tolist() == [[10, 11] + [END] * 6 + [13, END]]
    for one in (view, objective.drop_idle_blocks(view)):
        assert one.teachers([END]).tolist() == [[-1] * 10 + [-1, 0, 1] + [-1] * 5 + [7, 8]]
        assert one.before().tolist() == [[-1] * 10 + [-1, 10, 11] + [-1] * 5 + [24, 13]]
        assert one.fills([END]).nonzero()[:, 1].tolist() == [13, 14, 15, 16, 17]
        assert one.fills([]).nonzero()[:, 1].tolist() == [13, 14, 15, 16, 17], (
            "of turns, so not text"
        )


@given(
    length=st.integers(1, 400),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 150),
    cuts=st.sets(st.integers(0, 399), max_size=12),
)
@settings(deadline=None, derandomize=True, max_examples=25)
def test_block_masks_of_cut_blocks_are_the_dense_rule(length, block_size, window, cuts):
    index = torch.arange(length)[None]
    begins = torch.isin(index, torch.tensor(sorted(cuts), dtype=torch.long))
    layout = training_layout(index, torch.zeros_like(index), block_size, begins)
    starts = sorted({*range(0, length, block_size), *(cut for cut in cuts if cut < length)})
    expected = [max(start for start in starts if start <= place) for place in range(length)]
    assert layout.block[0, length:].tolist() == expected
    assert layout.horizon[0, length:].tolist() == expected
    sees = visible(layout, layout, window)[0, 0]
    mask = flex_block_mask(layout, layout, window)
    tiles = mask.to_dense()[0, 0].bool()
    visited = tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert not (sees & ~visited[: len(sees), : len(sees)]).any()


def conversations(count: int) -> list[dict[str, list[int]]]:
    """Rows of three turns of several lengths that end in the tokenizer's end token, 2."""
    rows = []
    for number in range(count):
        turns = [(3 + (number + i) % 4, 2 + (number * i) % 5, [2, 4]) for i in range(3)]
        ids, labels = chat(100 * number, *turns)
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def test_training_packed_and_apart_is_the_same(tmp_path):
    rows = conversations(8)
    options = {"max_steps": 2, "per_device_train_batch_size": 8, "full_mask_share": 0.5}
    apart = trainer(tmp_path, rows, **options)
    packed = trainer(tmp_path, rows, packing=True, max_length=100, **options)
    kept = trainer(tmp_path, rows, idle_blocks="keep", **options)
    assert int(steps(packed)[0][0].layout.document.max()) > 0
    for run_of in (apart, packed, kept):
        run_of.train()
    for other in (packed, kept):
        for name in ("loss", "ntp_loss", "matp_loss"):
            assert logged(other, name) == pytest.approx(logged(apart, name), abs=1e-5)
        assert (weights(apart) - weights(other)).abs().max() < 1e-5


@pytest.mark.parametrize("fill", [None, 0])
def test_trainer_ends_turns_as_it_ends_rows(tmp_path, fill):
    ids, labels = chat(7, (6, 3, [2, 4]), (30, 3, [2, 4]))
    run_of = trainer(
        tmp_path,
        [{"input_ids": ids, "labels": labels}] * 4,
        end_fill=fill,
        full_mask_share=1.0,
        min_block_size=16,
    )
    [view], _ = steps(run_of)
    added = 15 if fill is None else 0
    assert view.tokens[0, : view.num_clean].tolist() == ids[:-1] + [2] * added
    # the first block holds the first turn and its fill, none of the next question
    first = view.layout.position[0, view.num_clean :] < 16
    noisy = view.tokens[0, view.num_clean :][first & (view.layout.block[0, view.num_clean :] == 0)]
    behind = 6 if fill is None else 0
    assert noisy.tolist() == ids[:6] + [TRAINED_MASK] * (4 + behind)


def test_the_log_tells_text_from_the_fill_behind_it(tmp_path):
    ids, labels = chat(7, (3, 4, [2]))
    rows = [{"input_ids": ids, "labels": labels}] * 4
    run_of = trainer(tmp_path, rows, full_mask_share=1.0, min_block_size=16, max_steps=1)
    [view], _ = steps(run_of)
    batch = next(iter(run_of.get_train_dataloader()))
    run_of.forget()
    with torch.no_grad():
        run_of.compute_loss(run_of.model, batch | {"view": view, "block_size": 16})
        mask = visible(view.layout, view.layout)
        logits = run_of.model(
            input_ids=view.tokens, position_ids=view.layout.position, attention_mask=mask
        ).logits
    totals = run_of._totals["train" if run_of.model.training else "eval"]
    counts = dict(zip(totals.NAMES, totals._parts()[0].tolist(), strict=True))
    assert (counts["text_labels"], counts["matp_labels"]) == (4 * 5, 4 * (5 + 15))
    nats = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), view.labels.masked_fill(view.fills([2]), IGNORE), reduction="none"
    )[:, view.num_clean :]
    assert totals.means()["matp_text_loss"] == pytest.approx(float(nats.sum()) / 20, abs=1e-5)
    by_offset = totals.breakdown()["matp_accuracy_by_offset"]
    assert [at for at, share in enumerate(by_offset) if share is not None] == [3, 4, 5, 6, 7]


def test_accuracy_by_mask_rate_counts_the_fill(tmp_path, monkeypatch):
    def half(seed, epoch, sample_ids, lengths, length, *more):
        return (torch.arange(length) % 2 == 0).expand(len(sample_ids), -1)

    monkeypatch.setattr(objective, "draw_batch_noise", half)
    ids, labels = chat(7, (15, 1, [2, 4]), (40, 1, [2]))  # the first turn is filled up by 14
    rows = [{"input_ids": ids, "labels": labels}] * 4
    run_of = trainer(tmp_path, rows, min_block_size=16, max_steps=1, end_fill=15)
    run_of.train()
    log = (tmp_path / "log.jsonl").read_text().splitlines()
    [rates] = [json.loads(line).get("matp_accuracy_by_mask_rate") for line in log[:1]]
    assert [tenth for tenth, right in enumerate(rates) if right is not None] in ([4], [5])
    assert logged(run_of, "mask_ratio") == [pytest.approx(0.5, abs=0.03)]


def test_mask_rate_counts_the_fill(tmp_path):
    run_of = trainer(
        tmp_path, conversations(4), full_mask_share=1.0, min_block_size=16, max_steps=1
    )
    run_of.train()
    assert logged(run_of, "mask_ratio") == [1.0]
