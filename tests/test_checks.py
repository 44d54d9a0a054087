"""Every check refuses the mistakes that people make and names their cause; what is right passes.

The wrong twins and the right answers are written as a reader would write them, without the helpers.
"""

import functools
import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import checks
from helpers.attention import MultiHeadAttention
from helpers.checks import (
    CheckFailed,
    StillOpen,
    assert_differs,
    assert_same,
    check_apply_rope,
    check_causal_attention,
    check_gelu,
    check_layernorm,
    check_llama2_block,
    check_permute,
    check_rmsnorm,
    check_rope_params,
    check_silu,
    check_swiglu,
    distance,
    exercise,
    seeded,
)
from helpers.feed_forward import GELU, FeedForward, SiLU
from helpers.llama2 import TransformerBlock
from helpers.norms import LayerNorm, RMSNorm
from helpers.positions import apply_rope, compute_rope_params, permute, unpermute

OWN = {  # check: the helper that it proves
    check_layernorm: LayerNorm,
    check_rmsnorm: RMSNorm,
    check_gelu: GELU,
    check_silu: SiLU,
    check_swiglu: FeedForward,
    check_rope_params: compute_rope_params,
    check_apply_rope: apply_rope,
    check_permute: permute,
    check_causal_attention: MultiHeadAttention,
    check_llama2_block: TransformerBlock,
}
LINES = {  # check: what it prints
    check_layernorm: "LayerNorm: right, in float32 and bfloat16",
    check_rmsnorm: "RMSNorm: right, in float32 and bfloat16",
    check_gelu: "GELU: right, in float32 and bfloat16",
    check_silu: "SiLU: right, in float32 and bfloat16",
    check_swiglu: "SwiGLU: right, in float32 and bfloat16",
    check_rope_params: "RoPE tables: right, in float32, up to position 99,999",
    check_apply_rope: (
        "apply_rope: right, in float32 and bfloat16, for one and for many rows of positions"
    ),
    check_permute: "permute: right; interleaved rotation before is half-split rotation after",
    check_causal_attention: "causal attention: right, in float32 and bfloat16, plain and rotated",
    check_llama2_block: "a block of Llama 2: right, in float32 and bfloat16",
}
PLAIN = "causal attention: right, in float32 and bfloat16"  # without cos and sin
REFUSED, ACCEPTED = [], []  # filled by the two decorators
EACH_CHECK = pytest.mark.parametrize("check", OWN, ids=lambda c: c.__name__)


def called(check, thing):
    return f"{check.__name__.removeprefix('check_')}-{thing.__name__}"


def refused(check, hint):
    """Mark a wrong twin, with words of the hint that must name its mistake."""

    def register(thing):
        REFUSED.append(pytest.param(check, thing, hint, id=called(check, thing)))
        return thing

    return register


def accepted(check, line=None):
    """Mark a right answer."""

    def register(thing):
        ACCEPTED.append(pytest.param(check, thing, line or LINES[check], id=called(check, thing)))
        return thing

    return register


# --- LayerNorm ----------


class Norm(nn.Module):
    """The constructor of a LayerNorm; the twins add the forward pass."""

    eps = 1e-5

    def __init__(self, emb_dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(emb_dim))
        self.shift = nn.Parameter(torch.zeros(emb_dim))


@accepted(check_layernorm)
class BookLayerNormInFloat32(Norm):
    def forward(self, x):
        wide = x.to(torch.float32)
        mean = wide.mean(dim=-1, keepdim=True)
        var = wide.var(dim=-1, keepdim=True, unbiased=False)
        norm_x = (wide - mean) / torch.sqrt(var + self.eps)
        return (self.scale * norm_x + self.shift).to(x.dtype)


@accepted(check_layernorm)
class LayerNormOfMoments(Norm):
    def forward(self, x):
        wide = x.double()
        mean = torch.einsum("...d->...", wide)[..., None] / x.shape[-1]
        variance = torch.einsum("...d,...d->...", wide, wide)[..., None] / x.shape[-1] - mean**2
        out = (wide - mean) / (variance + self.eps) ** 0.5 * self.scale + self.shift
        return out.to(x.dtype)


@accepted(check_layernorm)
class FunctionalLayerNormShiftBuiltFirst(nn.Module):
    def __init__(self, emb_dim):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(emb_dim))
        self.scale = nn.Parameter(torch.ones(emb_dim))

    def forward(self, x):
        wide = F.layer_norm(x.float(), x.shape[-1:], self.scale.float(), self.shift.float())
        return wide.type_as(x)


@refused(check_layernorm, "sample variance, divided by n - 1")
class SampleVariance(Norm):
    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        return self.scale * (x - mean) / torch.sqrt(var + self.eps) + self.shift


@refused(check_layernorm, "eps is outside the root")
class EpsOutside(Norm):
    def forward(self, x):
        std = x.std(-1, keepdim=True, unbiased=False)
        return self.scale * (x - x.mean(-1, keepdim=True)) / (std + self.eps) + self.shift


@refused(check_layernorm, "eps is missing")
class NoEps(Norm):
    def forward(self, x):
        std = x.std(-1, keepdim=True, unbiased=False)
        return self.scale * (x - x.mean(-1, keepdim=True)) / std + self.shift


@refused(check_layernorm, "eps is missing or far too small")
class EpsOfBert(BookLayerNormInFloat32):
    eps = 1e-12


@refused(check_layernorm, "eps has another value: here it is 1e-5")
class EpsOfVit(BookLayerNormInFloat32):
    eps = 1e-6


@refused(check_layernorm, "eps has another value: here it is 1e-5")
class EpsOfKeras(BookLayerNormInFloat32):
    eps = 1e-3


@refused(check_layernorm, "x comes back as it is")
class LayerNormUnchanged(Norm):
    def forward(self, x):
        return x


@refused(check_layernorm, "The mean is not subtracted")
class MeanKept(Norm):
    def forward(self, x):
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.scale * x / torch.sqrt(var + self.eps) + self.shift


@refused(check_layernorm, "The root is missing")
class NoRoot(Norm):
    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / (var + self.eps) + self.shift


@refused(check_layernorm, "not divided by sqrt")
class OnlyCentred(Norm):
    def forward(self, x):
        return self.scale * (x - x.mean(-1, keepdim=True)) + self.shift


@refused(check_layernorm, "The shift is not added")
class NoShift(Norm):
    def forward(self, x):
        return self.scale * F.layer_norm(x, x.shape[-1:])


@refused(check_layernorm, "The scale is not applied")
class NoScale(Norm):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:]) + self.shift


@refused(check_layernorm, "Scale and shift are exchanged")
class ScaleShiftExchanged(Norm):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.shift, self.scale)


@refused(check_layernorm, "The shift is added before the scale multiplies")
class ShiftFirst(Norm):
    def forward(self, x):
        return self.scale * (F.layer_norm(x, x.shape[-1:]) + self.shift)


@refused(check_layernorm, "The statistics run over the tokens")
class OverTokens(Norm):
    def forward(self, x):
        mean, var = x.mean(-2, keepdim=True), x.var(-2, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(var + self.eps) + self.shift


@refused(check_layernorm, "One mean and variance for the whole tensor")
class WholeTensor(Norm):
    def forward(self, x):
        var = x.var(unbiased=False)
        return self.scale * (x - x.mean()) / torch.sqrt(var + self.eps) + self.shift


@refused(check_layernorm, "Take the statistics in float32")
class Bfloat16Statistics(Norm):
    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(var + self.eps) + self.shift


@refused(check_layernorm, "bfloat16 went in and float32 came out. Cast the result back")
class Float32Out(Norm):
    def forward(self, x):
        x = x.float()
        return F.layer_norm(x, x.shape[-1:], self.scale.float(), self.shift.float())


@refused(check_layernorm, "float32 went in and float64 came out")
class Float64Out(Norm):
    def forward(self, x):
        x = x.double()
        return F.layer_norm(x, x.shape[-1:], self.scale.double(), self.shift.double())


@refused(check_layernorm, "needs a parameter 'scale'; it has gamma, beta")
class NamedGammaBeta(nn.Module):
    def __init__(self, emb_dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(emb_dim))
        self.beta = nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


@refused(check_layernorm, "needs a parameter 'scale'; it has weight, bias")
class NamedAsInTorch(nn.LayerNorm):
    pass


@refused(check_layernorm, "needs a parameter 'shift'; it has scale")
class ShiftNeverMade(nn.Module):
    def __init__(self, emb_dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(emb_dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


@refused(check_layernorm, "scale of PlainTensors is a plain tensor: wrap it in nn.Parameter")
class PlainTensors(nn.Module):
    def __init__(self, emb_dim):
        super().__init__()
        self.scale, self.shift = torch.ones(emb_dim), torch.zeros(emb_dim)

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


@refused(check_layernorm, "scale of OneNumber has shape (1,), expected (48,)")
class OneNumber(Norm):
    def __init__(self, emb_dim):
        super().__init__(1)

    def forward(self, x):
        return self.scale * F.layer_norm(x, x.shape[-1:]) + self.shift


@refused(check_layernorm, "scale and shift are one and the same parameter")
class SharedParameter(Norm):
    def __init__(self, emb_dim):
        super().__init__(emb_dim)
        self.shift = self.scale

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


@refused(check_layernorm, "scale must begin as 1 everywhere")
class BeginsAtZero(BookLayerNormInFloat32):
    def __init__(self, emb_dim):
        super().__init__(emb_dim)
        self.scale = nn.Parameter(torch.zeros(emb_dim))


@refused(check_layernorm, "shift must begin as 0 everywhere")
class ShiftBeginsAtOne(BookLayerNormInFloat32):
    def __init__(self, emb_dim):
        super().__init__(emb_dim)
        self.shift = nn.Parameter(torch.ones(emb_dim))


@refused(check_layernorm, "(keepdim=True)")
class NoKeepdim(Norm):
    def forward(self, x):
        return self.scale * (x - x.mean(-1)) / torch.sqrt(x.var(-1) + self.eps) + self.shift


@refused(check_layernorm, "your code changes its input")
class ChangesItsInput(Norm):
    def forward(self, x):
        x -= x.mean(-1, keepdim=True)
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


@refused(check_layernorm, "the shape is (14, 48), expected (2, 7, 48)")
class BatchFlattened(Norm):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift).flatten(0, -2)


@refused(check_layernorm, "expected a tensor, got tuple")
class ReturnsTwo(Norm):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift), x.mean(-1)


@refused(check_layernorm, "SuperForgotten.__init__ must begin with super().__init__()")
class SuperForgotten(nn.Module):
    def __init__(self, emb_dim):
        self.eps = 1e-5

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)


