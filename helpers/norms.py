"""Normalisation: LayerNorm (GPT-2) and RMSNorm (every Llama)."""

import torch
from torch import nn


class LayerNorm(nn.Module):
    """Shift and scale each token's vector to mean 0, variance 1, then by a learned scale and shift.

    Shapes   x (B, T, D) -> (B, T, D) in the dtype of x; the statistics are taken in float32
    Errors   ValueError if the last axis of x is not emb_dim
    Source   Ba, Kiros and Hinton 2016, arXiv:1607.06450, section 3; biased variance
    """

    def __init__(self, emb_dim, *, eps=1e-5, dtype=None):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(emb_dim, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(emb_dim, dtype=dtype))

    @classmethod
    def from_config(cls, cfg):
        return cls(cfg["emb_dim"], eps=cfg["norm_eps"], dtype=cfg["dtype"])

    @staticmethod
    def label(cfg):
        return "LayerNorm"

    def forward(self, x):
        check_width(x, self.scale)
        centred = x.float() - x.float().mean(dim=-1, keepdim=True)
        variance = centred.pow(2).mean(dim=-1, keepdim=True)  # (B, T, 1)
        return (centred * torch.rsqrt(variance + self.eps) * self.scale + self.shift).type_as(x)


class RMSNorm(nn.Module):
    """Scale each token's vector to root-mean-square 1, then by a learned weight.

    Shapes   x (B, T, D) -> (B, T, D) in the dtype of x; the mean is taken in float32
    Errors   ValueError if the last axis of x is not emb_dim
    Source   Zhang and Sennrich 2019, arXiv:1910.07467, equation 4
    """

    def __init__(self, emb_dim, eps=1e-5, *, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(emb_dim, dtype=dtype))

    @classmethod
    def from_config(cls, cfg):
        return cls(cfg["emb_dim"], eps=cfg["norm_eps"], dtype=cfg["dtype"])

    @staticmethod
    def label(cfg):
        return "RMSNorm"

    def forward(self, x):
        check_width(x, self.weight)
        mean_square = x.float().pow(2).mean(dim=-1, keepdim=True)  # (B, T, 1)
        return (x * torch.rsqrt(mean_square + self.eps) * self.weight).type_as(x)


def check_width(x, weight):
    """Refuse an input whose last axis is not the norm's width (broadcasting would hide width 1)."""
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"the norm was built for emb_dim={weight.shape[0]}, but x has shape {tuple(x.shape)}"
        )
