"""Twins of LayerNorm and RMSNorm."""

import torch
from torch import nn
from torch.nn import functional as F

from helpers.checks import check_layernorm, check_rmsnorm
from helpers.norms import LayerNorm, RMSNorm
from twins.registry import accepted, proves, refused

proves(check_layernorm, LayerNorm, "LayerNorm: right, in float32 and bfloat16")
proves(check_rmsnorm, RMSNorm, "RMSNorm: right, in float32 and bfloat16")


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
