"""What layers that read the same tokens have in common."""

import torch

from setblock.shared import Once, groups


def test_layers_are_grouped_by_name():
    names = [
        "model.layers.0.self_attn.k_proj.base",  # as a gated adapter holds it
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.gate_proj",
        "lm_head",
        "q_proj",
    ]
    first, *others = [[name.rpartition("layers.")[2] for name in some] for some in groups(names)]
    assert first == ["0.self_attn.k_proj.base", "0.self_attn.q_proj"]
    assert ["1.mlp.up_proj", "1.mlp.gate_proj"] in others
    assert [some for some in others if len(some) == 1] == [
        ["0.self_attn.o_proj"], ["1.self_attn.q_proj"], ["lm_head"], ["q_proj"],
    ]  # fmt: skip


def test_it_is_computed_once_for_each_tensor():
    asked: list[tuple] = []

    def double(tokens: torch.Tensor, *more: int) -> torch.Tensor:
        asked.append((tokens, *more))
        return 2 * tokens

    once, one, other = Once(double, 3), torch.ones(2), torch.ones(2)
    assert [once(one, 7).tolist() for _ in range(3)] == [[2, 2]] * 3
    assert asked == [(one, 7)]
    assert once.kept is None, "nothing is held when all have read"
    once(one)
    once(other)  # as large, and another tensor
    once(one)
    assert [tokens for tokens, *_ in asked] == [one, one, other, one]
    alone = Once(double, 1)
    alone(one)
    assert alone.kept is None
