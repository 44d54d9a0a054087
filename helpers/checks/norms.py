"""Proofs of LayerNorm and RMSNorm."""

import torch
from torch.nn import functional as F

from helpers.checks.judging import (
    CheckFailed,
    bfloat16_steps,
    built,
    dtype_kept,
    judge,
    proof,
    randomised,
    result_and_weights,
    run,
    seeded,
)


def _check_norm(what, cls, starts, right, mistakes, most_steps):
    """Both norms: shapes, small inputs where eps counts, weights away from 1, and bfloat16.

    starts       {name of a parameter: its first value}
    right        (x, *weights) -> the result
    mistakes     (x, *weights) -> {hint: wrong result}
    most_steps   of bfloat16 that the result may be away
    """
    for emb_dim, shape in ((48, (2, 7, 48)), (5, (3, 5)), (16, (1, 1, 16))):
        norm = randomised(built(cls, emb_dim))
        for size, offset in ((1.0, 0.5), (0.01, 0.003)):
            x = size * torch.randn(shape, generator=seeded(1)) + offset
            _compare_norm(f"{what} of {size:g} * normal numbers", norm, starts, x, right, mistakes)
    for name, parameter in built(cls, 7).named_parameters():
        if (parameter != starts[name]).any():
            raise CheckFailed(
                f"{name} must begin as {starts[name]:g} everywhere: at first the norm only "
                f"normalises. Here it begins as {parameter[0].item():g}"
            )
    norm = randomised(built(cls, 64)).to(torch.bfloat16)
    weights = (norm.get_parameter(name).double() for name in starts)
    x = (3 * torch.randn(2, 30, 64, generator=seeded(2)) + 10).to(torch.bfloat16)
    got = run(norm, x)
    dtype_kept(what, got, torch.bfloat16)
    steps = bfloat16_steps(got, right(x.double(), *weights))
    if steps > most_steps:
        raise CheckFailed(
            f"{what} in bfloat16 is {steps:.1f} bfloat16 steps from the float64 formula; up to "
            f"{most_steps:.1f} is rounding. Take the statistics in float32 and cast once, at the "
            "end"
        )
    print(f"{what}: right, in float32 and bfloat16")


def _compare_norm(what, norm, names, x, right, mistakes):
    got, found = result_and_weights(
        norm,
        dict.fromkeys(names, x.shape[-1:]),
        x,
        extra=f"It learns {' and '.join(names)}, nothing else",
        hint="Do the statistics keep their axis (keepdim=True)?",
    )
    weights = [found[name] for name in names]
    # float32 rounds by 1e-6 here; the smallest mistake, another eps, changes 1e-2 and more
    judge(what, got, right(x, *weights), 1e-4, lambda: mistakes(x, *weights))


@proof
def check_layernorm(cls):
    """LayerNorm(emb_dim) with `scale` and `shift`, against torch.nn.functional.layer_norm."""

    def right(x, scale, shift):
        return F.layer_norm(x, x.shape[-1:], scale, shift, 1e-5)

    def normed(x, dim=-1, eps=1e-5, correction=0):
        variance = x.var(dim, keepdim=True, correction=correction)
        return (x - x.mean(dim, keepdim=True)) / torch.sqrt(variance + eps)

    def mistakes(x, scale, shift):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        root = torch.sqrt(variance + 1e-5)
        return {
            "This is the sample variance, divided by n - 1; LayerNorm divides by n: correction=0": (
                scale * normed(x, correction=1) + shift
            ),
            "eps is outside the root; it belongs under it: sqrt(variance + eps)": (
                scale * (x - mean) / (variance.sqrt() + 1e-5) + shift
            ),
            "eps is missing or far too small: small inputs are scaled up too much": (
                scale * normed(x, eps=0.0) + shift
            ),
            "eps has another value: here it is 1e-5": [
                scale * normed(x, eps=eps) + shift for eps in (1e-3, 1e-4, 1e-6)
            ],
            "The mean is not subtracted": scale * x / root + shift,
            "The root is missing: divide by sqrt(variance + eps)": (
                scale * (x - mean) / (variance + 1e-5) + shift
            ),
            "The result is not divided by sqrt(variance + eps)": scale * (x - mean) + shift,
            "x comes back as it is": x,
            "The shift is not added": scale * normed(x),
            "The scale is not applied": normed(x) + shift,
            "Scale and shift are exchanged": shift * normed(x) + scale,
            "The shift is added before the scale multiplies": scale * (normed(x) + shift),
            "The statistics run over the tokens: each token has its own, over the last axis": (
                scale * normed(x, -2) + shift
            ),
            "One mean and variance for the whole tensor: each token has its own, over the last "
            "axis": scale * normed(x, tuple(range(x.dim()))) + shift,
        }

    # one rounding is half a step
    _check_norm("LayerNorm", cls, {"scale": 1.0, "shift": 0.0}, right, mistakes, 1.01)