@refused(check_layernorm, "your code stopped with AttributeError: cannot assign parameter")
class SuperForgottenBeforeParameters(nn.Module):
    def __init__(self, emb_dim):
        self.scale = nn.Parameter(torch.ones(emb_dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale)


@refused(check_layernorm, "is not an nn.Module")
class NoModule:
    def __init__(self, emb_dim):
        self.scale, self.shift = torch.ones(emb_dim), torch.zeros(emb_dim)

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


# --- RMSNorm ----------


class Weighted(nn.Module):
    """The constructor of an RMSNorm; the twins add the forward pass."""

    def __init__(self, emb_dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(emb_dim))

    def mean_square(self, x):
        return x.pow(2).mean(-1, keepdim=True)


@accepted(check_rmsnorm)
class BookRMSNormInFloat32(Weighted):
    def forward(self, x):
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        return (normed * self.weight).to(dtype=x.dtype)


@accepted(check_rmsnorm)
class RMSNormOfTransformers(Weighted):
    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        return self.weight * wide.to(x.dtype)


@accepted(check_rmsnorm)
class RMSNormByEinsum(Weighted):
    def forward(self, x):
        wide = x.double()
        norms = torch.einsum("...d,...d->...", wide, wide) / x.shape[-1]
        out = torch.einsum(
            "...d,...,d->...d", wide, (norms + self.eps) ** -0.5, self.weight.double()
        )
        return out.type_as(x)


@accepted(check_rmsnorm)
class FunctionalRMSNorm(Weighted):
    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


@refused(check_rmsnorm, "The mean is subtracted: that is LayerNorm")
class LayerNormWithoutShift(Weighted):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, eps=self.eps)


@refused(check_rmsnorm, "The variance is used")
class Variance(Weighted):
    def forward(self, x):
        return self.weight * x / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + self.eps)


@refused(check_rmsnorm, "The variance is used")
class VarianceOfASample(Weighted):
    def forward(self, x):
        return self.weight * x / torch.sqrt(x.var(-1, keepdim=True) + self.eps)


@refused(check_rmsnorm, "eps is outside the root")
class RmsPlusEps(Weighted):
    def forward(self, x):
        return self.weight * x / (torch.sqrt(self.mean_square(x)) + self.eps)


@refused(check_rmsnorm, "eps is missing")
class RmsWithoutEps(Weighted):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(self.mean_square(x))


@refused(check_rmsnorm, "eps is missing or far too small")
class EpsClamps(Weighted):
    def forward(self, x):
        return self.weight * x / torch.sqrt(self.mean_square(x)).clamp(min=self.eps**2)


@refused(check_rmsnorm, "The eps given to the constructor is not used")
class EpsIgnored(Weighted):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(self.mean_square(x) + 1e-5)


@refused(check_rmsnorm, "eps is missing or far too small")
class EpsOfTorch(nn.RMSNorm):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__(emb_dim)


@refused(check_rmsnorm, "eps is 1e-6, the value of Llama 1")
class EpsOfLlama1(BookRMSNormInFloat32):
    def __init__(self, emb_dim, eps=1e-6):
        super().__init__(emb_dim, eps)


@refused(check_rmsnorm, "eps has another value: here it is 1e-5")
class LargeEps(BookRMSNormInFloat32):
    def __init__(self, emb_dim, eps=1e-4):
        super().__init__(emb_dim, eps)


@refused(check_rmsnorm, "x comes back as it is")
class RMSNormUnchanged(Weighted):
    def forward(self, x):
        return x


@refused(check_rmsnorm, "your code stopped with TypeError")
class NoEpsArgument(BookRMSNormInFloat32):
    def __init__(self, emb_dim):
        super().__init__(emb_dim)


@refused(check_rmsnorm, "The squares are summed")
class SumOfSquares(Weighted):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)


@refused(check_rmsnorm, "The squares are summed")
class UnitLength(Weighted):
    def forward(self, x):
        return self.weight * F.normalize(x, dim=-1, eps=1e-12)


@refused(check_rmsnorm, "The root is missing")
class DividedByMeanSquare(Weighted):
    def forward(self, x):
        return self.weight * x / (self.mean_square(x) + self.eps)


@refused(check_rmsnorm, "Multiplied by the root: divide by it")
class SqrtForRsqrt(Weighted):
    def forward(self, x):
        return self.weight * x * torch.sqrt(self.mean_square(x) + self.eps)


@refused(check_rmsnorm, "The weight is not applied")
class WeightForgotten(Weighted):
    def forward(self, x):
        return x * torch.rsqrt(self.mean_square(x) + self.eps)


@refused(check_rmsnorm, "The weight is added")
class WeightAdded(Weighted):
    def forward(self, x):
        return x * torch.rsqrt(self.mean_square(x) + self.eps) + self.weight


@refused(check_rmsnorm, "The weight comes before the mean of the squares")
class WeightFirst(Weighted):
    def forward(self, x):
        x = x * self.weight
        return x * torch.rsqrt(self.mean_square(x) + self.eps)


@refused(check_rmsnorm, "that is Gemma's RMSNorm")
class OnePlusWeight(Weighted):
    def forward(self, x):
        return x * torch.rsqrt(self.mean_square(x) + self.eps) * (1 + self.weight)


@refused(check_rmsnorm, "The mean of the absolute values")
class MeanAbsolute(Weighted):
    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


@refused(check_rmsnorm, "The mean of the absolute values")
class RootOfMeanAbsolute(Weighted):
    def forward(self, x):
        return self.weight * x / torch.sqrt(x.abs().mean(-1, keepdim=True) + self.eps)


@refused(check_rmsnorm, "The statistics run over the tokens")
class SquaresOverTokens(Weighted):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


@refused(check_rmsnorm, "One mean square for the whole tensor")
class WholeTensorsSquare(Weighted):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean() + self.eps)


@refused(check_rmsnorm, "(keepdim=True)")
class SquaresWithoutKeepdim(Weighted):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)


@refused(check_rmsnorm, "Take the statistics in float32")
class SquaresInBfloat16(Weighted):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(self.mean_square(x) + self.eps)


@refused(check_rmsnorm, "Take the statistics in float32 and cast once")
class RootCastTooEarly(Weighted):
    def forward(self, x):
        root = torch.rsqrt(self.mean_square(x.float()) + self.eps)
        return self.weight * (x * root.to(x.dtype))


@refused(check_rmsnorm, "bfloat16 went in and float32 came out")
class NotCastBack(Weighted):
    def forward(self, x):
        x = x.float()
        return self.weight * x * torch.rsqrt(self.mean_square(x) + self.eps)


@refused(check_rmsnorm, "needs a parameter 'weight'; it has scale")
class NamedScale(nn.Module):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__()
        self.eps, self.scale = eps, nn.Parameter(torch.ones(emb_dim))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.scale, self.eps)


@refused(check_rmsnorm, "needs a parameter 'weight'; it has none")
class NothingLearned(nn.Module):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


@refused(check_rmsnorm, "weight of WeightIsABuffer is a plain tensor")
class WeightIsABuffer(nn.Module):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(emb_dim))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


@refused(check_rmsnorm, "a parameter 'shift' too many. It learns weight, nothing else")
class ShiftToo(Weighted):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__(emb_dim, eps)
        self.shift = nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.shift


