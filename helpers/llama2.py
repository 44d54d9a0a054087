"""Llama 2: Llama 1's parts, twice the context; in the 70B model heads share keys and values."""

from dataclasses import replace

import torch

from helpers.attention import GroupedQueryAttention
from helpers.config import complete
from helpers.feed_forward import FeedForward, SiLU
from helpers.generate import generate, generate_text_simple
from helpers.llama1 import LLAMA1_CONFIG_7B, LLAMA1_CONFIG_13B, Llama1Model
from helpers.norms import RMSNorm
from helpers.positions import RoPE
from helpers.positions import apply_rope as compute_rope  # older names of the same functions
from helpers.positions import compute_rope_params as precompute_rope_params
from helpers.skeleton import PreNormBlock
from helpers.tokenizers import Llama2ChatFormat, Llama2Tokenizer
from helpers.weights import assign, load_weights_into_llama

LlamaTokenizer = Llama2Tokenizer

__all__ = [
    "LLAMA2_CONFIG_7B",
    "LLAMA2_CONFIG_13B",
    "LLAMA2_CONFIG_70B",
    "FeedForward",
    "GroupedQueryAttention",
    "Llama2ChatFormat",
    "Llama2Model",
    "Llama2Tokenizer",
    "LlamaTokenizer",
    "RMSNorm",
    "SiLU",
    "TransformerBlock",
    "assign",
    "compute_rope",
    "generate",
    "generate_text_simple",
    "load_weights_into_llama",
    "precompute_rope_params",
]


class Llama2Model(Llama1Model):
    """Llama 1 with another epsilon and a longer context.

    Source   Touvron et al. 2023, arXiv:2307.09288
    """

    defaults = {**Llama1Model.defaults, "norm_eps": 1e-5}


class TransformerBlock(PreNormBlock):
    """One block of Llama 2, built from the config alone; without cos and sin it makes its own."""

    model_class = Llama2Model

    def __init__(self, cfg):
        cfg = complete(cfg, self.model_class.defaults)
        super().__init__(cfg, self.model_class.parts)
        self.pos_emb = RoPE.from_config(cfg)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        if cos is None:
            x, cos, sin = self.pos_emb.place(x, torch.arange(x.shape[1], device=x.device))
        return super().forward(x, mask, cos, sin, cache)


LLAMA2_CONFIG_7B = replace(LLAMA1_CONFIG_7B, context_length=4096, norm_eps=1e-5)
LLAMA2_CONFIG_13B = replace(LLAMA1_CONFIG_13B, context_length=4096, norm_eps=1e-5)
LLAMA2_CONFIG_70B = replace(
    LLAMA2_CONFIG_7B, emb_dim=8192, n_heads=64, n_layers=80, hidden_dim=28_672, n_kv_groups=8
)
