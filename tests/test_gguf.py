"""GGUF files: back to the checkpoint they were made of."""

import pytest
import torch
from gguf import GGUFWriter, TokenType
from networks import embeddings, load, uncached
from transformers import AutoModelForCausalLM, AutoTokenizer

from setblock.names import ModelError


def write_gguf(path, network, tokenizer, tied: bool, more: tuple[str, ...] = ("ab", "abc")) -> None:
    """Write a Llama network the way llama.cpp's converter does.

    more: tokens behind the tokenizer's own.
    """
    config, state = network.config, network.state_dict()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), *more]
    special = set(tokenizer.all_special_tokens)
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    for index, token in enumerate(tokens):
        if token.startswith("[PAD"):
            kinds[index] = TokenType.UNUSED
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)

    def swap_halves(weight, heads):  # GGUF interleaves the two halves of a rotary head
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{a}": f"blk.{layer}.{b}" for a, b in parts.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, short in names.items():
        weight = state[f"{name}.weight"].float()
        if (projection := name.rpartition(".")[2]) in heads:
            weight = swap_halves(weight, heads[projection])
        if name != "lm_head" or not tied:
            writer.add_tensor(f"{short}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "head_in_file"), [("llama", True), ("llama-tied", True), ("llama-tied", False)]
)
def test_gguf_round_trip(checkpoint, tmp_path, kind, head_in_file):
    original = load(checkpoint(kind, free_rows=2))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original.network, original.tokenizer, tied=not head_in_file)
    model = load(path)
    text = "some text"
    assert model.encode(text)[-len(text) :] == original.encode(text)[-len(text) :]
    assert model.decode(model.encode(text)) == text
    # transformers 5.16 names the BOS token as the tokenizer's EOS token too; 5.23 does not.
    assert model.eos_token_ids >= original.eos_token_ids
    assert model.encode("a", chat=True) == original.encode("a", chat=True)
    ids = original.encode(text)
    size = len(
        original.tokenizer
    )  # the rows after it hold no token in one, "ab" and "abc" in the other
    want, got = (uncached(m, ids, 7, 10)[:, :size] for m in (original, model))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    embedding, head = embeddings(model.network)
    assert (embedding is head) == (kind == "llama-tied")

    # Not flagged as quantized: it can be cast, saved and loaded again.
    model.network.bfloat16().save_pretrained(tmp_path / "saved")
    model.tokenizer.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved", dtype="auto").dtype == torch.bfloat16
    assert load(path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_row_without_a_token_is_the_masks(checkpoint, tmp_path):
    """A file has names for such rows, as a folder has not."""
    folder = checkpoint("llama", free_rows=4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    first = len(tokenizer) + 2  # behind ab and abc
    more = ("ab", "abc", f"[PAD{first}]", f"[PAD{first + 1}]")
    write_gguf(tmp_path / "tiny.gguf", network, tokenizer, tied=False, more=more)
    model = load(tmp_path / "tiny.gguf")
    assert model.mask_token_id == first
    assert model.mask_token_source == "the embedding's first row that has no token"
    assert model.vocab_size == network.config.vocab_size


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "wrong.gguf"
    path.write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(ModelError, match=r"can't load .*wrong\.gguf"):
        load(path)
