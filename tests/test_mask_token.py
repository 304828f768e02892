"""Which token becomes the mask token."""

from typing import Any

import pytest
import torch
from conftest import make_tokenizer, save_checkpoint
from networks import embeddings, load, token_id

from setblock.masks import causal_layout
from setblock.names import ModelError


def mask_of(folder, **options) -> tuple[int, str]:
    model = load(folder, **options)
    assert (
        model.forward(torch.tensor([[1]]), causal_layout(torch.tensor([[0]])))[
            0, 0, model.mask_token_id
        ]
        == -torch.inf
    )
    return model.mask_token_id, model.mask_token_source


def test_mask_token_order(checkpoint):
    everything = {
        "settings": {"mask_token_id": 8},
        "mask_token": "<mask>",
        "specials": ("<|reserved_special_token_0|>",),
        "free_rows": 5,
    }
    names: dict[str, Any] = {"mask_token": "<mask>", "specials": everything["specials"]}
    assert mask_of(checkpoint(**everything), mask_token_id=7) == (7, "given explicitly")
    assert mask_of(checkpoint(**everything)) == (8, "the checkpoint's own setting")
    del everything["settings"]
    expected = token_id("<mask>", **names)
    assert mask_of(checkpoint(**everything)) == (expected, "the tokenizer's <mask>")
    del everything["mask_token"]
    reserved = "<|reserved_special_token_0|>"
    expected = token_id(reserved, **names)
    assert mask_of(checkpoint(**everything)) == (expected, f"the reserved token {reserved}")
    del everything["specials"]
    free = len(make_tokenizer())
    expected = (free, "the embedding's first row that has no token")
    assert mask_of(checkpoint(**everything)) == expected
    assert load(checkpoint(**everything)).vocab_size == free + 5
    del everything["free_rows"]
    assert mask_of(checkpoint(**everything)) == (free, "a new token <|mask|>")


@pytest.mark.parametrize(
    ("specials", "expected"),
    [
        (("<repo_name>", "<reponame>", "<filename>", "<gh_stars>"), "<gh_stars>"),  # SmolLM2
        (("<reponame>", "<filename>", "<gh_stars>"), "<|mask|>"),  # StarCoder: trained on it
        (("<unused0>", "<unused1>"), "<unused0>"),  # Gemma
    ],
)
def test_reserved_tokens_of_known_tokenizers(checkpoint, specials, expected):
    found, source = mask_of(checkpoint(specials=specials))
    assert expected in source
    new = len(make_tokenizer(specials=specials))
    assert found == (new if expected == "<|mask|>" else token_id(expected, specials=specials))


def test_a_reserved_token_in_use_is_passed_over(tmp_path):
    token = "<|reserved_special_token_0|>"
    folder = save_checkpoint(tmp_path / "padding", specials=(token,), pad_token=token)
    assert load(folder).mask_token_source == "a new token <|mask|>"
    folder = save_checkpoint(tmp_path / "chat", specials=(token,))
    assert load(folder).mask_token_source == f"the reserved token {token}"
    (folder / "chat_template.jinja").write_text(token)
    assert load(folder).mask_token_source == "a new token <|mask|>"


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma3"])
def test_an_added_mask_token_starts_at_the_mean_and_is_found_again(checkpoint, tmp_path, kind):
    model, before = load(checkpoint(kind)), len(make_tokenizer())
    assert model.mask_token_id == before
    assert model.vocab_size == before + 1
    embedding, head = embeddings(model.network)
    for weight in (embedding, head):
        torch.testing.assert_close(weight[-1], weight[:-1].mean(dim=0))
    assert (embedding.data_ptr() == head.data_ptr()) == (kind != "llama")
    model.network.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert mask_of(tmp_path) == (before, "the tokenizer's <|mask|>")


@pytest.mark.parametrize("token", ["<s>", "</s>", "<pad>"])
def test_a_mask_token_with_another_role_is_refused(checkpoint, token):
    wrong = token_id(token)
    with pytest.raises(ModelError, match=rf"mask token {wrong} \(given explicitly\) is also an"):
        load(checkpoint(), mask_token_id=wrong)
    with pytest.raises(ModelError, match=r"\(the checkpoint's own setting\) is also an"):
        load(checkpoint(settings={"mask_token_id": wrong}))


@pytest.mark.parametrize("wrong", [-1, 261, 10_000])
def test_a_mask_token_outside_the_embedding_is_refused(checkpoint, wrong):
    with pytest.raises(ModelError, match=f"mask token {wrong} .* not among the 261 embeddings"):
        load(checkpoint(), mask_token_id=wrong)


def test_a_mask_token_that_is_no_number_is_refused(checkpoint):
    with pytest.raises(ModelError, match="mask_token_id must be an integer, got True"):
        load(checkpoint(), mask_token_id=True)