@refused(check_rmsnorm, "weight must begin as 1 everywhere")
class BeginsAtRandom(BookRMSNormInFloat32):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__(emb_dim, eps)
        self.weight = nn.Parameter(torch.randn(emb_dim))


@refused(check_rmsnorm, "two calls with the same input give different results in eval mode")
class DropoutInside(BookRMSNormInFloat32):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1)


# --- GELU and SiLU ----------


@accepted(check_gelu)
def gelu_of_gpt2(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


@accepted(check_gelu)
class BookGELU(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


@accepted(check_gelu)
class TanhGELUOfTorch(nn.GELU):
    def __init__(self):
        super().__init__(approximate="tanh")


@accepted(check_gelu)
def gelu_by_sigmoid(x):  # (1 + tanh(a)) / 2 = sigmoid(2 a)
    wide = x.float()
    return (wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide**3))).to(x.dtype)


@refused(check_gelu, "the exact GELU with erf")
def erf_form(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@refused(check_gelu, "the exact GELU with erf")
class ExactGELUOfTorch(nn.GELU):
    pass


@refused(check_gelu, "x * sigmoid(1.702 x), another approximation")
def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@refused(check_gelu, "The factor 0.5 is missing")
def half_missing(x):
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@refused(check_gelu, "The cubic term 0.044715 x^3 is missing")
def cubic_missing(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x))


@refused(check_gelu, "0.44715 instead of 0.044715")
def cubic_ten_times(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.44715 * x**3)))


@refused(check_gelu, "The third power of x is wanted")
def square_for_cube(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**2)))


@refused(check_gelu, "The root is missing: the factor is sqrt(2 / pi)")
def root_missing(x):
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) * (x + 0.044715 * x**3)))


@refused(check_gelu, "The factor sqrt(2 / pi) is missing")
def factor_missing(x):
    return 0.5 * x * (1 + torch.tanh(x + 0.044715 * x**3))


@refused(check_gelu, "brackets around the sum")
def brackets_inside_missing(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x + 0.044715 * x**3))


@refused(check_gelu, "The 1 inside 0.5 x (1 + tanh(...)) is missing")
def one_missing(x):
    return 0.5 * x * torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@refused(check_gelu, "Brackets are missing: 0.5 x (1 + tanh(...))")
def brackets_missing(x):
    return 0.5 * x * 1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@refused(check_gelu, "The factor x in front is missing")
def probability_alone(x):
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@refused(check_gelu, "x comes back as it is")
def gelu_unchanged(x):
    return x


@refused(check_gelu, "This is ReLU")
class ReLU(nn.Module):
    def forward(self, x):
        return torch.clamp(x, min=0)


@refused(check_gelu, "This is SiLU")
def silu_for_gelu(x):
    return x / (1 + torch.exp(-x))


@refused(check_gelu, "This is tanh")
class Tanh(nn.Tanh):
    pass


@refused(check_gelu, "bfloat16 went in and float32 came out")
def gelu_not_cast_back(x):
    return F.gelu(x.float(), approximate="tanh")


@refused(check_gelu, "In float32 it is right, so something is rounded too much")
def gelu_of_coarse_bfloat16(x):
    step = 2**-7 if x.dtype == torch.float32 else 2**-3
    rounded = x if x.dtype == torch.float32 else (x / step).round() * step
    return F.gelu(rounded, approximate="tanh")


@refused(check_gelu, "your code changes its input")
def gelu_in_place(x):
    return x.mul_(0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


@refused(check_gelu, "must begin with super().__init__()")
class GELUWithoutSuper(nn.Module):
    def __init__(self):
        pass

    def forward(self, x):
        return F.gelu(x, approximate="tanh")


@refused(check_gelu, "GELU: the shape is (401, 1), expected (401,)")
def gelu_with_an_axis_more(x):
    return F.gelu(x, approximate="tanh")[..., None]


@accepted(check_silu)
def silu_by_exp(x):
    return x / (1 + torch.exp(-x))


@accepted(check_silu)
class SiLUByTanh(nn.Module):
    def forward(self, x):
        return (0.5 * x.float() * (1 + torch.tanh(x.float() / 2))).to(x.dtype)


@accepted(check_silu)
class SiLUOfTorch(nn.SiLU):
    pass


@refused(check_silu, "The factor x is missing")
class SigmoidAlone(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x)


@refused(check_silu, "The sign in the exponent is wrong")
def wrong_sign(x):
    return x / (1 + torch.exp(x))


@refused(check_silu, "x * sigmoid(1.702 x), the approximation of GELU")
def quick_gelu_for_silu(x):
    return x * torch.sigmoid(1.702 * x)


@refused(check_silu, "This is x * tanh(x)")
def tanh_for_sigmoid(x):
    return x * torch.tanh(x)


@refused(check_silu, "This is GELU")
class GELUForSiLU(nn.GELU):
    pass


@refused(check_silu, "This is GELU")
def tanh_gelu_for_silu(x):
    return gelu_of_gpt2(x)


@refused(check_silu, "x comes back as it is")
def silu_unchanged(x):
    return x


@refused(check_silu, "This is ReLU")
class ReLUForSiLU(nn.ReLU):
    pass


@refused(check_silu, "This is Mish")
def mish(x):
    return x * torch.tanh(torch.log(1 + torch.exp(x)))


@refused(check_silu, "hard swish")
def hard_swish(x):
    return x * (x + 3).clamp(0, 6) / 6


@refused(check_silu, "a power of e overflows")
def overflowing(x):
    return x * torch.exp(x) / (1 + torch.exp(x))


@refused(check_silu, "bfloat16 went in and float32 came out")
def silu_not_cast_back(x):
    return F.silu(x.float())


@refused(check_silu, "your code changes its input")
class InPlaceSiLU(nn.SiLU):
    def __init__(self):
        super().__init__(inplace=True)


# --- SwiGLU ----------


class Matrices(nn.Module):
    """The constructor of a SwiGLU feed-forward; the twins add the forward pass."""

    def __init__(self, cfg):
        super().__init__()
        sizes = cfg["emb_dim"], cfg["hidden_dim"]
        self.fc1 = nn.Linear(*sizes, dtype=cfg["dtype"], bias=False)
        self.fc2 = nn.Linear(*sizes, dtype=cfg["dtype"], bias=False)
        self.fc3 = nn.Linear(*sizes[::-1], dtype=cfg["dtype"], bias=False)


@accepted(check_swiglu)
class BookFeedForward(Matrices):
    def forward(self, x):
        x_fc1 = self.fc1(x)
        x_fc2 = self.fc2(x)
        x = F.silu(x_fc1) * x_fc2
        return self.fc3(x)


@accepted(check_swiglu)
class SwiGLUByEinsum(Matrices):
    def forward(self, x):
        gate = torch.einsum("...d,fd->...f", x, self.fc1.weight)
        value = torch.einsum("...d,fd->...f", x, self.fc2.weight)
        return torch.einsum("...f,...f,df->...d", gate * gate.sigmoid(), value, self.fc3.weight)


@accepted(check_swiglu)
class SwiGLUWithOneWideMatrix(Matrices):
    def forward(self, x):
        both = F.linear(x, torch.cat([self.fc1.weight, self.fc2.weight]))
        gate, value = both.chunk(2, dim=-1)
        return F.linear(gate / (1 + torch.exp(-gate)) * value, self.fc3.weight)


@refused(check_swiglu, "Gate and value are exchanged")
class GateOnFc2(Matrices):
    def forward(self, x):
        return self.fc3(self.fc1(x) * F.silu(self.fc2(x)))


@refused(check_swiglu, "The activation is missing")
class Bilinear(Matrices):
    def forward(self, x):
        return self.fc3(self.fc1(x) * self.fc2(x))


@refused(check_swiglu, "SiLU is applied to the product")
class SiLUOfTheProduct(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x) * self.fc2(x)))


@refused(check_swiglu, "SiLU is applied to both sides")
class SiLUTwice(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) * F.silu(self.fc2(x)))


@refused(check_swiglu, "Gate and value are added")
class Sum(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) + self.fc2(x))


