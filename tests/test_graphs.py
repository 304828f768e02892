"""Forwards replayed as graphs, which are simulated: the same tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import gated_adapter
from torch.utils._python_dispatch import TorchDispatchMode

from setblock import generate, graphs, load, roofline
from setblock.graphs import GRAIN, MOST_GRAPHS
from setblock.kernels import looked_at_in_layers
from setblock.masks import causal_layout, decoding_layout
from setblock.model import Model
from setblock.names import ModelError

PROMPTS = [[5, 9, 30], [7, 7, 12, 40, 8, 3, 3, 9], [6] * 5]
WAYS: dict[str, dict[str, Any]] = {
    "ntp": {"mode": "ntp"},
    "sbd": {"mode": "sbd", "solver": "fixed:2"},
    "seeded": {"mode": "sbd", "solver": "entropy:0.5", "next_token_seed": True},
    "sliding": {"mode": "sbd", "solver": "confidence:0.01", "slide": True},
    "verified": {"mode": "verified", "branches": 2, "seeds": 1},
    "copied": {"mode": "verified", "branches": 1, "lookup": 6},
    "drafts": {"mode": "verified", "draft": "solver", "solver": "fixed:2"},
}


def answers(model, **options):
    found = generate(model, PROMPTS, block_size=4, max_new_tokens=14, **options)
    return [(one.token_ids, one.nfe, one.reveal_step) for one in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "qwen3-window", "gemma3"])
def test_tokens_are_the_same(checkpoint, simulated_graphs, kind, way):
    plain, model = load(checkpoint(kind)), load(checkpoint(kind), compile="graphs")
    for options in ({"batch_size": 1}, {"ignore_eos": True}, {}):
        expected = answers(plain, **WAYS[way], **options)
        for _ in range(3):
            assert answers(model, **WAYS[way], **options) == expected
    assert 0 < len(simulated_graphs) < 40


def test_arithmetic_counts_launches_where_there_are_some(checkpoint, simulated_graphs, monkeypatch):
    counted = []
    for name in ("best_spending", "worth"):
        found = getattr(roofline, name)

        def told(*given, found=found, **options):
            counted.append(options["dispatch_s"])
            return found(*given, **options)

        monkeypatch.setattr(roofline, name, told)
    for compile, dispatch_s in (("off", roofline.DISPATCH_S), ("graphs", 0)):
        model = load(checkpoint(), compile=compile)
        model.best_spending(8, 1)
        model.worth(1)
        assert counted[-2:] == [dispatch_s] * 2


def test_the_rest_of_a_network_is_left_to_the_graph(checkpoint, simulated_graphs, monkeypatch):
    """From the second answer on nothing of the network runs but its prompt's forward."""
    model = load(checkpoint(), compile="graphs")
    ran: list[int] = []
    model.network.register_forward_pre_hook(lambda *_: ran.append(1))
    for _ in range(3):
        ran.clear()
        found = generate(model, PROMPTS[:1], mode="ntp", max_new_tokens=8, ignore_eos=True)
    assert len(ran) == 1
    assert found[0].nfe == 8
    assert len(simulated_graphs) == 1


