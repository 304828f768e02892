"""Networks of more families, each decoded as the reference decodes it."""

import pytest
from conftest import FAMILIES
from test_engine import agree, mixed
from test_fused import BRANCHES, FUSED, SLIDING


@pytest.mark.parametrize("kind", FAMILIES)
def test_requests_of_all_ways(engine, model, kind):
    agree(engine(kind), model(kind), mixed(model(kind), 16))


@pytest.mark.parametrize("kind", FAMILIES)
def test_gated_adapters(engine, model, kind):
    agree(engine(f"gated:{kind}"), model(f"gated:{kind}"), mixed(model(f"gated:{kind}"), 8))


def test_a_low_rank_adapter_on_a_mixture(engine, model):
    agree(engine("lora:mixtral"), model("lora:mixtral"), mixed(model("lora:mixtral"), 8))


@pytest.mark.parametrize("kind", ["gemma", "granite"])
def test_chains(engine, model, kind):
    """Of networks that scale what their embedding says, or their logits."""
    chained = f"chained:{kind}"
    requests = mixed(model(chained), 16, BRANCHES + SLIDING)
    agree(engine(chained, **FUSED), model(chained), requests)
