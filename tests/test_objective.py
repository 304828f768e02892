"""Eq. 14: views, noise and losses, against hand-made and brute-force versions of the same sums."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from setblock import objective
from setblock.masks import visible
from setblock.objective import IGNORE

MASK = 3
VOCAB = 29


# SmolLM2 is a Llama with tied embeddings and three query heads to a key head.
SHAPES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    ),
    "smollm2": (
        LlamaForCausalLM,
        LlamaConfig,
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"tie_word_embeddings": True},
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def network(request):
    torch.manual_seed(0)
    kind, config, own = SHAPES[request.param]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **own}
    # sharp outputs, so that a wrong mask shows
    return kind(config(vocab_size=VOCAB, initializer_range=0.3, **sizes)).eval()


def rows(*documents_of_rows):
    """(tokens, labels, position, document) of rows of (document, prompt length) pairs."""
    lengths = [[len(tokens) for tokens, _ in row] for row in documents_of_rows]
    length, most = max(map(sum, lengths)), max(map(len, lengths))
    padded = torch.tensor([row + [0] * (most - len(row)) for row in lengths])
    position, document = objective.document_places(padded, length)
    tokens = torch.zeros(len(lengths), length, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    for b, row in enumerate(documents_of_rows):
        start = 0
        for text, prompt in row:
            end = start + len(text)
            tokens[b, start:end] = torch.tensor(text)
            labels[b, start + prompt : end] = torch.tensor(text[prompt:])
            start = end
    return tokens, labels, position, document


def random_text(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def run(network, view):
    return network(
        input_ids=view.tokens,
        position_ids=view.layout.position,
        attention_mask=visible(view.layout, view.layout),
    ).logits


def losses(logits, view):
    labels = view.labels[view.supervised]
    nats = cross_entropy(logits[view.supervised], labels, reduction="none")
    return objective.losses(nats, view)


@torch.no_grad()
def brute_force(network, text, prompt, masked, block_size, drop_ragged_block=False):
    """Eq. 14 of one document: plain forwards of the text, then of one prefix + block at a time."""
    text_ids = torch.tensor([text])
    log_p = network(input_ids=text_ids).logits[0].log_softmax(-1)
    targets = range(max(prompt, 1), len(text))
    ntp = -sum(log_p[t - 1, text[t]].item() for t in targets)
    matp, num_masked = 0.0, 0
    for start in range(0, len(text), block_size):
        end = min(start + block_size, len(text))
        if drop_ragged_block and end - start < block_size:
            continue
        noisy = [i for i in range(start, end) if masked[i] and i >= prompt]
        block = [MASK if i in noisy else text[i] for i in range(start, end)]
        # causal over the clean prefix; the block sees the prefix and all of itself
        sees = torch.ones(end, end, dtype=torch.bool).tril()
        sees[start:, start:] = True
        log_p = network(
            input_ids=torch.tensor([text[:start] + block]), attention_mask=sees[None, None]
        ).logits[0]
        log_p = log_p.log_softmax(-1)
        matp -= sum(log_p[i, text[i]].item() for i in noisy)
        num_masked += len(noisy)
    return ntp, len(targets), matp, num_masked


def test_four_tokens_by_hand():
    # Text 10 11 12 13, k = 2, noise masks positions 0, 2 and 3:
    #   clean   10 11 12 13   noisy   m 11 | m m
    # Eq. 14 = -log p(11|10) - log p(12|10 11) - log p(13|10 11 12)      clean rows 0, 1, 2, shifted
    #          -log p(10|m 11) - log p(12|10 11, m m) - log p(13|10 11, m m)   noisy rows 0, 2, 3
    # Row r of the table below gives its label probability 1/(r + 2), so that
    #   NTP  = log 2 + log 3 + log 4 = log 24                 (rows 0, 1, 2 of the doubled sequence)
    #   MATP = log 6 + log 8 + log 9 = log 432                (rows 4, 6, 7)
    masked = torch.tensor([[True, False, True, True]])
    view = objective.noisy_view(*rows([([10, 11, 12, 13], 0)]), masked, 2, MASK)
    assert view.tokens.tolist() == [[10, 11, 12, 13, MASK, 11, MASK, MASK]]
    labels = [11, 12, 13, IGNORE, 10, IGNORE, 12, 13]
    assert view.labels.tolist() == [labels]
    assert view.labels[:, : view.num_clean].tolist() == [labels[:4]]
    assert view.matp_labels.tolist() == [labels[4:]]
    assert view.layout.position.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]

    probabilities = torch.zeros(1, 8, 14)
    for r, label in enumerate(labels):
        probability = 1 / (r + 2)
        probabilities[0, r] = (1 - probability) / 13
        if label != IGNORE:
            probabilities[0, r, label] = probability
    ntp, ntp_count, matp, matp_count = losses(probabilities.log(), view)
    assert ntp.item() == pytest.approx(math.log(24), abs=1e-5)
    assert matp.item() == pytest.approx(math.log(432), abs=1e-5)
    assert (ntp_count.item(), matp_count.item()) == (3, 3)


@pytest.mark.parametrize("drop_ragged_block", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16])
def test_losses_are_those_of_one_block_at_a_time(network, block_size, drop_ragged_block):
    documents = [(random_text(13, 1), 4), (random_text(7, 2), 0), (random_text(10, 3), 9)]
    expected = torch.zeros(4, dtype=torch.double)
    masks = [objective.draw_noise(0, 0, i, len(text))[1] for i, (text, _) in enumerate(documents)]
    for (text, prompt), masked in zip(documents, masks, strict=True):
        expected += torch.tensor(
            brute_force(network, text, prompt, masked.tolist(), block_size, drop_ragged_block)
        )
    layouts = [
        [[0], [1], [2]],  # one document a row, padded
        [[0, 1], [2]],  # two packed, the third padded
        [[2, 0, 1]],  # all in one row
    ]
    for layout in layouts:
        parts = rows(*([documents[i] for i in row] for row in layout))
        masked = torch.zeros_like(parts[0], dtype=torch.bool)
        for b, row in enumerate(layout):
            together = torch.cat([masks[i] for i in row])
            masked[b, : len(together)] = together
        view = objective.noisy_view(*parts, masked, block_size, MASK, drop_ragged_block)
        actual = losses(run(network, view), view)
        assert torch.tensor(actual, dtype=torch.double).tolist() == pytest.approx(
            expected.tolist(), abs=1e-3
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 14), st.integers(0, 14)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 16),
    st.integers(0, 10**6),
)
def test_idle_blocks_change_no_loss_and_no_gradient(network, row_lengths, block_size, seed):
    parts = rows(
        *(
            [(random_text(n, seed + n), min(prompt, n)) for n, prompt in documents]
            for documents in row_lengths
        )
    )
    lengths = [[n for n, _ in documents] for documents in row_lengths]
    ids = [[seed + 10 * b + i for i in range(len(row))] for b, row in enumerate(lengths)]
    most = max(map(len, lengths))
    padded = [[row + [0] * (most - len(row)) for row in table] for table in (ids, lengths)]
    masked = objective.draw_batch_noise(0, 0, padded[0], padded[1], parts[0].shape[1])
    whole = objective.noisy_view(*parts, masked, block_size, MASK)
    short = objective.drop_idle_blocks(whole)
    gradients, sums = [], []
    for view in (whole, short):
        network.zero_grad()
        logits = network(
            input_ids=view.tokens,
            position_ids=view.layout.position,
            attention_mask=visible(view.layout, view.layout),
        ).logits
        found = losses(logits, view)
        (found.ntp_sum + found.matp_sum).backward()
        sums.append(torch.tensor([value.detach().item() for value in found]))
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert torch.allclose(sums[0], sums[1], atol=1e-3)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-3, rtol=1e-3)


def test_idle_blocks_leave(network):
    # k = 2, prompt of 3: blocks 0 (prompt) and 2 (nothing masked) leave; of row 2 everything does
    parts = rows([(list(range(10, 17)), 3)], [([20, 21, 22], 3)])
    masked = torch.zeros_like(parts[0], dtype=torch.bool)
    masked[0, [0, 3, 6]] = True
    view = objective.drop_idle_blocks(objective.noisy_view(*parts, masked, 2, MASK))
    assert view.tokens[0, 7:].tolist() == [12, MASK, MASK]
    assert view.layout.position[0, 7:].tolist() == [2, 3, 6]
    assert view.layout.block[0, 7:].tolist() == [2, 2, 6]
    assert view.matp_labels.tolist() == [[IGNORE, 13, 16], [IGNORE] * 3]
    assert view.layout.document[1, 7:].tolist() == [-1] * 3
    nothing = objective.noisy_view(*parts, torch.zeros_like(masked), 2, MASK)
    left = objective.drop_idle_blocks(nothing)  # a noisy half all the same, of padding
    assert left.layout.document[:, 7:].tolist() == [[-1], [-1]]
    assert left.labels[:, 7:].tolist() == [[IGNORE], [IGNORE]]


def test_clean_half_is_a_plain_causal_forward(network):
    texts = [random_text(12, 4), random_text(12, 5)]
    parts = rows(*([(text, 0)] for text in texts))
    masked = objective.draw_batch_noise(0, 0, [[0], [1]], [[12], [12]], 12)
    with torch.no_grad():
        plain = network(input_ids=torch.tensor(texts)).logits
    for view in (objective.noisy_view(*parts, masked, 4, MASK), objective.clean_view(*parts)):
        assert (run(network, view)[:, :12] - plain).abs().max() <= 1e-5


def test_next_token_logits_do_not_depend_on_the_noisy_half(network):
    parts = rows([(random_text(12, 6), 2)])
    views = [
        objective.noisy_view(*parts, torch.full((1, 12), masked), 4, MASK)
        for masked in (False, True)
    ]
    assert not torch.equal(views[0].tokens, views[1].tokens)
    clean = [run(network, view)[:, :12] for view in views]
    assert torch.equal(clean[0], clean[1])


def test_clean_view_has_next_token_labels_only():
    view = objective.clean_view(*rows([([10, 11, 12], 1), ([20, 21], 0)], [([13, 14], 0)]))
    assert view.labels.tolist() == [
        [11, 12, IGNORE, 21, IGNORE],  # 12 does not predict 20, the next document's
        [14, IGNORE, IGNORE, IGNORE, IGNORE],
    ]
    assert view.matp_labels.shape == (2, 0)
    logits = torch.zeros(2, 5, 30)
    ntp, ntp_count, matp, matp_count = losses(logits, view)
    assert ntp.item() == pytest.approx(4 * math.log(30), rel=1e-5)
    assert (ntp_count.item(), matp.item(), matp_count.item()) == (4, 0, 0)


def test_packed_documents_and_padding_have_their_places():
    position, document = objective.document_places(torch.tensor([[3, 2], [1, 0]]), 6)
    assert position.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 0, 0, 0]]
    assert document.tolist() == [[0, 0, 0, 1, 1, -1], [0, -1, -1, -1, -1, -1]]


def test_ragged_last_block_is_kept_unless_dropped():
    parts = rows([(list(range(10, 17)), 0), (list(range(20, 23)), 0)])  # 7 = 2 * 3 + 1, 3 = 1 * 3
    masked = torch.ones_like(parts[0], dtype=torch.bool)
    kept = objective.noisy_view(*parts, masked, 3, MASK)
    dropped = objective.noisy_view(*parts, masked, 3, MASK, drop_ragged_block=True)
    assert kept.matp_labels.tolist() == parts[1].tolist()
    assert dropped.matp_labels.tolist() == [[*range(10, 16), IGNORE, 20, 21, 22]]
    assert dropped.tokens[0, 10:].tolist() == [MASK] * 6 + [16] + [MASK] * 3
    assert torch.equal(kept.labels[:, : kept.num_clean], dropped.labels[:, : dropped.num_clean])


@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_first_slots_have_no_loss_where_that_is_asked_for(network, block_size):
    """The same tokens see the same; what is left out are the labels at positions 0, k, 2k ..."""
    documents = [(random_text(13, 1), 4), (random_text(7, 2), 0)]
    parts = rows(documents)
    masked = torch.cat(
        [objective.draw_noise(0, 0, i, len(text))[1] for i, (text, _) in enumerate(documents)]
    )[None]
    whole = objective.noisy_view(*parts, masked, block_size, MASK)
    drafting = objective.noisy_view(*parts, masked, block_size, MASK, first_slot_loss=False)
    assert torch.equal(whole.tokens, drafting.tokens)
    assert torch.equal(whole.labels[:, : whole.num_clean], drafting.labels[:, : drafting.num_clean])
    first = parts[2] % block_size == 0
    assert torch.equal(drafting.matp_labels, whole.matp_labels.masked_fill(first, IGNORE))
    log_p = run(network, whole)[0, whole.num_clean :].log_softmax(-1)
    kept = [i for i, label in enumerate(drafting.matp_labels[0].tolist()) if label != IGNORE]
    nats = -sum(log_p[i, parts[0][0, i]].item() for i in kept)
    idle = objective.drop_idle_blocks(drafting)  # blocks without a label left go as a whole
    for view in (drafting, idle):
        _, _, matp, count = losses(run(network, view), view)
        assert (matp.item(), count.item()) == (pytest.approx(nats, abs=1e-3), len(kept))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 16), st.booleans())
def test_only_labelled_positions_are_masked(labelled, block_size, drop_ragged_block):
    length = len(labelled)
    labelled = torch.tensor([labelled])
    tokens = torch.arange(5, 5 + length)[None]
    labels = tokens.masked_fill(~labelled, IGNORE)
    places = torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long)
    masked = torch.ones_like(labelled)
    view = objective.noisy_view(
        tokens, labels, *places, masked, block_size, MASK, drop_ragged_block
    )
    holds_mask = view.tokens[:, length:] == MASK
    assert torch.equal(view.tokens[:, :length], tokens)
    assert torch.equal(view.matp_labels != IGNORE, holds_mask)
    whole = torch.arange(length)[None] < (length - length % block_size)
    assert torch.equal(holds_mask, labelled & whole if drop_ragged_block else labelled)
    assert torch.equal(view.labels[:, : length - 1], labels[:, 1:])


def test_noise_belongs_to_the_document():
    eta, masked = objective.draw_noise(seed=7, epoch=2, sample_id=41, length=30)
    again = objective.draw_noise(seed=7, epoch=2, sample_id=41, length=30)
    torch.manual_seed(99)  # no global state is read
    assert again[0] == eta
    assert torch.equal(again[1], masked)
    for other in ((8, 2, 41), (7, 3, 41), (7, 2, 42)):
        assert objective.draw_noise(*other, 30)[0] != eta
    # alone in a row, padded, in another order, packed behind another document
    for sample_ids, lengths, row, start in (
        ([[41]], [[30]], 0, 0),
        ([[5], [41]], [[40], [30]], 1, 0),
        ([[41], [5]], [[30], [40]], 0, 0),
        ([[5, 41]], [[17, 30]], 0, 17),
    ):
        batch = objective.draw_batch_noise(7, 2, sample_ids, lengths, 60)
        assert torch.equal(batch[row, start : start + 30], masked)
        assert not batch[0, sum(lengths[0]) :].any()


def test_draws_are_pinned():
    """The same in every process, on every rank and in the next release: a resume needs that."""
    eta, masked = objective.draw_noise(seed=7, epoch=2, sample_id=40, length=9)
    assert eta == pytest.approx(0.12823361158370972)
    assert masked.int().tolist() == [1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert [objective.draw_block_size(7, step) for step in range(6)] == [10, 14, 6, 14, 12, 8]


def test_mask_rates_are_uniform_and_met():
    drawn = [objective.draw_noise(0, 0, sample, 400) for sample in range(2000)]
    eta = torch.tensor([rate for rate, _ in drawn])
    rate = torch.stack([masked for _, masked in drawn]).float().mean(dim=1)
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded with probability 0.01; the draws are fixed.
    distance = (eta.sort().values - (torch.arange(2000) + 0.5) / 2000).abs().max()
    assert distance < 1.63 / 2000**0.5
    deviation = (rate - eta) / (eta * (1 - eta) / 400).sqrt().clamp(min=1e-3)
    assert deviation.std() == pytest.approx(1, abs=0.1)
    # within a document each position has the same chance, the first included
    by_position = torch.stack([masked for _, masked in drawn]).float().mean(dim=0)
    assert (by_position - 0.5).abs().max() < 0.05


def test_block_sizes_are_uniform_over_the_range():
    drawn = [objective.draw_block_size(0, step) for step in range(1500)]
    counts = torch.bincount(torch.tensor(drawn), minlength=17)
    assert counts[:2].tolist() == [0, 0]
    assert counts[2:].min() > 70  # 100 expected, 9.7 the standard deviation
    assert drawn != [objective.draw_block_size(1, step) for step in range(1500)]
    assert objective.draw_block_size(0, 5, low=4, high=4) == 4


def test_impossible_block_sizes_are_refused():
    with pytest.raises(ValueError, match="1 <= low <= high, got low=5, high=4"):
        objective.draw_block_size(0, 0, 5, 4)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        objective.noisy_view(*rows([([10, 11], 0)]), torch.ones(1, 2, dtype=torch.bool), 0, MASK)


def test_full_mask_share_masks_whole_documents():
    drawn = [
        objective.draw_noise(0, 0, sample, 30, objective.Noise(0.25)) for sample in range(2000)
    ]
    full = [masked.all().item() and eta == 1 for eta, masked in drawn]
    assert sum(full) / 2000 == pytest.approx(0.25, abs=0.03)
    for sample, (eta, masked) in enumerate(drawn):  # the others are what they were
        if not full[sample]:
            before = objective.draw_noise(0, 0, sample, 30)
            assert before[0] == eta
            assert torch.equal(before[1], masked)
    assert all(
        objective.draw_noise(0, 0, sample, 5, objective.Noise(1.0))[1].all() for sample in range(50)
    )
    batch = objective.draw_batch_noise(0, 0, [[3]], [[8]], 10, objective.Noise(1.0))
    assert batch.tolist() == [[True] * 8 + [False] * 2]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_suffix_masks_are_what_decoding_from_the_left_leaves(block_size):
    for shares in ((2.0, 0.0), (0.0, -1.0)):
        with pytest.raises(ValueError, match=r"_mask_share must lie in 0\.\.1, got (2\.0|-1\.0)"):
            objective.Noise(*shares)
    with pytest.raises(ValueError, match=r"must sum to at most 1, got 0\.7 and 0\.7"):
        objective.Noise(0.7, 0.7)
    noise = objective.Noise(full_mask_share=0.2, suffix_mask_share=0.5)
    firsts, kinds = [], []
    eta, masked = objective.draw_noise(0, 0, 7, 18, objective.Noise(0.0, 1.0), block_size)
    assert eta == pytest.approx(masked.float().mean())
    for sample in range(1000):
        masked = objective.draw_noise(0, 0, sample, 18, noise, block_size)[1]
        blocks = [masked[start : start + block_size] for start in range(0, 18, block_size)]
        # once a block's first mask has come, all that follows is masked
        suffixes = all((block.long().diff() >= 0).all() for block in blocks)
        kinds.append((masked.all().item(), suffixes))
        if suffixes and not masked.all() and block_size > 1:
            firsts.append(int((~blocks[0]).sum()))
    assert sum(full for full, _ in kinds) >= 150
    if block_size > 1:
        assert sum(suffix for _, suffix in kinds) / 1000 == pytest.approx(0.7, abs=0.1)
        assert set(firsts) >= set(range(block_size))
    again = objective.draw_batch_noise(0, 0, [[4, 5]], [[7, 9]], 20, noise, block_size)
    alone = [objective.draw_noise(0, 0, i, n, noise, block_size)[1] for i, n in ((4, 7), (5, 9))]
    assert torch.equal(again[0, :16], torch.cat(alone))


def test_masked_only_leaves_the_masked_labels():
    view = objective.noisy_view(
        *rows([([10, 11, 12, 13], 1)]), torch.ones(1, 4, dtype=torch.bool), 2, MASK
    )
    alone = view.masked_only()
    assert alone.labels[:, : alone.num_clean].tolist() == [[IGNORE] * 4]
    assert torch.equal(alone.matp_labels, view.matp_labels)
    assert view.labels[:, : view.num_clean].tolist() == [[11, 12, 13, IGNORE]]


def test_fill_is_not_asked_for_of_the_next_token_half():
    # 9 ends the text, two more fill its block up: the first end is learned, the fill is not
    parts = rows([([10, 11, 9, 9, 9], 1)])
    view = objective.noisy_view(*parts, torch.ones(1, 5, dtype=torch.bool), 2, MASK)
    without = view.without_next([9])
    assert without.labels[:, : without.num_clean].tolist() == [[11, 9, IGNORE, IGNORE, IGNORE]]
    assert torch.equal(without.matp_labels, view.matp_labels)


def test_teachers_are_the_clean_tokens_before():
    # Two packed documents of 4 and 3 tokens, all masked; no teacher for a document's first token.
    parts = rows([([10, 11, 12, 13], 0), ([20, 21, 22], 0)])
    view = objective.noisy_view(*parts, torch.ones(1, 7, dtype=torch.bool), 2, MASK)
    assert view.teachers().tolist() == [[-1] * 7 + [-1, 0, 1, 2, -1, 4, 5]]
    masked = torch.tensor([[False, False, False, True, False, True, False]])
    short = objective.drop_idle_blocks(objective.noisy_view(*parts, masked, 2, MASK))
    # left: block 1 of the first document (positions 2, 3), block 0 of the second (0, 1)
    assert short.layout.position[0, 7:].tolist() == [2, 3, 0, 1]
    assert short.teachers().tolist() == [[-1] * 7 + [-1, 2, -1, 4]]
    # 9 ends a text, two more fill its block up: what comes behind an end has no teacher
    parts = rows([([10, 11, 9, 9, 9], 0)])
    view = objective.noisy_view(*parts, torch.ones(1, 5, dtype=torch.bool), 2, MASK)
    assert view.teachers().tolist() == [[-1] * 5 + [-1, 0, 1, 2, 3]]
    assert view.teachers([9]).tolist() == [[-1] * 5 + [-1, 0, 1, -1, -1]]