@refused(check_swiglu, "The gate is a sigmoid (GLU)")
class GLU(Matrices):
    def forward(self, x):
        return self.fc3(torch.sigmoid(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The gate is GELU (GeGLU)")
class GeGLU(Matrices):
    def forward(self, x):
        return self.fc3(F.gelu(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The gate is GELU (GeGLU)")
class GeGLUOfGemma(Matrices):
    def forward(self, x):
        return self.fc3(gelu_of_gpt2(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The gate is ReLU")
class ReGLU(Matrices):
    def forward(self, x):
        return self.fc3(torch.relu(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The value is not used")
class TwoMatrices(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)))


@refused(check_swiglu, "fc1 is used for gate and value")
class Fc1Twice(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) * self.fc1(x))


@refused(check_swiglu, "fc2 is used for gate and value")
class Fc2Twice(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc2(x)) * self.fc2(x))


@refused(check_swiglu, "SiLU comes after fc3")
class SiLUAtTheEnd(Matrices):
    def forward(self, x):
        return F.silu(self.fc3(self.fc1(x) * self.fc2(x)))


@refused(check_swiglu, "The input is added: that is the block's task")
class ShortcutInside(BookFeedForward):
    def forward(self, x):
        return x + super().forward(x)


@refused(check_swiglu, "x comes back as it is")
class FeedForwardUnchanged(Matrices):
    def forward(self, x):
        return x


@refused(check_swiglu, "fc3 is missing")
class NotNarrowed(Matrices):
    def forward(self, x):
        return F.silu(self.fc1(x)) * self.fc2(x)


@refused(check_swiglu, "a parameter 'fc1.bias' too many. SwiGLU has three matrices and no biases")
class Biases(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc1 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], dtype=cfg["dtype"])
        self.fc2 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], dtype=cfg["dtype"])
        self.fc3 = nn.Linear(cfg["hidden_dim"], cfg["emb_dim"], dtype=cfg["dtype"])

    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "needs a parameter 'fc1.weight'; it has w1.weight, w2.weight, w3.weight")
class NamedAsByMeta(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.w1 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)
        self.w2 = nn.Linear(cfg["hidden_dim"], cfg["emb_dim"], bias=False)
        self.w3 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@refused(check_swiglu, "fc1.weight of FourTimesWider has shape (96, 24), expected (40, 24)")
class FourTimesWider(BookFeedForward):
    def __init__(self, cfg):
        super().__init__({**cfg, "hidden_dim": 4 * cfg["emb_dim"]})


@refused(check_swiglu, "fc1.weight of SizesExchanged has shape (24, 40), expected (40, 24)")
class SizesExchanged(BookFeedForward):
    def __init__(self, cfg):
        super().__init__({**cfg, "emb_dim": cfg["hidden_dim"], "hidden_dim": cfg["emb_dim"]})


@refused(check_swiglu, "fc1.weight and fc2.weight are one and the same parameter")
class OneMatrixForBoth(BookFeedForward):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.fc2.weight = self.fc1.weight


@refused(check_swiglu, 'Does every nn.Linear get dtype=cfg["dtype"]')
class DtypeForgotten(BookFeedForward):
    def __init__(self, cfg):
        super().__init__({**cfg, "dtype": None})


@refused(check_swiglu, "bfloat16 went in and float32 came out")
class SwiGLUNotCastBack(Matrices):
    def forward(self, x):
        x = x.float()
        hidden = F.silu(x @ self.fc1.weight.float().T) * (x @ self.fc2.weight.float().T)
        return hidden @ self.fc3.weight.float().T


@refused(check_swiglu, "In float32 it is right, so something is rounded too much")
class CoarseInBfloat16(BookFeedForward):
    def forward(self, x):
        return super().forward(x if x.dtype == torch.float32 else (4 * x).round() / 4)


@refused(
    check_swiglu, "stopped with KeyError: 'drop_rate'. The config has emb_dim, hidden_dim, dtype"
)
class KeyOfGPT2(BookFeedForward):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.drop = nn.Dropout(cfg["drop_rate"])


# --- RoPE tables ----------


