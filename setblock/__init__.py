"""Set block decoding: several tokens per forward from an ordinary causal language model."""
