"""Llama 3, 3.1 and 3.2: shared keys and values in every size, another RoPE, another tokenizer."""

from dataclasses import replace

from helpers.attention import GroupedQueryAttention, attend_sdpa
from helpers.feed_forward import FeedForward
from helpers.generate import generate, generate_text_simple, generate_text_simple_stream
from helpers.llama2 import LLAMA2_CONFIG_7B, LLAMA2_CONFIG_70B, Llama2Model
from helpers.llama2 import TransformerBlock as Llama2Block
from helpers.positions import apply_rope, compute_rope_params
from helpers.tokenizers import ChatFormat, Llama3Tokenizer, clean_text
from helpers.weights import assign, load_weights_into_llama

__all__ = [
    "LLAMA3_CONFIG_8B",
    "LLAMA3_CONFIG_70B",
    "LLAMA31_CONFIG_8B",
    "LLAMA31_CONFIG_70B",
    "LLAMA32_CONFIG_1B",
    "LLAMA32_CONFIG_3B",
    "ChatFormat",
    "FeedForward",
    "GroupedQueryAttention",
    "Llama3Model",
    "Llama3ModelFast",
    "Llama3Tokenizer",
    "TransformerBlock",
    "apply_rope",
    "assign",
    "clean_text",
    "compute_rope_params",
    "generate",
    "generate_text_simple",
    "generate_text_simple_stream",
    "load_weights_into_llama",
]


class Llama3Model(Llama2Model):
    """Llama 2 with eight key/value heads in every size and a RoPE for longer contexts.

    Source   Grattafiori et al. 2024, arXiv:2407.21783
    """

    defaults = {**Llama2Model.defaults, "n_kv_groups": 8, "rope_base": 500_000.0}


class Llama3ModelFast(Llama3Model):
    """Llama 3 with one part swapped: scaled_dot_product_attention attends."""

    parts = replace(Llama3Model.parts, attend=attend_sdpa)


class TransformerBlock(Llama2Block):
    """One block of Llama 3, built from the config alone; without cos and sin it makes its own."""

    model_class = Llama3Model


LLAMA3_CONFIG_8B = replace(
    LLAMA2_CONFIG_7B,
    n_kv_groups=8,
    rope_base=500_000.0,
    vocab_size=128_256,
    context_length=8192,
    hidden_dim=14_336,
)
LLAMA3_CONFIG_70B = replace(
    LLAMA2_CONFIG_70B, rope_base=500_000.0, vocab_size=128_256, context_length=8192
)

_LONGER = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context_length": 8192,
}
LLAMA31_CONFIG_8B = replace(LLAMA3_CONFIG_8B, context_length=131_072, rope_freq=_LONGER)
LLAMA31_CONFIG_70B = replace(LLAMA3_CONFIG_70B, context_length=131_072, rope_freq=_LONGER)

LLAMA32_CONFIG_1B = replace(
    LLAMA31_CONFIG_8B,
    emb_dim=2048,
    n_layers=16,
    hidden_dim=8192,
    tie_embeddings=True,
    rope_freq={**_LONGER, "factor": 32.0},
)
LLAMA32_CONFIG_3B = replace(LLAMA32_CONFIG_1B, emb_dim=3072, n_heads=24, n_layers=28)
