"""Which token stands for "not known yet": a model's own, a reserved one, or a new one."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from setblock import adapters
from setblock.names import ModelError

# Tokens that no training text held, each with the tokens that tell whose tokenizer it is: Llama 3,
# Gemma, SmolLM2. In SmolLM2-135M <gh_stars> still has the one embedding that all its never-seen
# tokens share, while <repo_name>, <reponame> and <filename> have moved away from it.
NEVER_TRAINED = (
    ("<|reserved_special_token_0|>", ()),
    ("<unused0>", ()),
    ("<gh_stars>", ("<repo_name>", "<reponame>")),
)


def resolve(
    network: Any,
    tokenizer: Any,
    explicit: int | None,
    own: int | None,
    taken: frozenset[int],
) -> tuple[int, str]:
    """The mask token and how it was found, the same in every mode.

    taken: EOS, BOS and padding, which it must not be.
    Effects: adds one to network and tokenizer where neither has one.
    """
    found: Any
    num_rows = len(rows_of(network.get_input_embeddings()))
    vocabulary = tokenizer.get_vocab()
    free = max(vocabulary.values()) + 1
    # In a GGUF file rows without a token have names.
    unnamed = min((id for token, id in vocabulary.items() if token == f"[PAD{id}]"), default=free)
    reserved = [
        token
        for token, companions in NEVER_TRAINED
        if vocabulary.keys() >= {token, *companions}
        and vocabulary[token] not in taken
        and token not in str(tokenizer.chat_template)
    ]
    if explicit is not None:
        if type(explicit) is not int:
            raise ModelError(f"mask_token_id must be an integer, got {explicit!r}")
        found, source = explicit, "given explicitly"
    elif own is not None:
        found, source = own, "the checkpoint's own setting"
    elif tokenizer.mask_token_id is not None:
        found, source = tokenizer.mask_token_id, f"the tokenizer's {tokenizer.mask_token}"
    elif reserved:
        found, source = vocabulary[reserved[0]], f"the reserved token {reserved[0]}"
    elif unnamed < num_rows and unnamed not in taken:
        found, source = unnamed, "the embedding's first row that has no token"
    else:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        found, source = tokenizer.mask_token_id, "a new token <|mask|>"
        num_rows = max(num_rows, found + 1)
        grow_embeddings(network, num_rows)
    if found == own == free >= num_rows:  # an adapter's, whose base has no row for it yet
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        num_rows = found + 1
        grow_embeddings(network, num_rows)
    if not 0 <= found < num_rows:
        raise ModelError(
            f"mask token {found} ({source}) is not among the {num_rows} embeddings: give a "
            "mask_token_id below that, or none"
        )
    if found in taken:
        raise ModelError(
            f"mask token {found} ({source}) is also an EOS, BOS or padding token: give another "
            "mask_token_id"
        )
    return found, source


def grow_embeddings(network: Any, num_rows: int) -> None:
    """Resize both embeddings, new rows the mean of the old."""
    old = len(rows_of(network.get_input_embeddings()))
    network.resize_token_embeddings(num_rows, mean_resizing=False)
    for embedding in (network.get_input_embeddings(), network.get_output_embeddings()):
        weight = rows_of(embedding)
        weight[old:] = weight[:old].float().mean(dim=0).to(weight.dtype)


def rows_of(embedding: Any) -> Float[Tensor, "vocab hidden"]:
    return adapters.unwrapped(embedding).weight.data
