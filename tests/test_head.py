"""The head in chunks: the same nats, hits, divergences and gradients as from all logits at once."""

import re
from typing import Any

import pytest
import torch
from families import made
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy, kl_div
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
)

from setblock.adapters import no_chain, with_chain
from setblock.head import LabelScores, Targets, scoring
from setblock.logits import after_head, changes, left_alone

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


CHANGES: dict[Any, dict[str, Any]] = {
    GraniteConfig: {"logits_scaling": 4.0},
    CohereConfig: {"logit_scale": 0.25},
    Gemma3TextConfig: {"final_logit_softcapping": 2.0, "head_dim": 8},
}


def network(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def changing(kind):
    """A network that changes its logits after the head."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**SIZES, **CHANGES[kind]))


@pytest.mark.parametrize(
    "model",
    [network(False), network(True), *map(changing, CHANGES)],
    ids=["llama", "llama-tied", *(kind.model_type for kind in CHANGES)],
)
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("taught", [False, True])
def test_chunks_are_the_whole(model, chunk_size, taught):
    model.zero_grad()
    tokens = torch.randint(0, 19, (2, 6))
    inputs, labels = torch.tensor([0, 2, 3, 7, 8, 10, 11]), torch.tensor([3, 1, 4, 1, 5, 9, 2])
    teachers = torch.tensor([-1, 1, 2, -1, 6, -1, 9]) if taught else None

    logits = model(input_ids=tokens).logits.flatten(0, 1)
    nats = cross_entropy(logits[inputs], labels, reduction="none")
    divergence = torch.zeros(7)
    if teachers is not None:
        for i, teacher in enumerate(teachers.tolist()):
            if teacher >= 0:
                divergence[i] = kl_div(
                    logits[inputs[i]].log_softmax(-1),
                    logits[teacher].detach().softmax(-1),
                    reduction="sum",
                )
    (nats.sum() + 0.7 * divergence.sum()).backward()
    expected: list[Any] = [p.grad.clone() for p in model.parameters()]

    model.zero_grad()
    with scoring(model, Targets(inputs, labels, teachers), chunk_size) as scores_of:
        scores = scores_of(model(input_ids=tokens).logits)
    (scores.nats.sum() + 0.7 * scores.divergence.sum()).backward()
    assert torch.allclose(scores.nats, nats, atol=1e-5)
    assert torch.allclose(scores.divergence, divergence, atol=1e-5)
    assert scores.right.tolist() == (logits[inputs].argmax(-1) == labels).tolist()
    found: list[Any] = [p.grad for p in model.parameters()]
    for wanted, gradient in zip(expected, found, strict=True):
        assert torch.allclose(gradient, wanted, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_network_does_to_its_logits_comes_back(kind):
    """Within, no score is scaled or capped; a step that fails leaves the network as it was."""
    model, tokens = changing(kind), torch.tensor([[1, 2]])
    before = model(input_ids=tokens).logits
    said = model.lm_head(model.get_decoder()(input_ids=tokens).last_hidden_state)
    assert not torch.allclose(said, before, rtol=0.1)
    assert torch.equal(after_head(model.config)(said), before)
    assert changes(model.config)
    with left_alone(model):
        assert torch.equal(model(input_ids=tokens).logits, said)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # changes nothing yet
    assert torch.equal(adapted(input_ids=tokens).logits, before)
    with left_alone(adapted):
        assert torch.equal(adapted(input_ids=tokens).logits, said)
    with pytest.raises(RuntimeError), left_alone(model):
        raise RuntimeError
    assert torch.equal(model(input_ids=tokens).logits, before)


@pytest.mark.parametrize("family", ["beam", "gemma2"])
def test_logits_are_capped_in_the_type_that_the_network_does_it_in(family, tmp_path):
    if family not in CONFIG_MAPPING:
        pytest.skip("of a newer transformers")
    small: Any = made(family, tmp_path).network.config
    small.final_logit_softcapping = 8.0
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        said = model.lm_head(model.get_decoder()(input_ids=tokens).last_hidden_state)
        assert torch.equal(after_head(small)(said), model(input_ids=tokens).logits)


def test_head_is_put_back():
    model = network(False)
    before = model(input_ids=torch.tensor([[1, 2]])).logits
    targets = Targets(torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(RuntimeError), scoring(model, targets, 4):
        raise RuntimeError
    assert "forward" not in vars(model.lm_head)
    assert torch.equal(model(input_ids=torch.tensor([[1, 2]])).logits, before)
    own = model.lm_head.forward
    model.lm_head.forward = own
    with scoring(model, targets, 4):
        assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, len(LabelScores._fields))
    assert model.lm_head.forward is own


def test_a_chain_is_refused_where_the_head_reads_what_was_scaled():
    model = network(False)
    assert no_chain(model.config) is None
    model.config.dim_model_base = 16
    assert no_chain(model.config) is None, "as wide as the layers"
    model.config.dim_model_base = 8
    message = "chain_width must be 0, got 4: the output layer of a llama with dim_model_base=8 "
    with pytest.raises(ValueError, match=re.escape(message)):
        with_chain(model, 4)
    assert with_chain(model, 0) is None


def test_a_chain_is_refused_where_the_head_reads_a_projection():
    config = OPTConfig(**SIZES, word_embed_proj_dim=8)
    assert no_chain(OPTConfig(**SIZES, word_embed_proj_dim=16)) is None
    assert "opt with word_embed_proj_dim=8 reads other states" in str(no_chain(config))