@proof
def check_rmsnorm(cls):
    """RMSNorm(emb_dim, eps=1e-5) with `weight`, against torch.nn.functional.rms_norm."""

    def right(x, w, eps=1e-5):
        return F.rms_norm(x, x.shape[-1:], w, eps)

    def mistakes(x, w, eps=1e-5):
        square, variance = x.pow(2).mean(-1, True), x.var(-1, keepdim=True, correction=0)
        normed, weighted = x / torch.sqrt(square + eps), x * w
        return {
            "The mean is subtracted: that is LayerNorm; RMSNorm only scales": (
                w * F.layer_norm(x, x.shape[-1:], eps=eps)
            ),
            "The variance is used, with the mean subtracted; RMSNorm takes the mean of the "
            "squares": [
                w * x / torch.sqrt(variance + eps),
                w * x / torch.sqrt(x.var(-1, keepdim=True) + eps),
            ],
            "eps is outside the root; it belongs under it: sqrt(mean(x^2) + eps)": (
                w * x / (square.sqrt() + eps)
            ),
            "eps is missing or far too small: small inputs are scaled up too much": (
                w * x / square.sqrt()
            ),
            "eps is 1e-6, the value of Llama 1; here it is 1e-5": w * x / torch.sqrt(square + 1e-6),
            "eps has another value: here it is 1e-5": [
                w * x / torch.sqrt(square + eps) for eps in (1e-3, 1e-4)
            ],
            "The squares are summed: take their mean": [
                w * x / torch.sqrt(x.pow(2).sum(-1, True) + eps),
                w * F.normalize(x, dim=-1),
            ],
            "The root is missing: divide by sqrt(mean(x^2) + eps)": w * x / (square + eps),
            "Multiplied by the root: divide by it": w * x * torch.sqrt(square + eps),
            "x comes back as it is": x,
            "The weight is not applied": normed,
            "The weight is added: it multiplies": normed + w,
            "The weight comes before the mean of the squares: it multiplies the result": (
                weighted / torch.sqrt(weighted.pow(2).mean(-1, True) + eps)
            ),
            "Multiplied by 1 + weight: that is Gemma's RMSNorm, whose weights are stored around "
            "0": (1 + w) * normed,
            "The mean of the absolute values was taken: it is the mean of the squares": [
                w * x / (x.abs().mean(-1, True) + eps),
                w * x / torch.sqrt(x.abs().mean(-1, True) + eps),
            ],
            "The statistics run over the tokens: each token has its own, over the last axis": (
                w * x / torch.sqrt(x.pow(2).mean(-2, True) + eps)
            ),
            "One mean square for the whole tensor: each token has its own, over the last axis": (
                w * x / torch.sqrt(x.pow(2).mean() + eps)
            ),
        }

    def with_eps(x, w):
        return {"The eps given to the constructor is not used": right(x, w), **mistakes(x, w, 0.1)}

    norm = randomised(built(cls, 16, eps=0.1))
    x = 0.03 * torch.randn(2, 3, 16, generator=seeded(3))  # small, so that 1e-5 and 0 differ too
    _compare_norm("RMSNorm, eps=0.1", norm, ["weight"], x, lambda x, w: right(x, w, 0.1), with_eps)
    # Meta and transformers round before and after the weight: up to a step and a half
    _check_norm("RMSNorm", cls, {"weight": 1.0}, right, mistakes, 1.51)
