"""The chain that joins a draft's tokens: what it computes, how it learns, what it drafts."""

import copy
import json
from typing import Any

import pytest
import reference
import torch
from conftest import gated_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import load
from safetensors.torch import load_file
from test_adapters import adapted, batches, gated_trainer, gradients
from test_decode import SLOW, assert_equals_oracle, options, prompts, with_ends
from torch.nn.functional import cross_entropy
from trainers import MASK, network
from trainings import one_line, train

from setblock import adapters, branches, chain
from setblock import state as batch_state
from setblock.architectures import attention_mask
from setblock.branches import BranchDrafts
from setblock.chain import Chain, conditioned, joined
from setblock.checkpoint import write_settings
from setblock.generation import generate, settings_for
from setblock.masks import CLEAN
from setblock.names import ModelError
from setblock.sampling import Sampler
from setblock.verified import SolverDrafts

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    # peft asks for it on every wrap.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

PROMPTS = [[5, 9, 30], [7, 7, 12, 40, 8], [6] * 9]


def random_chain(hidden_size=6, width=4):
    torch.manual_seed(3)
    made = Chain(hidden_size, width)
    torch.nn.init.normal_(made.out.weight)
    return made


def chained(width=8):
    """A network with a gated adapter and a chain, both at random."""
    made: Any = adapters.attach(network(), "base", "gated", MASK, 4, 8, chain_width=width)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return made


def likeliest(scores, ids, slot):
    return ids.gather(-1, scores.argmax(dim=-1, keepdim=True))[..., 0]


def test_a_new_chain_changes_no_order():
    torch.manual_seed(0)
    fresh, embedding = Chain(6, 4), torch.nn.Embedding(200, 6)
    logits = torch.randn(3, 2, 200)
    context = fresh.context(torch.randn(3, 2, 6))
    scores, ids = joined(fresh, embedding, logits, context, torch.tensor([0, 7, 199]), likeliest)
    best = logits.topk(chain.CANDIDATES).indices.sort(dim=-1).values
    assert torch.equal(ids, best)
    assert torch.equal(scores, logits.gather(-1, best))


def test_scores_depend_on_the_token_before_and_on_the_slot():
    made, embedding = random_chain(), torch.nn.Embedding(9, 6)
    logits = torch.randn(1, 2, 9)
    logits[0, :, 2] = -torch.inf  # as a mask token's
    seen = []
    for hidden, before, picked in ((1.0, 3, 5), (1.0, 4, 5), (-1.0, 3, 5), (1.0, 3, 6)):
        context = made.context(torch.linspace(-1, hidden, 6).expand(1, 2, 6))
        words = {0: torch.tensor([[picked]]), 1: torch.tensor([[0]])}
        pick = lambda scores, ids, slot, words=words: words[slot]  # noqa: E731
        [found], [ids] = joined(made, embedding, logits, context, torch.tensor([before]), pick)
        assert torch.equal(ids, torch.arange(9).expand(2, 9)), "no more than 9 tokens, all known"
        assert (found[:, 2] == -torch.inf).all()
        seen.append(found[:, torch.arange(9) != 2])
    assert not torch.allclose(seen[0][0], seen[1][0])
    assert not torch.allclose(seen[0][0], seen[2][0])
    assert torch.equal(seen[0][0], seen[3][0])
    assert not torch.allclose(seen[0][1], seen[3][1]), "the second slot knows the first's token"


@pytest.mark.parametrize("chunk_size", [3, 1000])
def test_the_loss_by_brute_force(tmp_path, monkeypatch, chunk_size):
    """Each masked token that has one before it in its text, among its slot's candidates."""
    monkeypatch.setattr(chain, "CANDIDATES", 7)  # of 40, so that some labels are none of them
    net = chained()
    run = gated_trainer(tmp_path, net, logits_chunk_size=chunk_size)
    made = adapters.chain_of(net)
    assert made is not None
    embedding = adapters.unwrapped(net.get_input_embeddings()).weight
    left_out = 0
    for batch in batches(run):
        view = batch["view"]
        plain = {name: value for name, value in batch.items() if name != "loss"}
        run.forget()
        loss = run.compute_loss(run.model.eval(), plain, num_items_in_batch=torch.tensor(1))
        mask = attention_mask(net, view.layout, view.layout)
        inputs = {"input_ids": view.tokens, "position_ids": view.layout.position}
        with torch.no_grad():
            output = net(
                **inputs,
                attention_mask=mask,
                output_hidden_states=True,
                use_cache=False,
                **adapters.told(net, view.layout),
            )
        expected = torch.zeros(())
        for row, column in (view.labels != -100).nonzero().tolist():
            label, position = int(view.labels[row, column]), int(view.layout.position[row, column])
            logits = output.logits[row, column]
            expected += cross_entropy(logits, torch.tensor(label))
            clean = [
                int(view.tokens[row, place])
                for place in range(view.num_clean)
                if view.layout.document[row, place] == view.layout.document[row, column]
                and view.layout.position[row, place] == position - 1
            ]
            best = logits.topk(7)
            if position == 0 or label not in best.indices.tolist():
                left_out += 1
                continue
            hidden = output.hidden_states[-1][row, column]
            scores = best.values + made(
                made.context(hidden[None]),
                embedding[clean],
                embedding[best.indices][None],
            )
            expected += cross_entropy(scores[0], torch.tensor(best.indices.tolist().index(label)))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert left_out


