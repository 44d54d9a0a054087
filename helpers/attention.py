"""Attention: multi-head (GPT-2), grouped-query (every Llama), and the two functions that attend.

Both classes share one forward pass; they differ in how many key/value heads they project to. The
function that attends is a part of its own: plain matrix products, or PyTorch's fused kernel.
"""

import torch
from torch import nn
from torch.nn import functional as F

from helpers.positions import apply_rope


def causal_mask(T, S, device=None):
    """(T, S), True where a query must not look: the T queries are the last T of the S tokens."""
    return torch.ones(T, S, dtype=torch.bool, device=device).triu(diagonal=S - T + 1)


def attend_plain(queries, keys, values, mask=None, dropout=0.0):
    """Scaled dot-product attention, written out as the two matrix products that it is.

    Shapes   queries (B, H, T, E), keys and values (B, G, S, E) -> (B, H, T, E)
    Mask     None is causal, the queries being the last T of the S keys; else boolean, True is
             hidden, and its last two axes cover at least T and S
    Source   Vaswani et al. 2017, arXiv:1706.03762, equation 1; groups: arXiv:2305.13245
    """
    H, T, E = queries.shape[1:]
    G, S = keys.shape[1:3]
    keys = keys.repeat_interleave(
        H // G, dim=1
    )  # (B, H, S, E): neighbouring query heads share one key head
    values = values.repeat_interleave(H // G, dim=1)
    hidden = causal_mask(T, S, queries.device) if mask is None else mask[..., :T, :S]
    scores = queries @ keys.transpose(-2, -1) / E**0.5  # (B, H, T, S)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1, dtype=torch.float32)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights.to(values.dtype) @ values


def attend_sdpa(queries, keys, values, mask=None, dropout=0.0):
    """The same result from PyTorch's fused kernel, which never stores the (T, S) scores.

    `is_causal=True` lines the mask up with the first key, so it is right only for T == S.

    Shapes   as attend_plain
    Source   Dao 2023, arXiv:2307.08691 (FlashAttention-2), through scaled_dot_product_attention
    """
    T, S, share = queries.shape[2], keys.shape[2], queries.shape[1] // keys.shape[1]
    if share > 1 and queries.device.type == "mps":  # enable_gqa is not reliable there
        keys, values = (t.repeat_interleave(share, dim=1) for t in (keys, values))
    causal = mask is None and T == S
    if mask is not None:
        mask = ~mask[..., :T, :S]  # PyTorch's boolean mask is True where a query may look
    elif 1 < T < S:
        mask = ~causal_mask(T, S, queries.device)
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


class MultiHeadAttention(nn.Module):
    """Every head compares its own queries with its own keys and mixes its own values.

    Queries and keys are rotated exactly when `cos` is given. With a cache, this call's keys and
    values are appended to it, and the queries look at all that it holds. `context_length` is not
    used: it is there because code written for the book passes it.

    Shapes   x (B, T, d_in), cos and sin (T, E) or (B, T, E) -> (B, T, d_out)
    Errors   ValueError if num_heads does not divide d_out and no head_dim is given
    Source   Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2
    """

    def __init__(
        self,
        d_in,
        d_out,
        context_length,
        dropout,
        num_heads,
        qkv_bias=False,
        *,
        attend=attend_plain,
        head_dim=None,
        out_bias=True,
        dtype=None,
    ):
        super().__init__()
        if head_dim is None and d_out % num_heads:
            raise ValueError(
                f"num_heads={num_heads} does not divide d_out={d_out}: "
                "every head needs the same width"
            )
        self.attend, self.dropout = attend, dropout
        self.num_heads = self.num_kv_groups = num_heads
        self.head_dim = head_dim or d_out // num_heads
        width = num_heads * self.head_dim
        self.W_query = nn.Linear(d_in, width, bias=qkv_bias, dtype=dtype)
        self.W_key = nn.Linear(d_in, width, bias=qkv_bias, dtype=dtype)
        self.W_value = nn.Linear(d_in, width, bias=qkv_bias, dtype=dtype)
        self.out_proj = nn.Linear(width, d_out, bias=out_bias, dtype=dtype)

    @classmethod
    def from_config(cls, cfg, attend=attend_plain):
        return cls(
            cfg["emb_dim"],
            cfg["emb_dim"],
            cfg["context_length"],
            cfg["drop_rate"],
            cfg["n_heads"],
            cfg["qkv_bias"],
            attend=attend,
            head_dim=cfg["head_dim"],
            out_bias=cfg["bias"],
            dtype=cfg["dtype"],
        )

    @staticmethod
    def label(cfg):
        return "multi-head"

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        B, T, _ = x.shape
        queries = self.W_query(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, E)
        keys = self.W_key(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, G, T, E)
        values = self.W_value(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        if cos is not None:
            queries, keys = apply_rope(queries, cos, sin), apply_rope(keys, cos, sin)
        if cache is not None:
            keys, values = cache.append(keys, values)  # (B, G, S, E): all so far
        mixed = self.attend(queries, keys, values, mask, self.dropout if self.training else 0.0)
        return self.out_proj(mixed.transpose(1, 2).reshape(B, T, -1))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        """Accept and drop the causal mask that the book's class keeps among its weights."""
        state_dict.pop(prefix + "mask", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class GroupedQueryAttention(MultiHeadAttention):
    """Multi-head attention in which num_heads / num_kv_groups query heads share one key/value head.

    As many groups as heads is multi-head attention; one group is multi-query attention.

    Shapes   as MultiHeadAttention
    Errors   ValueError if num_kv_groups does not divide num_heads, or for biases or dropout in a
             config
    Source   Ainslie et al. 2023, arXiv:2305.13245
    """

    def __init__(
        self,
        d_in,
        d_out,
        num_heads,
        num_kv_groups,
        dtype=None,
        *,
        attend=attend_plain,
        head_dim=None,
    ):
        super().__init__(
            d_in,
            d_out,
            None,
            0.0,
            num_heads,
            attend=attend,
            head_dim=head_dim,
            out_bias=False,
            dtype=dtype,
        )
        if num_heads % num_kv_groups:
            raise ValueError(
                f"num_kv_groups={num_kv_groups} does not divide num_heads={num_heads}: "
                "every key/value head must serve the same number of query heads"
            )
        self.num_kv_groups = num_kv_groups
        self.W_key = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=False, dtype=dtype)
        self.W_value = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=False, dtype=dtype)

    @classmethod
    def from_config(cls, cfg, attend=attend_plain):
        for key in ("drop_rate", "qkv_bias", "bias"):
            if cfg[key]:
                raise ValueError(
                    f"{key}={cfg[key]}: grouped-query attention has neither biases nor dropout"
                )
        return cls(
            cfg["emb_dim"],
            cfg["emb_dim"],
            cfg["n_heads"],
            cfg["n_kv_groups"] or cfg["n_heads"],
            cfg["dtype"],
            attend=attend,
            head_dim=cfg["head_dim"],
        )

    @staticmethod
    def label(cfg):
        share = cfg["n_heads"] // (
            cfg["n_kv_groups"] or cfg["n_heads"]
        )  # query heads on one key/value head
        return {1: "multi-head", cfg["n_heads"]: "multi-query"}.get(
            share, f"grouped-query, {share} to 1"
        )
