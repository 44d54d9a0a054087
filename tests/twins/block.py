"""Twins of a block of Llama 2."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from helpers.checks import check_llama2_block
from helpers.llama2 import TransformerBlock
from twins.attention import (
    Attention,
    FusedAttention,
    RotatedAsByMeta,
    SeesTheFuture,
    SinCosExchanged,
    ValuesRotated,
)
from twins.feed_forward import (
    Biases,
    BookFeedForward,
    DtypeForgotten,
    FourTimesWider,
    GateOnFc2,
    GeGLU,
    GeGLUOfGemma,
    NamedAsByMeta,
    SwiGLUByEinsum,
)
from twins.norms import (
    BookLayerNormInFloat32,
    BookRMSNormInFloat32,
    FunctionalRMSNorm,
    LayerNormWithoutShift,
    RMSNormByEinsum,
)
from twins.positions import rope_by_rolling
from twins.registry import accepted, proves, refused

proves(check_llama2_block, TransformerBlock, "a block of Llama 2: right, in float32 and bfloat16")


class AttentionOfLlama(Attention):
    """From a config, without biases, as Llama has it."""

    def __init__(self, cfg):
        width, heads, dtype = cfg["emb_dim"], cfg["n_heads"], cfg["dtype"]
        super().__init__(width, width, cfg["context_length"], 0.0, heads)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.to(dtype)


class FusedAttentionOfLlama(FusedAttention):
    def __init__(self, cfg):
        width, heads, dtype = cfg["emb_dim"], cfg["n_heads"], cfg["dtype"]
        super().__init__(width, width, cfg["context_length"], 0.0, heads)
        self.to(dtype)


@accepted(check_llama2_block)
class Block(nn.Module):
    """A right block; a twin has a wrong part or wires the right ones wrong."""

    attention, feed_forward, norm = AttentionOfLlama, BookFeedForward, BookRMSNormInFloat32

    def __init__(self, cfg):
        super().__init__()
        self.att = self.attention(cfg)
        self.ff = self.feed_forward(cfg)
        self.norm1 = self.norm(cfg["emb_dim"])
        self.norm2 = self.norm(cfg["emb_dim"])

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        shortcut = x
        x = self.norm1(x)
        x = self.att(x, mask, cos, sin)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        return x + shortcut


@accepted(check_llama2_block)
class BlockOfOtherParts(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm2, self.norm1 = RMSNormByEinsum(cfg["emb_dim"]), FunctionalRMSNorm(cfg["emb_dim"])
        self.ff, self.att = SwiGLUByEinsum(cfg), FusedAttentionOfLlama(cfg)
        self.to(cfg["dtype"])

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        y = x + self.att(self.norm1(x), cos=cos, sin=sin)
        return y + self.ff(self.norm2(y))


@accepted(check_llama2_block)
class BlockInOnePiece(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        D, hidden, self.n_heads = cfg["emb_dim"], cfg["hidden_dim"], cfg["n_heads"]
        plain = {"bias": False, "dtype": cfg["dtype"]}
        names = ("W_query", "W_key", "W_value", "out_proj")
        self.norm1 = nn.RMSNorm(D, eps=1e-5, dtype=cfg["dtype"])
        self.att = nn.ModuleDict({name: nn.Linear(D, D, **plain) for name in names})
        self.norm2 = nn.RMSNorm(D, eps=1e-5, dtype=cfg["dtype"])
        self.ff = nn.ModuleDict({name: nn.Linear(D, hidden, **plain) for name in ("fc1", "fc2")})
        self.ff["fc3"] = nn.Linear(hidden, D, **plain)

    def forward(self, x, mask, cos, sin):
        h = self.norm1(x)
        q, k, v = (
            self.att[f"W_{name}"](h).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        q, k = rope_by_rolling(q, cos, sin), rope_by_rolling(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.att["out_proj"](mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.ff["fc3"](F.silu(self.ff["fc1"](h)) * self.ff["fc2"](h))


@accepted(check_llama2_block)
class BlockWithTorchsRMSNorm(Block):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.norm1 = nn.RMSNorm(cfg["emb_dim"], eps=1e-5, dtype=cfg["dtype"])
        self.norm2 = nn.RMSNorm(cfg["emb_dim"], eps=1e-5, dtype=cfg["dtype"])


def wired(hint):
    """A block of right parts, wired by the decorated function of (block, attention, x)."""

    def register(wire):
        def forward(self, x, mask=None, cos=None, sin=None, cache=None):
            return wire(self, functools.partial(self.att, cos=cos, sin=sin), x)

        refused(check_llama2_block, hint)(type(wire.__name__, (Block,), {"forward": forward}))
        return wire

    return register


@wired("The norms come after the additions (post-norm)")
def post_norm(block, att, x):
    x = block.norm1(x + att(x))
    return block.norm2(x + block.ff(x))


@wired("Each norm comes after its step, before the addition (Olmo's order)")
def order_of_olmo(block, att, x):
    x = x + block.norm1(att(x))
    return x + block.norm2(block.ff(x))


@wired("Both steps read the input (a parallel block)")
def parallel_block(block, att, x):
    normed = block.norm1(x)
    return x + att(normed) + block.ff(normed)


@wired("the second reads the first one's result")
def parallel_block_with_two_norms(block, att, x):
    return x + att(block.norm1(x)) + block.ff(block.norm2(x))


@wired("The feed-forward comes first")
def feed_forward_first(block, att, x):
    x = x + block.ff(block.norm2(x))
    return x + att(block.norm1(x))


@wired("The feed-forward comes first")
def feed_forward_first_with_norm1(block, att, x):
    x = x + block.ff(block.norm1(x))
    return x + att(block.norm2(x))


@wired("norm1 is used twice")
def norm1_twice(block, att, x):
    x = x + att(block.norm1(x))
    return x + block.ff(block.norm1(x))


@wired("norm2 is used twice")
def norm2_twice(block, att, x):
    x = x + att(block.norm2(x))
    return x + block.ff(block.norm2(x))


@wired("norm1 and norm2 are exchanged")
def norms_exchanged(block, att, x):
    x = x + att(block.norm2(x))
    return x + block.ff(block.norm1(x))


@wired("The addition around attention is missing")
def no_shortcut_around_attention(block, att, x):
    x = att(block.norm1(x))
    return x + block.ff(block.norm2(x))


@wired("The addition around the feed-forward is missing")
def no_shortcut_around_feed_forward(block, att, x):
    x = x + att(block.norm1(x))
    return block.ff(block.norm2(x))


@wired("Both additions are missing")
def no_shortcuts(block, att, x):
    return block.ff(block.norm2(att(block.norm1(x))))


@wired("The input is added at the end")
def shortcut_not_renewed(block, att, x):
    shortcut = x
    x = shortcut + att(block.norm1(x))
    return shortcut + block.ff(block.norm2(x))


@wired("The normalised input is added: the shortcut carries x itself")
def shortcut_after_norm1(block, att, x):
    normed = block.norm1(x)
    x = normed + att(normed)
    return x + block.ff(block.norm2(x))


@wired("The normalised input is added: the shortcut carries x itself")
def shortcuts_after_both_norms(block, att, x):
    x = block.norm1(x)
    x = x + att(x)
    x = block.norm2(x)
    return x + block.ff(x)


@wired("The first norm is missing")
def no_norm1(block, att, x):
    x = x + att(x)
    return x + block.ff(block.norm2(x))


@wired("The second norm is missing")
def no_norm2(block, att, x):
    x = x + att(block.norm1(x))
    return x + block.ff(x)


@wired("x comes back as it is")
def block_unchanged(block, att, x):
    return x


@wired("The attention is missing")
def no_attention(block, att, x):
    return x + block.ff(block.norm2(x))


@wired("The feed-forward is missing")
def no_feed_forward(block, att, x):
    return x + att(block.norm1(x))


@wired("Nothing is rotated: pass cos and sin on")
def cos_and_sin_not_passed_on(block, att, x):
    x = x + block.att(block.norm1(x))
    return x + block.ff(block.norm2(x))


@wired("give different results in eval mode: dropout is still on")
def dropout_in_the_shortcut(block, att, x):
    x = x + F.dropout(att(block.norm1(x)), 0.1)
    return x + F.dropout(block.ff(block.norm2(x)), 0.1)


@wired("bfloat16 went in and float32 came out")
def block_left_in_float32(block, att, x):
    x = x + att(block.norm1(x))
    return x + block.ff(block.norm2(x)).float()


@wired("In float32 it is right, so something is rounded too much")
def coarse_stream_in_bfloat16(block, att, x):
    x = x + att(block.norm1(x))
    x = x if x.dtype == torch.float32 else x.round()
    return x + block.ff(block.norm2(x))


@wired("your code changes its input")
def added_in_place(block, att, x):
    x += att(block.norm1(x))
    return x + block.ff(block.norm2(x))


def made_of(name, hint, **parts):
    """A block that is wired right, with a wrong part."""
    refused(check_llama2_block, hint)(type(name, (Block,), parts))


def inside(twin):
    """A twin of the attention as a block's part."""
    return type(twin.__name__, (twin, AttentionOfLlama), {})


