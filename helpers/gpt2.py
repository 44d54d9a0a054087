"""GPT-2: where the line of descent begins, and the book's names for it."""

from dataclasses import replace

import torch

from helpers.attention import MultiHeadAttention, attend_plain
from helpers.config import Config, complete
from helpers.feed_forward import GELU
from helpers.feed_forward import GELUFeedForward as FeedForward
from helpers.generate import generate, generate_text_simple
from helpers.norms import LayerNorm
from helpers.positions import LearnedPositions
from helpers.skeleton import Parts, PreNormBlock, Skeleton
from helpers.tokenizers import GPT2Tokenizer
from helpers.weights import Layout, Stored, assign, load_weights_into_gpt

__all__ = [
    "GELU",
    "GPT2_CONFIG_124M",
    "GPT2_CONFIG_355M",
    "GPT2_CONFIG_774M",
    "GPT2_CONFIG_1558M",
    "FeedForward",
    "GPT2Tokenizer",
    "GPTModel",
    "LayerNorm",
    "MultiHeadAttention",
    "TransformerBlock",
    "assign",
    "generate",
    "generate_text_simple",
    "load_weights_into_gpt",
]

HUGGING_FACE = Layout(
    {
        "tok_emb.weight": Stored("wte.weight"),
        "pos_emb.weight": Stored("wpe.weight"),
        "trf_blocks.{n}.norm1.scale": Stored("h.{n}.ln_1.weight"),
        "trf_blocks.{n}.norm1.shift": Stored("h.{n}.ln_1.bias"),
        # one matrix holds queries, keys and values side by side;
        # all four matrices are stored (in, out)
        "trf_blocks.{n}.att.W_query.weight": Stored(
            "h.{n}.attn.c_attn.weight", transposed=True, third=0
        ),
        "trf_blocks.{n}.att.W_key.weight": Stored(
            "h.{n}.attn.c_attn.weight", transposed=True, third=1
        ),
        "trf_blocks.{n}.att.W_value.weight": Stored(
            "h.{n}.attn.c_attn.weight", transposed=True, third=2
        ),
        "trf_blocks.{n}.att.W_query.bias": Stored("h.{n}.attn.c_attn.bias", third=0),
        "trf_blocks.{n}.att.W_key.bias": Stored("h.{n}.attn.c_attn.bias", third=1),
        "trf_blocks.{n}.att.W_value.bias": Stored("h.{n}.attn.c_attn.bias", third=2),
        "trf_blocks.{n}.att.out_proj.weight": Stored("h.{n}.attn.c_proj.weight", transposed=True),
        "trf_blocks.{n}.att.out_proj.bias": Stored("h.{n}.attn.c_proj.bias"),
        "trf_blocks.{n}.norm2.scale": Stored("h.{n}.ln_2.weight"),
        "trf_blocks.{n}.norm2.shift": Stored("h.{n}.ln_2.bias"),
        "trf_blocks.{n}.ff.layers.0.weight": Stored("h.{n}.mlp.c_fc.weight", transposed=True),
        "trf_blocks.{n}.ff.layers.0.bias": Stored("h.{n}.mlp.c_fc.bias"),
        "trf_blocks.{n}.ff.layers.2.weight": Stored("h.{n}.mlp.c_proj.weight", transposed=True),
        "trf_blocks.{n}.ff.layers.2.bias": Stored("h.{n}.mlp.c_proj.bias"),
        "final_norm.scale": Stored("ln_f.weight"),
        "final_norm.shift": Stored("ln_f.bias"),
        "out_head.weight": Stored("lm_head.weight"),
    },
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    prefix="transformer.",
)  # ignored: causal masks


class GPTModel(Skeleton):
    """GPT-2: LayerNorm, learned positions, multi-head attention and a GELU feed-forward.

    It has biases everywhere.

    Source   Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
    """

    parts = Parts(
        norm=LayerNorm,
        positions=LearnedPositions,
        attention=MultiHeadAttention,
        attend=attend_plain,
        feed_forward=FeedForward,
    )
    defaults = {"drop_rate": 0.1, "qkv_bias": True, "bias": True}
    layouts = {"huggingface": HUGGING_FACE}
    model_type = "gpt2"
    config_names = {
        "vocab_size": "vocab_size",
        "context_length": "n_positions",
        "emb_dim": "n_embd",
        "n_heads": "n_head",
        "n_layers": "n_layer",
        "hidden_dim": "n_inner",
        "norm_eps": "layer_norm_epsilon",
    }


class TransformerBlock(PreNormBlock):
    """One block of GPT-2, built from the config alone."""

    def __init__(self, cfg):
        super().__init__(complete(cfg, GPTModel.defaults), GPTModel.parts)


GPT2_CONFIG_124M = Config(
    vocab_size=50_257,
    context_length=1024,
    emb_dim=768,
    n_heads=12,
    n_layers=12,
    drop_rate=0.1,
    qkv_bias=True,
    bias=True,
    tie_embeddings=True,
    dtype=torch.float32,
)
GPT2_CONFIG_355M = replace(GPT2_CONFIG_124M, emb_dim=1024, n_heads=16, n_layers=24)
GPT2_CONFIG_774M = replace(GPT2_CONFIG_124M, emb_dim=1280, n_heads=20, n_layers=36)
GPT2_CONFIG_1558M = replace(GPT2_CONFIG_124M, emb_dim=1600, n_heads=25, n_layers=48)
