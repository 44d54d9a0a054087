"""A block's feed-forward: two matrices around GELU (GPT-2), three around SiLU (every Llama)."""

import math

import torch
from torch import nn


class GELU(nn.Module):
    """x times (nearly) the probability of a standard normal value below x, in GPT-2's tanh form.

    Source   Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2
    """

    def forward(self, x):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))


class SiLU(nn.Module):
    """x * sigmoid(x): smooth like GELU, and one sigmoid to compute. Also called swish.

    Source   Elfwing, Uchibe and Doya 2017, arXiv:1702.03118; Ramachandran et al. 2017,
             arXiv:1710.05941
    """

    def forward(self, x):
        return x * torch.sigmoid(x)


class GELUFeedForward(nn.Module):
    """Widen, bend, narrow: GPT-2's feed-forward, with biases.

    Inside it is four times as wide, unless hidden_dim says else.

    Shapes   x (B, T, D) -> (B, T, D)
    Source   Radford et al. 2018 and 2019 (GPT, GPT-2)
    """

    def __init__(self, cfg):
        super().__init__()
        width, hidden, dtype = (
            cfg["emb_dim"],
            cfg.get("hidden_dim") or 4 * cfg["emb_dim"],
            cfg.get("dtype"),
        )
        bias = cfg.get("bias", True)
        self.layers = nn.Sequential(
            nn.Linear(width, hidden, bias=bias, dtype=dtype),
            GELU(),
            nn.Linear(hidden, width, bias=bias, dtype=dtype),
        )

    @classmethod
    def from_config(cls, cfg):
        return cls(cfg)

    @staticmethod
    def label(cfg):
        return "GELU, 2 matrices"

    def forward(self, x):
        return self.layers(x)


class FeedForward(nn.Module):
    """SwiGLU: one matrix makes a gate, one a value, a third narrows their product; no biases.

    Shapes   x (B, T, D) -> (B, T, D)
    Source   Shazeer 2020, arXiv:2002.05202, equation 6
    """

    def __init__(self, cfg):
        super().__init__()
        if cfg.get("bias"):
            raise ValueError("bias=True: the SwiGLU feed-forward has no biases")
        width, hidden, dtype = (
            cfg["emb_dim"],
            cfg.get("hidden_dim") or 4 * cfg["emb_dim"],
            cfg.get("dtype"),
        )
        self.fc1 = nn.Linear(width, hidden, bias=False, dtype=dtype)  # gate
        self.fc2 = nn.Linear(width, hidden, bias=False, dtype=dtype)  # value
        self.fc3 = nn.Linear(hidden, width, bias=False, dtype=dtype)  # back to the stream's width
        self.silu = SiLU()

    @classmethod
    def from_config(cls, cfg):
        return cls(cfg)

    @staticmethod
    def label(cfg):
        return "SwiGLU, 3 matrices"

    def forward(self, x):
        return self.fc3(self.silu(self.fc1(x)) * self.fc2(x))
