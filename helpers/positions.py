"""How a model knows the order of its tokens: learned positions (GPT-2) and RoPE (every Llama).

A positions part has one method, `place(x, positions)`. It returns the embeddings, to which GPT-2's
rows have been added, and the cosines and sines for the attention, which are None unless queries and
keys are to be rotated.
"""

import math

import torch
from torch import nn

from helpers.config import check_rope_freq


class LearnedPositions(nn.Embedding):
    """One learned vector per position, added to the token's embedding.

    Shapes   place: x (B, T, D), positions (T,) or (B, T) -> x (B, T, D), None, None
    Source   Radford et al. 2019 (GPT-2), after Gehring et al. 2017, arXiv:1705.03122
    """

    @classmethod
    def from_config(cls, cfg):
        return cls(cfg["context_length"], cfg["emb_dim"], dtype=cfg["dtype"])

    @staticmethod
    def label(cfg):
        return "learned"

    def place(self, x, positions):
        return x + self(positions), None, None


class RoPE(nn.Module):
    """Rotary positions: queries and keys turn by an angle that grows with the position.

    The tables are float32 whatever the model's dtype, and real even when the model is built on the
    meta device: `.to(bfloat16)`, `.half()` and `.to_empty()` move them and never change their
    values.

    Shapes   place: x (B, T, D), positions (T,) or (B, T) -> x, cos and sin (T, E) or (B, T, E)
    Source   Su et al. 2021, arXiv:2104.09864; rescaling: Llama 3.1, arXiv:2407.21783 and Meta's
             code
    """

    def __init__(self, head_dim, theta_base, context_length, freq_config=None):
        super().__init__()
        with torch.device("cpu"):
            cos, sin = compute_rope_params(head_dim, theta_base, context_length, freq_config)
        if torch.get_default_device().type != "meta":
            cos, sin = cos.to(torch.get_default_device()), sin.to(torch.get_default_device())
        self.register_buffer("cos", cos, persistent=False)  # (context_length, E)
        self.register_buffer("sin", sin, persistent=False)

    @classmethod
    def from_config(cls, cfg):
        if cfg["rope_base"] is None:
            raise ValueError(
                "rope_base=None: a model with RoPE needs its base, such as "
                '{**cfg, "rope_base": 10_000.0}'
            )
        head_dim = cfg["head_dim"] or cfg["emb_dim"] // cfg["n_heads"]
        return cls(head_dim, cfg["rope_base"], cfg["context_length"], cfg["rope_freq"])

    @staticmethod
    def label(cfg):
        factor = f", rescaled {cfg['rope_freq']['factor']:g}x" if cfg["rope_freq"] else ""
        return f"RoPE, base {cfg['rope_base']:,.0f}{factor}"

    def place(self, x, positions):
        return x, self.cos[positions], self.sin[positions]

    def _apply(self, fn, recurse=True):
        """Follow the model to its device, but keep values and float32: `fn` only tells where."""
        device = fn(torch.empty(1, device=self.cos.device)).device
        if device.type != "meta":
            self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self


def compute_rope_params(
    head_dim, theta_base=10_000, context_length=4096, freq_config=None, dtype=torch.float32
):
    """Cosines and sines of every position's angle, for each pair of a head.

    Pair i turns by `theta_base ** (-2i / head_dim)` radians per position. `freq_config` (factor,
    low_freq_factor, high_freq_factor, original_context_length) is Llama 3.1's rescaling for longer
    contexts: pairs that turn fast keep their speed, slow ones turn `factor` times slower, those in
    between are blended. The result depends on `context_length` in its length only.

    Shapes   -> cos, sin (context_length, head_dim); the second half of the columns repeats the
             first
    Errors   ValueError for an odd head_dim or a freq_config that is not those four numbers
    Source   Su et al. 2021, arXiv:2104.09864, section 3.2.2; Meta's llama-models, model.py
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: RoPE turns pairs of elements")
    inverse_freq = 1 / theta_base ** (
        torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
    )  # (E / 2,), radians per token
    if freq_config is not None:
        inverse_freq = rescale(inverse_freq, freq_config)
    angles = (
        torch.arange(context_length, dtype=dtype)[:, None] * inverse_freq
    )  # (context_length, E / 2)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1)


def rescale(inverse_freq, freq_config):
    """Llama 3.1's RoPE rescaling: (E / 2,) radians per token -> the same, slow pairs slower."""
    check_rope_freq(freq_config)
    low, high = freq_config["low_freq_factor"], freq_config["high_freq_factor"]
    turns = (
        freq_config["original_context_length"] * inverse_freq / (2 * math.pi)
    )  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow, 1: fast, between: blended
    return keep * inverse_freq + (1 - keep) * inverse_freq / freq_config["factor"]


def apply_rope(x, cos, sin):
    """Rotate each pair (i, i + E/2) of every head by its position's angle.

    Shapes   x (B, H, T, E); cos, sin (T, E), (B, T, E) or a longer table whose first T rows count
             -> (B, H, T, E) in the dtype of x, computed in the dtype of the tables
    Source   Su et al. 2021, arXiv:2104.09864, equation 34, in the half-split layout of Hugging
             Face's files
    """
    T, E = x.shape[-2:]
    cos, sin = cos[..., :T, :], sin[..., :T, :]
    if cos.dim() == 3:  # a batch with its own positions in every row
        cos, sin = cos[:, None], sin[:, None]  # (B, 1, T, E)
    first, second = x[..., : E // 2], x[..., E // 2 :]
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def permute(weight, n_heads):
    """Reorder a query or key matrix from interleaved pairs to half-split.

    Meta's .pth and GGUF have interleaved pairs, Hugging Face has half-split. Within each head the
    rows 0, 1, 2, 3, ... (pairs side by side) become 0, 2, 4, ..., 1, 3, 5, ...

    Shapes   (n_heads * E, D) -> the same; keys take their own number of heads
    """
    rows = weight.shape[0]
    pairs = weight.reshape(n_heads, rows // n_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def unpermute(weight, n_heads):
    """The inverse of `permute`: half-split rows back to interleaved pairs."""
    rows = weight.shape[0]
    halves = weight.reshape(n_heads, 2, rows // n_heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
