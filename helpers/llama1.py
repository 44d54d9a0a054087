"""Llama 1: GPT-2 with three parts swapped, every bias and all dropout taken away."""

from dataclasses import replace

import torch

from helpers.attention import GroupedQueryAttention
from helpers.config import Config
from helpers.feed_forward import FeedForward
from helpers.gpt2 import GPTModel
from helpers.norms import RMSNorm
from helpers.positions import RoPE
from helpers.weights import layouts_of_llama

__all__ = ["LLAMA1_CONFIG_7B", "LLAMA1_CONFIG_13B", "Llama1Model"]


class Llama1Model(GPTModel):
    """GPT-2 with RMSNorm, RoPE and SwiGLU, without biases and dropout.

    The attention class serves all Llamas: with as many groups as heads, as here, it is multi-head.

    Source   Touvron et al. 2023, arXiv:2302.13971
    """

    parts = replace(
        GPTModel.parts,
        norm=RMSNorm,
        positions=RoPE,
        attention=GroupedQueryAttention,
        feed_forward=FeedForward,
    )
    defaults = {"rope_base": 10_000.0, "norm_eps": 1e-6}
    layouts = layouts_of_llama
    model_type = "llama"
    config_names = {
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "emb_dim": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "hidden_dim": "intermediate_size",
        "n_kv_groups": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
    }


LLAMA1_CONFIG_7B = Config(
    vocab_size=32_000,
    context_length=2048,
    emb_dim=4096,
    n_heads=32,
    n_layers=32,
    hidden_dim=11_008,
    norm_eps=1e-6,
    rope_base=10_000.0,
    tie_embeddings=False,
    dtype=torch.bfloat16,
)
LLAMA1_CONFIG_13B = replace(
    LLAMA1_CONFIG_7B, emb_dim=5120, n_heads=40, n_layers=40, hidden_dim=13_824
)