def test_the_adapter_learns_what_it_would_alone(tmp_path):
    net = chained()
    bare: Any = adapted()
    own = {name: value for name, value in net.state_dict().items() if chain.NAME not in name}
    bare.load_state_dict(own)
    both, alone = gated_trainer(tmp_path / "a", net), gated_trainer(tmp_path / "b", bare)
    step = batches(both)
    expected, found = gradients(alone, copy.deepcopy(step)), gradients(both, step)
    assert {name for name in found if chain.NAME in name} == set(found) - set(expected)
    assert len(found) == len(expected) + 4
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_training_moves_the_chain_and_logs_it(tmp_path):
    net = chained()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = gated_trainer(tmp_path, net, optim="adamw_torch", learning_rate=0.02, max_steps=12)
    run.train()
    moved = {n for n, value in net.state_dict().items() if not torch.equal(value, before[n])}
    inside = {name for name in moved if chain.NAME in name}
    assert len(inside) == 4
    assert all("modules_to_save" in name for name in inside)
    lines = [line for line in run.state.log_history if "chain_loss" in line]
    assert lines[-1]["chain_loss"] < lines[0]["chain_loss"]
    assert all(0 <= line["chain_accuracy"] <= 1 for line in lines)


@pytest.fixture
def model(checkpoint, tmp_path):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path, chain_width=8)
    return load(tmp_path)


@pytest.fixture(scope="module")
def chains(checkpoint, tmp_path_factory):
    """Gated adapters with a chain, on a base with a tied head and on one without."""
    made = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("chained")
        gated_adapter(load(checkpoint("llama-tied" if tied else "llama")), folder, chain_width=8)
        made[tied] = load(folder)
    return made


def test_what_was_saved_is_loaded(checkpoint, tmp_path):
    made = gated_adapter(load(checkpoint("llama-tied")), tmp_path, chain_width=8)
    held, found = adapters.chain_of(made), load(tmp_path).chain
    assert held is not None
    assert found is not None
    assert found.width == 8
    for one, other in zip(held.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not other.requires_grad
    assert load(checkpoint("llama-tied")).chain is None
    half = load(tmp_path, dtype="bfloat16").chain
    assert half is not None
    assert half.slot.weight.dtype == torch.bfloat16


def test_the_next_token_is_that_without_a_chain(model, checkpoint, tmp_path):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path / "bare")
    bare = load(tmp_path / "bare")
    weights = {n: w for n, w in model.network.state_dict().items() if chain.NAME not in n}
    bare.network.load_state_dict(weights)
    bare.network.setblock_mask.trained = model.network.setblock_mask.trained
    both = (generate(made, PROMPTS, mode="ntp", max_new_tokens=20) for made in (model, bare))
    for one, other in zip(*both, strict=True):
        assert one.token_ids == other.token_ids
        assert one.entropy == other.entropy