class NormOfLlama1(BookRMSNormInFloat32):
    def __init__(self, emb_dim):
        super().__init__(emb_dim, 1e-6)


class BiasedOutProj(AttentionOfLlama):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.out_proj = nn.Linear(cfg["emb_dim"], cfg["emb_dim"], dtype=cfg["dtype"])


class AttentionWithoutDtype(AttentionOfLlama):
    def __init__(self, cfg):
        super().__init__({**cfg, "dtype": torch.float32})


made_of("ValuesRotatedInside", "The values are rotated too", attention=inside(ValuesRotated))
made_of("SinCosInside", "or cos and sin are exchanged", attention=inside(SinCosExchanged))
made_of("RotationOfMetaInside", "Neighbours are paired", attention=inside(RotatedAsByMeta))
made_of("FutureSeenInside", "the causal mask is missing", attention=inside(SeesTheFuture))
made_of("GeGLUInside", "gate is GELU", feed_forward=GeGLU)
made_of("GeGLUOfGemmaInside", "gate is GELU", feed_forward=GeGLUOfGemma)
made_of("GateOnFc2Inside", "Gate and value are exchanged", feed_forward=GateOnFc2)
made_of("LayerNormInside", "The norms are LayerNorms", norm=LayerNormWithoutShift)
made_of("EpsOfLlama1Inside", "eps is 1e-6, the value of Llama 1", norm=NormOfLlama1)
made_of("LayerNormOfTorch", "'norm1.bias' too many", norm=nn.LayerNorm)
made_of("LayerNormOfGPT2", "needs a parameter 'norm1.weight'", norm=BookLayerNormInFloat32)
made_of("OutProjBias", "'att.out_proj.bias' too many. A Llama block", attention=BiasedOutProj)
made_of("BiasesInside", "'ff.fc1.bias' too many. A Llama block has no biases", feed_forward=Biases)
made_of("MetaNames", "needs a parameter 'ff.fc1.weight'", feed_forward=NamedAsByMeta)
made_of(
    "WideFeedForward", "ff.fc1.weight of WideFeedForward has shape", feed_forward=FourTimesWider
)
made_of("NoDtype", 'Does every nn.Linear get dtype=cfg["dtype"]', feed_forward=DtypeForgotten)
made_of("NoDtypeInAttention", "Does every nn.Linear get", attention=AttentionWithoutDtype)


@refused(check_llama2_block, "norm1.weight and norm2.weight are one and the same parameter")
class OneNormForBoth(Block):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.norm1 = self.norm2 = BookRMSNormInFloat32(cfg["emb_dim"])


@refused(check_llama2_block, "stopped with KeyError: 'drop_rate'. The config has vocab_size")
class DropRateOfGPT2(Block):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.drop_shortcut = nn.Dropout(cfg["drop_rate"])


@refused(check_llama2_block, "your code stopped with TypeError")
class BlockOfGPT2WithoutPositions(Block):
    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))