@accepted(check_rope_params)
def book_tables(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    inv_freq = 1.0 / (
        theta_base ** (torch.arange(0, head_dim, 2)[: head_dim // 2].float() / head_dim)
    )
    positions = torch.arange(context_length)
    angles = positions.unsqueeze(1) * inv_freq.unsqueeze(0)
    angles = torch.cat([angles, angles], dim=1)
    return torch.cos(angles), torch.sin(angles)


@accepted(check_rope_params)
def tables_of_complex_numbers(head_dim, theta_base=10_000, context_length=4096):
    exponents = torch.arange(head_dim // 2, dtype=torch.float64) * -2 / head_dim
    angles = torch.outer(torch.arange(context_length).double(), theta_base**exponents)
    turns = torch.polar(torch.ones_like(angles), angles).repeat(1, 2)
    return turns.real.float(), turns.imag.float()


@accepted(check_rope_params)
def tables_by_exp(head_dim, theta_base=10_000, context_length=4096):
    inverse = torch.exp(torch.arange(0, head_dim, 2) * (-math.log(theta_base) / head_dim))
    angles = torch.einsum("t,i->ti", torch.arange(context_length).float(), inverse)
    return [torch.stack([f(angles)] * 2, dim=1).flatten(1) for f in (torch.cos, torch.sin)]


def tables(exponent, first=0):
    """A function with the helper's parameters and a wrong exponent, a function of E."""

    def wrong(head_dim, theta_base=10_000, context_length=4096):
        positions = torch.arange(first, first + context_length, dtype=torch.float32)
        angles = torch.outer(positions, theta_base ** exponent(head_dim).float()).repeat(1, 2)
        return angles.cos(), angles.sin()

    return wrong


WRONG_TABLES = {
    "half_the_exponent": (tables(lambda E: -torch.arange(E // 2) / E), "grows half as fast"),
    "steps_of_two_times_two": (
        tables(lambda E: -2 * torch.arange(0, E, 2) / E),
        "twice what it should be",
    ),
    "divided_by_half_the_head": (
        tables(lambda E: -torch.arange(0, E, 2) / (E // 2)),
        "divided by head_dim, not by half of it",
    ),
    "pairs_from_one": (
        tables(lambda E: -torch.arange(2, E + 1, 2) / E),
        "pair 0 turns by 1 radian",
    ),
    "positive_exponent": (tables(lambda E: torch.arange(0, E, 2) / E), "the exponent is negative"),
    "whole_division": (tables(lambda E: -(torch.arange(0, E, 2) // E)), "cut to 0 by //"),
    "positions_from_one": (tables(lambda E: -torch.arange(0, E, 2) / E, 1), "Positions begin at 1"),
}
for name, (function, hint) in WRONG_TABLES.items():
    function.__name__ = name
    refused(check_rope_params, hint)(function)


@refused(check_rope_params, "theta_base is not used")
def base_ignored(head_dim, theta_base=10_000, context_length=4096):
    return book_tables(head_dim, 10_000, context_length)


@refused(check_rope_params, "cos and sin are exchanged")
def sin_first(head_dim, theta_base=10_000, context_length=4096):
    return book_tables(head_dim, theta_base, context_length)[::-1]


@refused(check_rope_params, "The columns pair up as 0 and 1")
def interleaved_columns(head_dim, theta_base=10_000, context_length=4096):
    cos, sin = book_tables(head_dim, theta_base, context_length)
    half = head_dim // 2
    return cos[:, :half].repeat_interleave(2, 1), sin[:, :half].repeat_interleave(2, 1)


@refused(check_rope_params, "repeat the half")
def half_the_columns(head_dim, theta_base=10_000, context_length=4096):
    cos, sin = book_tables(head_dim, theta_base, context_length)
    return cos[:, : head_dim // 2], sin[:, : head_dim // 2]


@refused(check_rope_params, "These are the angles: take their cos and sin")
def angles_alone(head_dim, theta_base=10_000, context_length=4096):
    inv_freq = 1.0 / (theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(context_length).float(), inv_freq).repeat(1, 2)
    return angles, angles


@refused(check_rope_params, "The sign is wrong")
def negative_sin(head_dim, theta_base=10_000, context_length=4096):
    cos, sin = book_tables(head_dim, theta_base, context_length)
    return cos, -sin


@refused(check_rope_params, "The angles are taken as degrees")
def in_degrees(head_dim, theta_base=10_000, context_length=4096):
    inv_freq = 1.0 / (theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.deg2rad(torch.outer(torch.arange(context_length).float(), inv_freq)).repeat(1, 2)
    return angles.cos(), angles.sin()


@refused(check_rope_params, "the cos table is bfloat16: it is float32")
def tables_in_bfloat16(head_dim, theta_base=10_000, context_length=4096):
    cos, sin = book_tables(head_dim, theta_base, context_length)
    return cos.to(torch.bfloat16), sin.to(torch.bfloat16)


@refused(check_rope_params, "the cos table is float16: it is float32")
def tables_in_float16(head_dim, theta_base=10_000, context_length=4096):
    return [t.half() for t in book_tables(head_dim, theta_base, context_length)]


@refused(check_rope_params, "the sin table is float64: it is float32")
def sin_in_float64(head_dim, theta_base=10_000, context_length=4096):
    cos, sin = book_tables(head_dim, theta_base, context_length)
    return cos, sin.double()


def computed_in(dtype):
    def wrong(head_dim, theta_base=10_000, context_length=4096):
        inv_freq = 1.0 / theta_base ** (torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
        angles = torch.arange(context_length, dtype=dtype)[:, None] * inv_freq
        return angles.repeat(1, 2).cos().float(), angles.repeat(1, 2).sin().float()

    wrong.__name__ = f"angles_in_{str(dtype).removeprefix('torch.')}"
    return wrong


refused(check_rope_params, "later ones drift")(computed_in(torch.bfloat16))
refused(check_rope_params, "later ones drift")(computed_in(torch.float16))


@refused(check_rope_params, "float32, never bfloat16 or float16")
def rounded_to_bfloat16(head_dim, theta_base=10_000, context_length=4096):
    return [t.to(torch.bfloat16).float() for t in book_tables(head_dim, theta_base, context_length)]


@refused(check_rope_params, "cos at position 99,999: the largest difference is")
def far_positions_in_bfloat16(head_dim, theta_base=10_000, context_length=4096):
    if context_length < 1000:
        return book_tables(head_dim, theta_base, context_length)
    return computed_in(torch.bfloat16)(head_dim, theta_base, context_length)


@refused(check_rope_params, "The first positions are right, later ones drift")
def one_angle_added_per_position(head_dim, theta_base=10_000, context_length=4096):
    inv_freq = 1.0 / (theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = inv_freq.half().expand(context_length, -1).cumsum(0) - inv_freq.half()
    return angles.repeat(1, 2).float().cos(), angles.repeat(1, 2).float().sin()


@refused(check_rope_params, "There is one row for each of context_length positions")
def at_most_4096(head_dim, theta_base=10_000, context_length=4096):
    return book_tables(head_dim, theta_base, min(context_length, 4096))


@refused(check_rope_params, "the shape is (4096, 16), expected (40, 16)")
def always_4096(head_dim, theta_base=10_000, context_length=4096):
    return book_tables(head_dim, theta_base)


@refused(check_rope_params, "expected two tables, cos and sin, got complex numbers")
def freqs_cis(head_dim, theta_base=10_000, context_length=4096):
    inv_freq = 1.0 / (theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(context_length).float(), inv_freq)
    return torch.polar(torch.ones_like(angles), angles)


@refused(check_rope_params, "expected two tables, cos and sin")
def cos_alone(head_dim, theta_base=10_000, context_length=4096):
    return book_tables(head_dim, theta_base, context_length)[0]


@refused(check_rope_params, "your code stopped with TypeError")
def other_parameter_names(dim, base, end):
    return book_tables(dim, base, end)


# --- rotating ----------


def rows(cos, sin, x):
    """cos and sin, brought to the shape of x (B, H, T, E)."""
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return cos[..., : x.shape[2], :], sin[..., : x.shape[2], :]


@accepted(check_apply_rope)
def book_rope(x, cos, sin):
    head_dim = x.shape[-1]
    x1 = x[..., : head_dim // 2]
    x2 = x[..., head_dim // 2 :]
    cos, sin = rows(cos, sin, x)
    rotated = torch.cat((-x2, x1), dim=-1)
    return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)


@accepted(check_apply_rope)
def rope_by_complex_numbers(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = rows(cos, sin, x)
    turns = torch.complex(cos[..., :half], sin[..., :half])
    pairs = x.float().unflatten(-1, (2, half)).transpose(-2, -1).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turns)
    return turned.transpose(-2, -1).flatten(-2).type_as(x)


@accepted(check_apply_rope)
def rope_by_rolling(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = rows(cos, sin, x)
    signs = torch.ones(2 * half)
    signs[:half] = -1
    return (x * cos + x.roll(half, -1) * signs * sin).to(x.dtype)


@accepted(check_apply_rope)
def rope_by_matrices(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = (t[..., :half] for t in rows(cos, sin, x))
    matrices = torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])])  # (2, 2, ..., T, i)
    pairs = x.float().unflatten(-1, (2, half))
    if cos.dim() == 2:
        return torch.einsum("pqti,bhtqi->bhtpi", matrices, pairs).flatten(-2).to(x.dtype)
    return torch.einsum("pqbzti,bhtqi->bhtpi", matrices, pairs).flatten(-2).to(x.dtype)


@refused(check_apply_rope, "It turns backwards")
def backwards(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([second, -first], -1) * sin


@refused(check_apply_rope, "Neighbours are paired, 0 with 1 (interleaved)")
def pairs_of_neighbours(x, cos, sin):
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


@refused(check_apply_rope, "Neighbours are paired, 0 with 1 (interleaved)")
def rotation_of_meta(x, cos, sin):
    half = x.shape[-1] // 2
    turns = torch.complex(cos[:, :half], sin[:, :half])
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], half, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


@refused(check_apply_rope, "exchanged without a minus")
def minus_missing(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([second, first], -1) * sin


@refused(check_apply_rope, "The halves are not exchanged")
def not_exchanged(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-first, second], -1) * sin


@refused(check_apply_rope, "Both halves have a minus")
def two_minuses(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, -first], -1) * sin


@refused(check_apply_rope, "cos and sin are exchanged")
def sin_for_cos(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * sin + torch.cat([-second, first], -1) * cos


@refused(check_apply_rope, "The turned part is missing")
def cos_only(x, cos, sin):
    return x * cos


@refused(check_apply_rope, "Only the first half is rotated")
def half_rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    half = x.shape[-1] // 2
    return torch.cat([first * cos[:, :half] - second * sin[:, :half], second], -1)


@refused(check_apply_rope, "Nothing is rotated")
def unchanged(x, cos, sin):
    return x


@refused(check_apply_rope, "It is rotated twice")
def rotated_twice(x, cos, sin):
    return book_rope(book_rope(x, cos, sin), cos, sin)


@refused(check_apply_rope, "the result is (B, H, T, E)")
def transposed_back(x, cos, sin):
    return book_rope(x, cos, sin).transpose(1, 2)


@refused(check_apply_rope, "The angle follows the head")
def angle_of_the_head(x, cos, sin):
    first, second = x.chunk(2, -1)
    if x.shape[1] != x.shape[2]:  # (T, 1, E) fits (B, T, H, E); here it fits only by accident
        return book_rope(x, cos, sin)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


@refused(check_apply_rope, "x is (B, H, T, E)")
def written_for_tokens_first(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


@refused(check_apply_rope, "A table longer than the text: use its first T rows")
def table_not_cut(x, cos, sin):
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


@refused(check_apply_rope, "A table longer than the text: use its first T rows")
def last_rows(x, cos, sin):
    return book_rope(x, cos[-x.shape[2] :], sin[-x.shape[2] :])


@refused(check_apply_rope, "put the head's axis between, cos[:, None]")
def one_table_only(x, cos, sin):
    T, (first, second) = x.shape[2], x.chunk(2, -1)
    cos, sin = cos[:T], sin[:T]
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


@refused(check_apply_rope, "all follow one row here")
def first_row_for_all(x, cos, sin):
    if cos.dim() == 3:
        cos, sin = cos[0], sin[0]
    return book_rope(x, cos, sin)


@refused(check_apply_rope, "cut them to [:, :T]")
def batch_cut_instead_of_tokens(x, cos, sin):
    T, (first, second) = x.shape[2], x.chunk(2, -1)
    cos, sin = cos[:T], sin[:T]
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


@refused(check_apply_rope, "multiply in the tables' float32, cast at the end")
def tables_cast_first(x, cos, sin):
    return book_rope(x, cos.to(x.dtype), sin.to(x.dtype))


@refused(check_apply_rope, "multiply in the tables' float32, cast at the end")
def products_cast_first(x, cos, sin):
    cos, sin = rows(cos, sin, x)
    first, second = x.chunk(2, -1)
    return (x * cos).to(x.dtype) + (torch.cat([-second, first], -1) * sin).to(x.dtype)


@refused(check_apply_rope, "bfloat16 went in and float32 came out")
def left_in_float32(x, cos, sin):
    return book_rope(x.float(), cos, sin)


@refused(check_apply_rope, "your code changes its input")
def rotated_in_place(x, cos, sin):
    half = x.shape[-1] // 2
    x[..., :half] = x[..., :half] * cos[:, :half] - x[..., half:] * sin[:, :half]
    x[..., half:] = x[..., half:] * cos[:, half:] + x[..., :half] * sin[:, half:]
    return x


@refused(check_apply_rope, "your code stopped with RuntimeError: view size is not compatible")
def views_what_is_not_contiguous(x, cos, sin):
    B, H, T, E = x.shape
    return book_rope(x.view(B * H, 1, T, E), cos, sin).view(B, H, T, E)


# --- reordering rows ----------


@accepted(check_permute)
def permute_of_transformers(weight, n_heads):
    rows, columns = weight.shape
    halves = weight.view(n_heads, rows // n_heads // 2, 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


@accepted(check_permute)
def permute_by_index(weight, n_heads):
    E = len(weight) // n_heads
    order = [h * E + i for h in range(n_heads) for i in [*range(0, E, 2), *range(1, E, 2)]]
    return weight[order]


@accepted(check_permute)
def permute_by_slices(weight, n_heads):
    heads = weight.unflatten(0, (n_heads, -1))
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)


@refused(check_permute, "This is the inverse")
def inverse(weight, n_heads):
    rows, columns = weight.shape
    return weight.view(n_heads, 2, rows // n_heads // 2, columns).transpose(1, 2).reshape(rows, -1)


@refused(check_permute, "This is the inverse")
def own_unpermute(weight, n_heads):
    return unpermute(weight, n_heads)


@refused(check_permute, "The rows of different heads are mixed")
def across_heads(weight, n_heads):
    return torch.cat([weight[0::2], weight[1::2]])


@refused(check_permute, "Nothing is reordered")
def nothing(weight, n_heads):
    return weight.clone()


@refused(check_permute, "Each head is reversed")
def reversed_heads(weight, n_heads):
    return weight.unflatten(0, (n_heads, -1)).flip(1).flatten(0, 1)


@refused(check_permute, "The even rows are not together")
def neighbours_exchanged(weight, n_heads):
    return weight.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


@refused(check_permute, "The columns are reordered")
def columns(weight, n_heads):
    return permute_by_slices(weight.T, n_heads).T


@refused(check_permute, "The heads are not put together again")
def left_as_heads(weight, n_heads):
    rows, columns = weight.shape
    return weight.view(n_heads, rows // n_heads // 2, 2, columns).transpose(1, 2)


@refused(check_permute, "your code changes its input")
def permuted_in_place(weight, n_heads):
    weight[:] = permute_by_slices(weight, n_heads).clone()
    return weight


# --- attention ----------


def turn(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """A right attention in steps; a twin does one of them wrong."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        future = torch.triu(torch.ones(context_length, context_length), diagonal=1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        q, k, v = self.project(x)
        q, k, v = (self.split(t) for t in (q, k, v))
        if cos is not None:
            q, k, v = self.rotate(q, k, v, cos, sin)
        scores = self.scores(q, k)
        return self.out(self.merge(self.dropped(self.weights(scores, self.hidden(scores))) @ v))

    def project(self, x):
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)

    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), turn(k, cos, sin), v

    def scores(self, q, k):
        return q @ k.transpose(2, 3) / self.head_dim**0.5

    def hidden(self, scores):
        T = scores.shape[-1]
        return self.future.bool()[:T, :T]

    def weights(self, scores, hidden):
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)

    def dropped(self, weights):
        return self.dropout(weights)

    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.transpose(1, 2).contiguous().view(B, T, H * E)

    def out(self, merged):
        return self.out_proj(merged)


accepted(check_causal_attention)(Attention)


@accepted(check_causal_attention, PLAIN)
class BookAttention(Attention):
    def forward(self, x):
        b, num_tokens, _ = x.shape
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        keys = keys.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        queries = queries.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = values.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        mask_bool = self.future.bool()[:num_tokens, :num_tokens]
        attn_scores.masked_fill_(mask_bool, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)
        context_vec = (attn_weights @ values).transpose(1, 2)
        return self.out_proj(context_vec.reshape(b, num_tokens, -1))


@accepted(check_causal_attention)
class FusedAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads, self.p = num_heads, dropout
        self.out_proj = nn.Linear(d_out, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        projected = (w(x) for w in (self.W_query, self.W_key, self.W_value))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in projected)
        if cos is not None:
            q, k = rope_by_complex_numbers(q, cos, sin), rope_by_complex_numbers(k, cos, sin)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


@accepted(check_causal_attention)
class AttentionByEinsum(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.num_heads, self.head_dim) for t in self.project(x))
        if cos is not None:  # (T, 1, E), since the tokens come first here
            q, k = turn(q, cos[:, None], sin[:, None]), turn(k, cos[:, None], sin[:, None])
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * self.head_dim**-0.5
        scores = scores - 1e9 * self.future[:T, :T].to(scores.dtype)
        mixed = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v)
        return self.out_proj(mixed.reshape(B, T, -1))


@accepted(check_causal_attention)
class AttentionInALoop(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        heads = []
        for h in range(self.num_heads):
            part = slice(h * self.head_dim, (h + 1) * self.head_dim)
            q, k, v = (t[..., part] for t in self.project(x))
            if cos is not None:
                q, k = turn(q, cos, sin), turn(k, cos, sin)
            rows = []
            for t in range(x.shape[1]):  # each token looks back
                weights = torch.softmax(q[:, t, None] @ k[:, : t + 1].mT / self.head_dim**0.5, -1)
                rows.append(weights @ v[:, : t + 1])
            heads.append(torch.cat(rows, dim=1))
        return self.out_proj(torch.cat(heads, dim=-1))


@refused(check_causal_attention, "the causal mask is missing")
class SeesTheFuture(Attention):
    def weights(self, scores, hidden):
        return scores.softmax(-1)


@refused(check_causal_attention, "x comes back as it is")
class AttentionUnchanged(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        return x


@refused(check_causal_attention, "is a mask or a shape kept from the call before?")
class MaskOfTheFirstCall(Attention):
    kept = None

    def hidden(self, scores):
        if self.kept is None:
            self.kept = super().hidden(scores)
        return self.kept


@refused(check_causal_attention, "begins one diagonal too late")
class SeesTheNextToken(Attention):
    def hidden(self, scores):
        return torch.ones_like(scores[0, 0], dtype=torch.bool).triu(diagonal=2)


@refused(check_causal_attention, "A token does not see itself")
class DoesNotSeeItself(Attention):
    def hidden(self, scores):
        return torch.triu(torch.ones_like(scores[0, 0])).bool()


@refused(check_causal_attention, "The past is hidden instead of the future")
class HidesThePast(Attention):
    def hidden(self, scores):
        return torch.ones_like(scores[0, 0]).tril(-1).bool()


@refused(check_causal_attention, "the mask is the wrong way round")
class TrilOfVisibleAsHidden(Attention):
    def hidden(self, scores):
        return torch.tril(torch.ones_like(scores[0, 0])).bool()


@refused(check_causal_attention, "the mask is the wrong way round")
class MaskInverted(Attention):
    def hidden(self, scores):
        return ~super().hidden(scores)


@refused(check_causal_attention, "is the mask cut to (T, T)?")
class MaskNotCut(Attention):
    def hidden(self, scores):
        return self.future.bool()


@refused(check_causal_attention, "The scores are not scaled")
class NotScaled(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3)


@refused(check_causal_attention, "The scores are divided by sqrt(d_out)")
class ScaledByTheWidth(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / (self.num_heads * self.head_dim) ** 0.5


@refused(check_causal_attention, "The scores are divided by the head size")
class ScaledWithoutRoot(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / self.head_dim


@refused(check_causal_attention, "The scores are multiplied by sqrt(head size)")
class ScaledUp(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) * self.head_dim**0.5


@refused(check_causal_attention, "The softmax runs over the queries")
class SoftmaxOverQueries(Attention):
    def weights(self, scores, hidden):
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=2)


@refused(check_causal_attention, "The softmax runs over the heads")
class SoftmaxOverHeads(Attention):
    def weights(self, scores, hidden):
        return torch.nan_to_num(scores.masked_fill(hidden, -torch.inf).softmax(dim=1))


@refused(check_causal_attention, "The softmax runs over the heads")
class SoftmaxOverHeadsWithNaN(Attention):
    def weights(self, scores, hidden):
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=1)


@refused(check_causal_attention, "The softmax is missing")
class NoSoftmax(Attention):
    def weights(self, scores, hidden):
        return scores.masked_fill(hidden, 0)


@refused(check_causal_attention, "Masked scores are 0")
class ScoresTimesMask(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores * ~hidden, dim=-1)


@refused(check_causal_attention, "Masked scores are 0")
class FilledWithNearlyNothing(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores.masked_fill(hidden, 1e-9), dim=-1)


@refused(check_causal_attention, "The mask comes after the softmax")
class MaskAfterSoftmax(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores, dim=-1) * ~hidden


@refused(check_causal_attention, "give different results in eval mode: dropout is still on")
class DropoutAlwaysOn(Attention):
    def dropped(self, weights):
        return F.dropout(weights, self.dropout.p)


@refused(check_causal_attention, "give different results in eval mode: dropout is still on")
class FusedDropoutAlwaysOn(FusedAttention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        self.training = True
        return super().forward(x, mask, cos, sin, cache)


@refused(check_causal_attention, "Queries and keys are exchanged")
class QueriesKeysExchanged(Attention):
    def project(self, x):
        return self.W_key(x), self.W_query(x), self.W_value(x)


@refused(check_causal_attention, "Keys and values are exchanged")
class KeysValuesExchanged(Attention):
    def project(self, x):
        return self.W_query(x), self.W_value(x), self.W_key(x)


@refused(check_causal_attention, "Queries and values are exchanged")
class QueriesValuesExchanged(Attention):
    def project(self, x):
        return self.W_value(x), self.W_key(x), self.W_query(x)


@refused(check_causal_attention, "W_query makes the keys too")
class KeysFromWQuery(Attention):
    def project(self, x):
        return self.W_query(x), self.W_query(x), self.W_value(x)


@refused(check_causal_attention, "W_key makes the queries too")
class QueriesFromWKey(Attention):
    def project(self, x):
        return self.W_key(x), self.W_key(x), self.W_value(x)


@refused(check_causal_attention, "W_key makes the values too")
class ValuesFromWKey(Attention):
    def project(self, x):
        return self.W_query(x), self.W_key(x), self.W_key(x)


@refused(check_causal_attention, "The biases of the projections are not used")
class BiasesIgnored(Attention):
    def project(self, x):
        return [x @ w.weight.T for w in (self.W_query, self.W_key, self.W_value)]


@refused(check_causal_attention, "needs a parameter 'W_query.bias'")
class QkvBiasIgnored(Attention):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__(d_in, d_out, context_length, dropout, num_heads)


@refused(
    check_causal_attention, "'W_query.bias' too many. Biases only where qkv_bias asks for them"
)
class AlwaysBiased(Attention):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__(d_in, d_out, context_length, dropout, num_heads, True)


@refused(check_causal_attention, "'mask' too many")
class MaskIsAParameter(Attention):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__(d_in, d_out, context_length, dropout, num_heads, qkv_bias)
        self.mask = nn.Parameter(torch.ones(context_length, context_length).triu(1))


@refused(check_causal_attention, "The heads were not transposed before they were merged")
class MergedWithoutTranspose(Attention):
    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.reshape(B, T, H * E)


@refused(check_causal_attention, "The heads are not put side by side")
class NotMerged(Attention):
    def merge(self, heads):
        return heads.transpose(1, 2)

    def out(self, merged):
        return merged


@refused(check_causal_attention, "Tokens and heads are mixed")
class ViewedStraightIntoHeads(Attention):
    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, self.num_heads, T, self.head_dim)


@refused(check_causal_attention, "Tokens and heads are mixed")
class ViewedThereAndBack(ViewedStraightIntoHeads):
    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.reshape(B, T, H * E)


@refused(check_causal_attention, "Tokens and heads are mixed")
class FusedWithoutTranspose(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.num_heads, self.head_dim) for t in self.project(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.reshape(B, T, -1))


@refused(check_causal_attention, "view(B, T, H, E), then transpose(1, 2)")
class TransposeForgotten(Attention):
    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.head_dim)


@refused(check_causal_attention, "All heads look as one")
class OneHead(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        q, k, v = self.project(x)
        scores = q @ k.mT / k.shape[-1] ** 0.5
        return self.out_proj(
            self.weights(scores, self.future.bool()[: x.shape[1], : x.shape[1]]) @ v
        )


@refused(check_causal_attention, "All heads look as one")
class OneHeadOtherScale(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        q, k, v = self.project(x)
        scores = q @ k.mT / self.head_dim**0.5
        return self.out_proj(
            self.weights(scores, self.future.bool()[: x.shape[1], : x.shape[1]]) @ v
        )


@refused(check_causal_attention, "out_proj is missing")
class NoOutProj(Attention):
    def out(self, merged):
        return merged


@refused(check_causal_attention, "needs a parameter 'out_proj.weight'")
class OutProjNeverMade(BookAttention):
    def __init__(self, *args):
        super().__init__(*args)
        self.out_proj = nn.Identity()


@refused(check_causal_attention, "but nothing is rotated")
class CosSinIgnored(Attention):
    def rotate(self, q, k, v, cos, sin):
        return q, k, v


@refused(check_causal_attention, "The values are rotated too")
class ValuesRotated(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), turn(k, cos, sin), turn(v, cos, sin)


@refused(check_causal_attention, "Only the queries are rotated")
class OnlyQueriesRotated(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), k, v


@refused(check_causal_attention, "Only the keys are rotated")
class OnlyKeysRotated(Attention):
    def rotate(self, q, k, v, cos, sin):
        return q, turn(k, cos, sin), v


@refused(check_causal_attention, "It turns backwards")
class RotatedBackwards(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, -sin), turn(k, cos, -sin), v


@refused(check_causal_attention, "or cos and sin are exchanged")
class SinCosExchanged(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, sin, cos), turn(k, sin, cos), v


@refused(check_causal_attention, "Neighbours are paired (interleaved)")
class RotatedAsByMeta(Attention):
    def rotate(self, q, k, v, cos, sin):
        return rotation_of_meta(q, cos, sin), rotation_of_meta(k, cos, sin), v


@refused(check_causal_attention, "or each head as a whole: the angle follows the token")
class RotatedBeforeTranspose(Attention):
    def rotate(self, q, k, v, cos, sin):
        H = self.num_heads
        q, k = (turn(t.transpose(1, 2), cos[:H], sin[:H]).transpose(1, 2) for t in (q, k))
        return q, k, v


@refused(check_causal_attention, "The given cos and sin are not used")
class OwnTables(Attention):
    def rotate(self, q, k, v, cos, sin):
        cos, sin = book_tables(self.head_dim, 10_000, q.shape[2])
        return turn(q, cos, sin), turn(k, cos, sin), v


@refused(check_causal_attention, "bfloat16 went in and float32 came out")
class AttentionNotCastBack(Attention):
    def out(self, merged):
        return super().out(merged).float()


@refused(check_causal_attention, "Cast the softmax, or what was rotated, back to x.dtype")
class RotatedNotCastBack(FusedAttention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        if cos is None:
            return super().forward(x)
        projected = (w(x) for w in (self.W_query, self.W_key, self.W_value))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in projected)
        q, k = turn(q.float(), cos, sin), turn(k.float(), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


@refused(check_causal_attention, "Cast the softmax, or what was rotated, back to x.dtype")
class SoftmaxNotCastBack(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1, dtype=torch.float32)


@refused(check_causal_attention, "In float32 it is right, so something is rounded too much")
class CoarseScoresInBfloat16(Attention):
    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores if scores.dtype == torch.float32 else scores.round()


@refused(check_causal_attention, "your code changes its input")
class InputScaledInPlace(Attention):
    def project(self, x):
        x *= 1.5
        return super().project(x)


# --- a block of Llama 2 ----------


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


# --- the checks judge them ----------


@functools.cache
def complaint(check, thing):
    """What the check says about a wrong answer."""
    with pytest.raises(CheckFailed) as failure:
        check(thing)
    assert failure.type is CheckFailed  # not StillOpen
    return str(failure.value)


@pytest.mark.parametrize(("check", "thing", "hint"), REFUSED)
def test_a_wrong_twin_is_refused_with_its_cause(check, thing, hint, capsys):
    assert hint in complaint(check, thing)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("check", "thing", "line"), ACCEPTED)
def test_a_right_answer_is_accepted_however_it_is_written(check, thing, line, capsys):
    check(thing)
    assert capsys.readouterr().out == line + "\n"


@EACH_CHECK
def test_the_helpers_own_passes(check, capsys):
    check(OWN[check])
    assert capsys.readouterr().out == LINES[check] + "\n"


def test_an_attention_without_tables_is_proved_without_them(capsys):
    class Plain(MultiHeadAttention):
        def forward(self, x):
            return super().forward(x)

    check_causal_attention(Plain)
    assert capsys.readouterr().out == PLAIN + "\n"


def test_every_hint_is_given_to_some_wrong_twin(monkeypatch):
    offered, judge = set(), checks._judge

    def spy(what, got, wanted, tolerance, mistakes=dict):
        offered.update(mistakes())
        judge(what, got, wanted, tolerance, mistakes)

    monkeypatch.setattr(checks, "_judge", spy)
    for check, own in OWN.items():
        check(own)
    monkeypatch.undo()
    said = [complaint(*case.values[:2]) for case in REFUSED]
    assert len(offered) > 100
    assert not [hint for hint in offered if not any(s.endswith(hint) for s in said)]


@EACH_CHECK
def test_a_check_leaves_no_trace(check):
    wrong = [case.values[1] for case in REFUSED if case.values[0] is check]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for thing in [OWN[check], *wrong[:3], *wrong[-3:]]:
        exercise(check, thing)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled() and torch.get_num_threads() == threads


@EACH_CHECK
def test_a_check_takes_less_than_two_seconds(check):
    times = []
    for _ in range(2):  # the machine may be busy with something else
        start = time.perf_counter()
        check(OWN[check])
        times.append(time.perf_counter() - start)
    assert min(times) < 2


def test_a_failure_says_the_same_every_time():
    complaints = {str(complaint.__wrapped__(check_causal_attention, NotScaled)) for _ in range(2)}
    assert len(complaints) == 1


def test_an_error_of_the_reader_is_the_cause_of_the_failure():
    with pytest.raises(CheckFailed) as failure:
        check_apply_rope(lambda x, cos, sin: x @ cos)
    assert isinstance(failure.value.__cause__, RuntimeError)


# --- exercises ----------


def stub_function(*args, **kwargs):
    pass


def not_implemented(*args, **kwargs):
    raise NotImplementedError


def stub_class(base=nn.Module, begin=True):
    """A class whose constructor may be there already, and whose forward pass is `pass`."""

    class Stub(base):
        def __init__(self, *args, **kwargs):
            if begin:
                super().__init__(*(args if base is not nn.Module else ()), **kwargs)

        def forward(self, *args, **kwargs):
            pass

    return Stub


class Unwritten(nn.Module):
    pass


class OnlyConstructor(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


class RaisesInForward(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, x, *args, **kwargs):
        raise NotImplementedError("your turn")


class WithModuleDicts(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        names = ("W_query", "W_key", "W_value", "out_proj")
        self.att = nn.ModuleDict({name: nn.Linear(24, 24, bias=False) for name in names})

    def forward(self, x, mask, cos, sin):  # nothing here has a default
        pass


class OtherNamesAndNoForward(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.other = nn.Linear(3, 3)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None): ...


BASES = {
    check_layernorm: Norm,
    check_rmsnorm: Weighted,
    check_swiglu: Matrices,
    check_causal_attention: Attention,
    check_llama2_block: Block,
}


@EACH_CHECK
@pytest.mark.parametrize("stub", [stub_function, not_implemented, None, ...], ids=str)
def test_an_empty_stub_is_still_open(check, stub, capsys):
    exercise(check, stub)
    assert capsys.readouterr().out == "still open\n"


@pytest.mark.parametrize("check", [*BASES, check_gelu, check_silu], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "stub",
    [
        stub_class(begin=False),
        OnlyConstructor,
        Unwritten,
        RaisesInForward,
        OtherNamesAndNoForward,
        "with parameters",
        "empty",
    ],
    ids=lambda s: getattr(s, "__name__", s),
)
def test_a_stub_of_a_module_is_still_open(check, stub, capsys):
    if stub == "with parameters":
        stub = stub_class(BASES.get(check, nn.Module))
    if stub == "empty":

        class stub(nn.Module):
            def __init__(self, *args, **kwargs):
                super().__init__()
                self.eps = 1e-5

            def forward(self, x, mask=None, cos=None, sin=None, cache=None):
                pass

    exercise(check, stub)
    assert capsys.readouterr().out == "still open\n"


def test_a_block_need_not_be_made_of_the_helpers_parts(capsys):
    exercise(check_llama2_block, WithModuleDicts)
    assert capsys.readouterr().out == "still open\n"


@pytest.mark.parametrize("table", [None, ...], ids=str)
def test_two_tables_of_nothing_are_still_open(table, capsys):
    exercise(check_rope_params, lambda **sizes: (table, table))
    assert capsys.readouterr().out == "still open\n"


class DotsInForward(Weighted):
    def forward(self, x):
        mean_square = ...
        return self.weight * x * torch.rsqrt(mean_square + self.eps)


class DotsInConstructor(nn.Module):
    def __init__(self, emb_dim, eps=1e-5):
        super().__init__()
        self.weight = ...

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize(
    ("check", "stub"),
    [
        (check_rmsnorm, DotsInForward),
        (check_rmsnorm, DotsInConstructor),
        (check_silu, lambda x: ...),
        (check_gelu, lambda x: torch.tanh(...)),
        (check_apply_rope, lambda x, cos, sin: x * cos + ... * sin),
    ],
)
def test_what_still_has_dots_is_still_open(check, stub, capsys):
    exercise(check, stub)
    assert capsys.readouterr().out == "still open\n"


@EACH_CHECK
def test_an_exercise_says_what_the_check_says(check, capsys):
    wrong, hint = next(case.values[1:] for case in REFUSED if case.values[0] is check)
    exercise(check, wrong)
    said = capsys.readouterr().out
    assert said.startswith("not yet: ") and hint in said and said.count("\n") == 1
    right = next(case.values[1] for case in ACCEPTED if case.values[0] is check)
    exercise(check, right)
    assert capsys.readouterr().out == LINES[check] + "\n"


@EACH_CHECK
@pytest.mark.parametrize("thing", [7, "text", torch.ones(2), object], ids=repr)
def test_something_else_is_not_yet_an_answer(check, thing, capsys):
    exercise(check, thing)
    assert capsys.readouterr().out.startswith("not yet: ")


def test_an_exercise_hides_no_defect_of_a_check():
    def broken(answer):
        raise KeyError("a defect of the check itself")

    with pytest.raises(KeyError):
        exercise(broken, 1)


# --- comparing ----------

ONES = torch.ones(2, 3)


def changed(by, dtype=torch.float32):
    """Ones, but another number at (1, 2)."""
    other = torch.ones(2, 3, dtype=dtype)
    other[1, 2] += by
    return other


@pytest.mark.parametrize(
    ("got", "wanted", "tolerance", "line"),
    [
        (changed(9e-6), ONES, 1e-5, "same, to 1e-05"),
        (changed(0.04), ONES, 0.05, "same, to 5e-02"),
        (ONES, ONES.clone(), 0, "same, to the last bit"),
        (ONES.bool(), ONES.bool(), 0.0, "same, to the last bit"),
        (ONES.to(torch.bfloat16), ONES, 1e-5, "same, to 1e-05"),
        (changed(-math.inf), changed(-math.inf), 1e-5, "same, to 1e-05"),
        (torch.tensor(2.0), torch.tensor(2.0), 1e-5, "same, to 1e-05"),
        (ONES * 1j, ONES * 1j, 1e-5, "same, to 1e-05"),
        (nn.Parameter(ONES), ONES, 1e-5, "same, to 1e-05"),
    ],
)
def test_assert_same_prints_one_line(got, wanted, tolerance, line, capsys):
    assert_same(got, wanted, tolerance)
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize(
    ("got", "wanted", "tolerance", "message"),
    [
        (changed(0.5), ONES, 1e-5, "0.5 at (1, 2): 1.5 instead of 1; allowed is 1e-05. Look here"),
        (changed(1e-4), ONES, 1e-5, "is 0.0001 at (1, 2): 1.0001 instead of 1"),
        (changed(1e-7), ONES, 0, "at (1, 2): 1 instead of 1; allowed is 0. Look here"),
        (changed(math.nan), ONES, 1e-5, "is inf at (1, 2): nan instead of 1"),
        (ONES, changed(math.nan), 1e9, "is inf at (1, 2): 1 instead of nan"),
        (changed(math.nan), changed(math.nan), 1e-5, "nan instead of nan"),
        (changed(math.inf), ONES, 1e-5, "is inf at (1, 2): inf instead of 1"),
        (changed(math.inf), changed(-math.inf), 1e-5, "inf instead of -inf"),
        (changed(5.0), ONES, math.inf, "6 instead of 1"),
        (changed(5.0), ONES, math.nan, "6 instead of 1"),
        (changed(1j, torch.complex64), ONES, 1e-5, "is 1 at (1, 2): 1+1j instead of 1"),
        (torch.tensor(3.0), torch.tensor(2.0), 1e-5, "is 1 at (): 3 instead of 2"),
        (ONES[:, :2], ONES, 1e-5, "the shape is (2, 2), expected (2, 3). Look here"),
        (ONES[:1], ONES, 1e-5, "the shape is (1, 3), expected (2, 3)"),
        (ONES[:0], ONES[:0], 1e-5, "there is nothing to compare: the shape is (0, 3)"),
        ([1.0], ONES, 1e-5, "expected a tensor, got list. Look here"),
        (None, ONES, 1e-5, "nothing was returned yet"),
    ],
)
def test_assert_same_says_where_and_what(got, wanted, tolerance, message, capsys):
    with pytest.raises(CheckFailed) as failure:
        assert_same(got, wanted, tolerance, hint="Look here")
    assert message in str(failure.value)
    assert isinstance(failure.value, StillOpen) is (got is None)
    assert not capsys.readouterr().out


def test_assert_differs_prints_one_line(capsys):
    assert_differs(changed(0.02), ONES)
    assert_differs(changed(2e-5), ONES, at_least=1e-5)
    assert_differs(changed(-math.inf), ONES)
    assert capsys.readouterr().out == "different, as it should be\n" * 3


@pytest.mark.parametrize(
    ("got", "other", "message"),
    [
        (
            changed(0.005),
            ONES,
            "differ by 0.01 or more; the largest difference is 5.0e-03. See mask",
        ),
        (ONES, ONES.clone(), "the largest difference is 0.0e+00. See mask"),
        (changed(math.nan), ONES, "there is a NaN, which differs from everything. See mask"),
        (ONES, changed(math.nan), "there is a NaN"),
        (ONES[:1], ONES, "the shape is (1, 3), expected (2, 3). See mask"),
        (ONES[:0], ONES[:0], "there is nothing to compare"),
        (None, ONES, "nothing was returned yet"),
        (3, ONES, "expected a tensor, got int"),
    ],
)
def test_assert_differs_can_fail(got, other, message, capsys):
    with pytest.raises(CheckFailed) as failure:
        assert_differs(got, other, hint="See mask")
    assert message in str(failure.value)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("at_least", [0, -1, math.nan])
def test_assert_differs_refuses_a_bound_that_everything_passes(at_least):
    with pytest.raises(ValueError, match="must be above 0"):
        assert_differs(ONES, ONES, at_least)


def test_distance_and_seeded():
    assert distance(ONES, changed(0.25)) == 0.25
    assert distance(ONES, changed(math.nan)) == math.inf
    assert distance(ONES[:0], ONES[:0]) == 0
    assert torch.equal(torch.randn(3, generator=seeded(1)), torch.randn(3, generator=seeded(1)))