@settings(**SLOW, max_examples=12)
@given(
    kind=st.booleans(),
    every=st.sampled_from([4, 15, 300]),
    prompts=prompts(range(4, 200), max_rows=3),
    options=options(max_new_tokens=14),
)
def test_blocks_are_decoded_as_the_oracle_says(chains, kind, every, prompts, options):
    """Each slot's token given the one in the slot before, with all of 64 candidates and more."""
    assert_equals_oracle(with_ends(chains[kind], every), prompts, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_chain_divides_the_candidates_probability_anew(monkeypatch, temperature):
    """Other tokens keep theirs, as does a slot whose distribution is no mask's."""
    monkeypatch.setattr(chain, "CANDIDATES", 5)
    made, embedding = random_chain(), torch.nn.Embedding(12, 6)
    torch.manual_seed(0)
    logits, hidden = torch.randn(2, 4, 12), torch.randn(2, 4, 6)
    exact = torch.tensor([[True, False, False, False], [False] * 4])
    sampler, places = Sampler(temperature), torch.arange(4)[None].expand(2, -1)

    def pick(logits, slot):
        return sampler.pick(logits, torch.arange(2), places[:, slot : slot + 1])

    given = made, embedding, logits, made.context(hidden), torch.tensor([1, 2]), exact, pick
    with torch.no_grad():
        found = conditioned(*given)
    assert torch.equal(found[exact], logits[exact])
    candidates = logits.topk(5).indices
    own, new = logits.softmax(-1), found.softmax(-1)
    torch.testing.assert_close(
        own.gather(-1, candidates).sum(-1), new.gather(-1, candidates).sum(-1)
    )
    others = torch.ones_like(own, dtype=torch.bool).scatter(-1, candidates, False)
    torch.testing.assert_close(own[others], new[others])
    changed = (own - new).abs().amax(-1) > 1e-3
    assert torch.equal(changed, ~exact)


def test_a_solvers_drafts_know_the_token_before(model, monkeypatch):
    """A chain that always says the same token is what the block is filled with."""

    def stubborn(chain, embedding, logits, context, before, exact, pick):
        return torch.full_like(logits, -30.0).index_fill(-1, torch.tensor([77]), 0.0)

    monkeypatch.setattr(batch_state, "conditioned", stubborn)
    options: dict[str, Any] = {"mode": "verified", "draft": "solver", "solver": "fixed:3"}
    run = settings_for(model, block_size=4, max_new_tokens=20, ignore_eos=True, **options)
    state = SolverDrafts(model, [PROMPTS[0]], [0], run)
    state.step()
    state.step()
    assert state.draft[0].tolist() == [77] * 3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_are_what_the_slow_way_joins(model, prompt):
    run = settings_for(model, mode="verified", block_size=6, max_new_tokens=20, ignore_eos=True)
    state = BranchDrafts(model, [prompt], [0], run)
    state.step()
    assert int(state.length[0]) == 5
    assert state.draft[0].tolist() == reference.joined(model, prompt, 6)
    likeliness = state.confidence[0]
    assert ((likeliness > 0) & (likeliness <= 1)).all()


@pytest.mark.parametrize(
    "way",
    [
        {"branches": 1},
        {"branches": 3, "seeds": 2, "lookup": 4},
        {"temperature": 1.2, "top_k": 5, "seed": 4},
        {"draft": "solver", "solver": "fixed:2"},
    ],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_text_is_the_models_own(model, way, batch_size):
    shared = {name: way[name] for name in ("temperature", "top_k", "seed") if name in way}
    exact = generate(model, PROMPTS, mode="ntp", max_new_tokens=24, **shared)
    found = generate(
        model,
        PROMPTS,
        mode="verified",
        block_size=5,
        max_new_tokens=24,
        batch_size=batch_size,
        **way,
    )
    assert [one.token_ids for one in found] == [one.token_ids for one in exact]


@pytest.mark.parametrize("pack", [False, None])
def test_it_drafts_in_sixteen_bits(checkpoint, tmp_path, pack):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path, chain_width=8)
    model = load(tmp_path, dtype="bfloat16", pack=pack)
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "block_size": 4}
    for answer in generate(model, PROMPTS, mode="verified", branches=4, seeds=1, **options):
        assert len(answer.token_ids) == 24


@pytest.mark.parametrize("told", [None, 8])
def test_an_adapter_and_its_settings_must_agree(checkpoint, tmp_path, told):
    gated_adapter(load(checkpoint("llama-tied")), tmp_path, **({} if told else {"chain_width": 8}))
    write_settings(tmp_path, chain_width=told)
    has = "no" if told else "a"
    with pytest.raises(ValueError, match=f"the adapter has {has} chain, but chain_width in its"):
        load(tmp_path)
    if not told:
        network = load(checkpoint("llama-tied")).network
        with pytest.raises(ValueError, match="the adapter has a chain, but chain_width in its"):
            adapters.attach_again(network, tmp_path)


def test_weights_without_a_place_are_refused_beside_a_new_chain(checkpoint, tmp_path):
    base = checkpoint("llama-tied")
    gated_adapter(load(base), tmp_path)
    assert adapters.attach_again(load(base).network, tmp_path, chain_width=8)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    fewer = [name for name in config["target_modules"] if "layers.1" not in name]
    file.write_text(json.dumps(config | {"target_modules": fewer}))
    with pytest.raises(ValueError, match=r"the adapter holds \d+ weights that have no place on"):
        adapters.attach_again(load(base).network, tmp_path, chain_width=8)