class Launches(TorchDispatchMode):
    """Operations on tensors that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_replayed_forward_takes_a_copy_and_what_keeps_its_results(
    checkpoint, simulated_graphs, kind
):
    """Masks and places, of layers of every kind, are part of the graph."""
    model = load(checkpoint(kind), compile="graphs")
    cache = model.new_cache(2, 40)
    cache.lengths = np.array([4, 7])
    position = cache.lengths[:, None] + np.arange(3)
    layout = decoding_layout(position, cache.lengths + 1, cache.lengths + 3)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    found = [model.forward(tokens, layout, cache) for _ in range(2)]
    [recorded] = model._graphs._of.values()  # type: ignore[union-attr]
    [graph] = recorded.graphs.values()
    replays = []
    graph.replay = lambda: replays.append(1)
    with Launches() as launches:
        found.append(model.forward(tokens, layout, cache))
    assert launches.names == ["copy_", "clone", "clone"]
    assert replays == [1]
    assert all(torch.equal(one, found[0]) for one in found)


# peft asks for it on every wrap.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("chain_width", [0, 8])
def test_a_gated_adapter(checkpoint, simulated_graphs, tmp_path, chain_width):
    base = load(checkpoint())
    made = gated_adapter(base, tmp_path, chain_width)
    model = Model(made, base.tokenizer, mask_token_id=base.mask_token_id)
    with pytest.raises(ModelError, match="'graphs': peft's own layers can't be recorded"):
        model.compile("graphs")
    plain, model = load(tmp_path), load(tmp_path, compile="graphs")
    for way in WAYS.values():
        for size in (1, 3):  # rows at different stages are noisy in different places
            expected = answers(plain, batch_size=size, **way)
            for _ in range(2):
                assert answers(model, batch_size=size, **way) == expected
    exact = answers(plain, mode="ntp")
    assert [ids for ids, *_ in answers(model, mode="verified")] == [ids for ids, *_ in exact]


def test_logits_outlive_the_next_forward(checkpoint, simulated_graphs):
    model = load(checkpoint(), compile="graphs")
    cache = model.new_cache(1, 8)
    found = []
    for token in (5, 6, 7, 8):
        layout = causal_layout(torch.from_numpy(cache.lengths[:, None]))
        found.append(model.forward(torch.tensor([[token]]), layout, cache))
        cache.keep(np.array([1]))
    assert len(simulated_graphs) == 1
    plain = load(checkpoint())
    expected = plain.forward(torch.tensor([[5, 6, 7, 8]]), causal_layout(torch.arange(4)[None]))
    torch.testing.assert_close(torch.cat(found, dim=1), expected)


def test_memory_is_handed_on(checkpoint, simulated_graphs):
    model = load(checkpoint(), compile="graphs")
    first: Any = model.new_cache(2, 40)
    assert first.slots.capacity == GRAIN
    memory = first.layers[0].memory
    second: Any = model.new_cache(2, 40)
    assert second.layers[0].memory is not memory, "it is in use"
    del first
    third: Any = model.new_cache(1, GRAIN)
    assert third.layers[0].memory is memory
    del second, third
    larger: Any = model.new_cache(1, GRAIN + 1)
    assert larger.slots.capacity == 2 * GRAIN
    assert larger.layers[0].memory is not memory


def test_nothing_is_left_of_the_answer_before(checkpoint, simulated_graphs):
    """A NaN in a slot that nobody sees would spoil a sum: 0 * NaN."""
    model = load(checkpoint(), compile="graphs")
    expected = answers(model, mode="sbd")
    [recorded] = model._graphs._free  # type: ignore[union-attr]
    keys, values = recorded.memory._layers[0]
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    assert answers(model, mode="sbd") == expected


def test_texts_beyond_one_grain(checkpoint, simulated_graphs, monkeypatch):
    monkeypatch.setattr(graphs, "GRAIN", 8)
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    options = {"max_new_tokens": 60, "ignore_eos": True, "block_size": 4}
    for mode in ("ntp", "sbd"):
        for _ in range(2):
            found = generate(model, PROMPTS, mode=mode, **options)
            expected = generate(plain, PROMPTS, mode=mode, **options)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_so_many_graphs_and_no_more(checkpoint, simulated_graphs, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    model = load(checkpoint(), compile="graphs")
    expected = answers(load(checkpoint()), mode="sbd", batch_size=1)
    for _ in range(3):
        assert answers(model, mode="sbd", batch_size=1) == expected
    assert len(simulated_graphs) == 1 < MOST_GRAPHS


def test_a_longer_text_takes_the_place_of_all(checkpoint, simulated_graphs, monkeypatch):
    """Its cache is larger than any that is free: what was recorded goes, and is recorded anew."""
    monkeypatch.setattr(graphs, "GRAIN", 8)
    plain, model = load(checkpoint()), load(checkpoint(), compile="graphs")
    for length in (6, 40, 6, 70, 6):
        options: Any = {"mode": "ntp", "max_new_tokens": length, "ignore_eos": True}
        before = len(simulated_graphs)
        expected = generate(plain, PROMPTS, **options)
        for _ in range(2):
            found = generate(model, PROMPTS, **options)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert (len(simulated_graphs) > before) == (length > 6 or before == 0)
        [free] = model._graphs._free  # type: ignore[union-attr]
        assert all(len(graph.given) for graph in free.graphs.values())


LOOKS: dict[str, Any] = {
    "at its values": lambda hidden: hidden if hidden.sum() > 0 else hidden + 1,
    "where they are": lambda hidden: hidden + hidden.nonzero().shape[0],
    "at some of them": lambda hidden: hidden + hidden[hidden > 0].sum(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_forward_that_looks_at_its_values(checkpoint, simulated_graphs, look):
    model = load(checkpoint(), compile="graphs")
    layer = model.network.model.layers[0]
    layer.register_forward_hook(lambda module, args, output: LOOKS[look](output))
    with pytest.raises(ModelError, match="a forward of llama can't be recorded: operation not"):
        answers(model, mode="ntp")


def test_what_failed_is_said_not_that_the_recording_did(checkpoint, simulated_graphs, monkeypatch):
    def record(function: Any, pool: Any, device: Any) -> Any:
        try:
            raise RuntimeError("this kernel waits\nand more")
        finally:
            raise RuntimeError("capture was invalidated")

    monkeypatch.setattr(graphs, "record", record)
    model = load(checkpoint(), compile="graphs")
    with pytest.raises(ModelError, match=r"of llama can't be recorded: this kernel waits$"):
        answers(model, mode="ntp")
    try:
        raise KeyError("of the caller's")
    except KeyError:
        with pytest.raises(ModelError, match=r"of llama can't be recorded: this kernel waits$"):
            answers(model, mode="ntp")


def test_kernels_alone(checkpoint, simulated_graphs, monkeypatch):
    """What `on` is where there are no graphs; for networks, too, that can't be recorded."""
    compiled: list[Any] = []

    def compile(run: Any, **options: Any) -> Any:
        compiled.append(options)
        return run

    monkeypatch.setattr(torch, "compile", compile)
    expected = answers(load(checkpoint()), mode="sbd")
    for how, recorded in (("kernels", False), ("on", True)):
        before = len(simulated_graphs)
        model = load(checkpoint(), compile=how)
        assert [answers(model, mode="sbd") for _ in range(3)] == [expected] * 3
        assert (len(simulated_graphs) > before) == recorded
        [options] = compiled  # one for both layers
        assert options["options"] == {"guard_filter_fn": looked_at_in_layers}
        assert options["dynamic"]
        compiled.clear()
    network = load(checkpoint(), device="cpu")
    network.network.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ModelError, match=r"at each position; compile 'kernels' goes without them$"):
        network.compile()
    network.compile("kernels")
    assert network._graphs is None
    with pytest.raises(ValueError, match="compile must be one of on, kernels, graphs, got 'fast'"):
        network.compile("fast")


def test_where_there_are_none(checkpoint, monkeypatch):
    with pytest.raises(
        ModelError, match="compile 'graphs': these are CUDA's, and the model is on cpu"
    ):
        load(checkpoint(), compile="graphs", device="cpu")
    with pytest.raises(ModelError, match="compile must be off, on, kernels, graphs or a bool, got"):
        load(checkpoint(), compile="all")
    monkeypatch.setattr(graphs, "on_cuda", lambda network: True)
    network = load(checkpoint(), device="cpu").network
    network.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert graphs.missing(network) == "rotary embeddings of type dynamic look at each position"
    network.config.rope_parameters = {"full_attention": {"rope_type": "longrope"}}
    assert "longrope" in (graphs.missing(network) or "")
    network.config.rope_parameters = {"rope_type": "llama3"}
    assert graphs.missing(network) is None
    network.config._attn_implementation = "flex_attention"
    assert "BlockMask" in (graphs.missing(network) or "")