def test_a_chain_that_knows_more_saves_forwards(checkpoint, tmp_path, monkeypatch):
    """One that always knows what the model says next, as only a test can."""
    gated_adapter(load(checkpoint("llama-tied")), tmp_path, chain_width=8)
    model = load(tmp_path)
    [exact] = generate(model, [PROMPTS[0]], mode="ntp", max_new_tokens=24, ignore_eos=True)
    answer = [PROMPTS[0][-1], *exact.token_ids]
    assert len(set(answer)) > 3
    options: dict[str, Any] = {"mode": "verified", "block_size": 4, "branches": 4}
    options |= {"max_new_tokens": 24, "ignore_eos": True}
    [before] = generate(model, [PROMPTS[0]], **options)

    step, rows = BranchDrafts.step, []

    def noted(self):
        rows[:] = [self]
        return step(self)

    def knowing(chain, embedding, logits, context, before, pick):
        first = int(rows[0].start[0]) - len(PROMPTS[0])
        known = torch.tensor([*exact.token_ids[first:], *[5] * 4][: logits.shape[1]])
        whole = torch.nn.functional.one_hot(known, logits.shape[-1]).float()[None]
        return whole, torch.arange(logits.shape[-1]).repeat(1, len(known), 1)

    monkeypatch.setattr(BranchDrafts, "step", noted)
    monkeypatch.setattr(branches, "joined", knowing)
    [after] = generate(model, [PROMPTS[0]], **options)
    assert after.token_ids == exact.token_ids == before.token_ids
    assert after.nfe == 1 + -(-23 // 4) < before.nfe, "four tokens a forward, after the first"


def test_an_adapter_says_how_wide_its_chain_is(checkpoint, tmp_path):
    from setblock.checkpoint import write_settings

    gated_adapter(load(checkpoint("llama-tied")), tmp_path, chain_width=8)
    write_settings(tmp_path, chain_width=5)
    with pytest.raises(ModelError, match="size mismatch"):
        load(tmp_path)
    with pytest.raises(ModelError, match="chain_width must be int of at least 1, got 0"):
        write_settings(tmp_path, chain_width=0)


def test_no_noisy_token_is_the_one_before(tmp_path):
    """A draft's token before is known by then: the clean one, whatever the block shows."""
    run = gated_trainer(tmp_path, chained())
    for batch in batches(run):
        view = batch["view"]
        before = view.before()
        assert (before[:, : view.num_clean] == -1).all()
        noisy = view.layout.block != CLEAN
        labelled = noisy & (view.labels != -100)
        assert ((before >= 0) == (labelled & (view.layout.position > 0))).all()
        assert (before[before >= 0] != MASK).all()


def test_by_the_command_line(checkpoint, rows, tmp_path, monkeypatch, capsys):
    """A chain for an adapter that had none, and trained further with it."""
    base = checkpoint("llama-tied", mask_token="<mask>")
    words = ("--data", rows, "--method", "gated", "--learning-rate", "0.05", "--warmup-steps", "0")
    folders = [tmp_path / name for name in ("none", "new", "more")]
    given = [(), ("--chain-width", "8"), ()]
    logs = []
    for source, folder, more in zip([base, *folders], folders, given, strict=False):
        where = ("--model", source, "--output-dir", folder)
        logs.append(train(monkeypatch, capsys, *words, *where, *more, "--logging-steps", "1"))
    assert [any("chain_loss" in line for line in one["log"]) for one in logs] == [False, True, True]
    none, new, more = map(load, folders)
    assert none.chain is None
    assert new.chain is not None
    assert more.chain is not None
    assert new.chain.width == more.chain.width == 8
    assert not torch.equal(new.chain.out.weight, torch.zeros_like(new.chain.out.weight))
    assert not torch.equal(new.chain.out.weight, more.chain.out.weight)
    assert '"chain_width": 8' in (folders[2] / "README.md").read_text()
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    assert {config["base_model_name_or_path"] for config in configs} == {str(base)}
    # a step of no size changes neither; to what had none it adds four tensors
    still = [word if word != "0.05" else "0" for word in words]
    for source, more, added in ((folders[2], (), 0), (folders[0], ("--chain-width", "8"), 4)):
        folder = tmp_path / f"still-{source.name}"
        train(monkeypatch, capsys, *still, "--model", source, "--output-dir", folder, *more)
        before, after = (
            load_file(place / "adapter_model.safetensors") for place in (source, folder)
        )
        assert len(after) == len(before) + added
        assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(SystemExit):
        train(
            monkeypatch,
            capsys,
            *(*words, "--model", folders[1], "--output-dir", tmp_path / "no"),
            *("--chain-width", "16"),
        )
    assert f"chain_width of {folders[1]} is 8, got 16" in one_line(capsys)
