"""Proofs of the activations and of SwiGLU."""

import functools
import inspect
import math

import torch
from torch.nn import functional as F

from helpers.checks.judging import (
    CheckFailed,
    built,
    judge,
    near_in_bfloat16,
    proof,
    randomised,
    result_and_weights,
    run,
    seeded,
)


def _check_activation(what, thing, right, mistakes):
    function = run(thing) if inspect.isclass(thing) else thing
    for shape in ((401,), (2, 3, 7)):
        x = torch.linspace(-6, 6, math.prod(shape)).reshape(shape)
        # float32 rounds by 1e-6; GELU's two forms are 5e-4 apart
        judge(what, run(function, x), right(x), 1e-5, functools.partial(mistakes, x))
    x = torch.tensor([-100.0, -30.0, 30.0, 100.0])
    if not (got := run(function, x)).isfinite().all():
        raise CheckFailed(f"{what} of {x.tolist()} is {got.tolist()}: a power of e overflows")
    x = torch.linspace(-6, 6, 200).to(torch.bfloat16)
    # near 6 the numbers of bfloat16 are 0.03 apart, and some formulas round more than once
    near_in_bfloat16(what, run(function, x), right(x.float()), 0.05)
    print(f"{what}: right, in float32 and bfloat16")


@proof
def check_gelu(fn_or_cls):
    """GELU in GPT-2's tanh form, against torch.nn.functional.gelu(approximate="tanh")."""

    def right(x):
        return F.gelu(x, approximate="tanh")

    def mistakes(x):
        root = math.sqrt(2 / math.pi)

        def form(inner):
            return 0.5 * x * (1 + torch.tanh(inner))

        tanh = torch.tanh(root * (x + 0.044715 * x**3))
        return {
            "This is the exact GELU with erf; GPT-2 was trained with the tanh form": F.gelu(x),
            "This is x * sigmoid(1.702 x), another approximation; GPT-2 uses the tanh form": (
                x * torch.sigmoid(1.702 * x)
            ),
            "The factor 0.5 is missing": 2 * right(x),
            "The cubic term 0.044715 x^3 is missing": form(root * x),
            "The cubic term has the factor 0.44715 instead of 0.044715": (
                form(root * (x + 0.44715 * x**3))
            ),
            "The third power of x is wanted, this is the second": (
                form(root * (x + 0.044715 * x**2))
            ),
            "The root is missing: the factor is sqrt(2 / pi)": (
                form(2 / math.pi * (x + 0.044715 * x**3))
            ),
            "The factor sqrt(2 / pi) is missing": form(x + 0.044715 * x**3),
            "sqrt(2 / pi) multiplies the cubic term too: brackets around the sum": (
                form(root * x + 0.044715 * x**3)
            ),
            "The 1 inside 0.5 x (1 + tanh(...)) is missing": 0.5 * x * tanh,
            "Brackets are missing: 0.5 x (1 + tanh(...))": 0.5 * x + tanh,
            "The factor x in front is missing": 0.5 * (1 + tanh),
            "x comes back as it is": x,
            "This is ReLU": F.relu(x),
            "This is SiLU": F.silu(x),
            "This is tanh": torch.tanh(x),
        }

    _check_activation("GELU", fn_or_cls, right, mistakes)


@proof
def check_silu(fn_or_cls):
    """SiLU, against torch.nn.functional.silu."""

    def mistakes(x):
        return {
            "The factor x is missing: this is the sigmoid alone": torch.sigmoid(x),
            "The sign in the exponent is wrong: x / (1 + exp(-x))": x * torch.sigmoid(-x),
            "This is x * sigmoid(1.702 x), the approximation of GELU": x * torch.sigmoid(1.702 * x),
            "This is x * tanh(x)": x * torch.tanh(x),
            "The tanh takes x; sigmoid(x) is half of 1 + tanh(x / 2)": (
                0.5 * x * (1 + torch.tanh(x))
            ),
            "This is GELU": [F.gelu(x), F.gelu(x, approximate="tanh")],
            "x comes back as it is": x,
            "This is ReLU": F.relu(x),
            "This is Mish": F.mish(x),
            "This is the piecewise approximation (hard swish)": F.hardswish(x),
        }

    _check_activation("SiLU", fn_or_cls, F.silu, mistakes)


DTYPE_HINT = 'Does every nn.Linear get dtype=cfg["dtype"], and is a result cast back to x.dtype?'


@proof
def check_swiglu(cls):
    """FeedForward(cfg) with fc1 (gate), fc2 (value), fc3, against the formula on the matrices."""
    for emb_dim, hidden_dim, shape in ((24, 40, (2, 5, 24)), (16, 16, (3, 16))):
        _compare_swiglu(cls, emb_dim, hidden_dim, torch.randn(shape, generator=seeded(1)))
    cfg = {"emb_dim": 24, "hidden_dim": 40, "dtype": torch.bfloat16}
    ff, x = randomised(built(cls, cfg)), torch.randn(2, 5, 24, generator=seeded(1))
    got = run(ff, x.to(torch.bfloat16), hint=DTYPE_HINT)
    w1, w2, w3 = (ff.get_parameter(f"fc{i}.weight").double() for i in (1, 2, 3))
    x = x.to(torch.bfloat16).double()
    right = (F.silu(x @ w1.T) * (x @ w2.T)) @ w3.T
    # results up to 5, where the numbers of bfloat16 are 0.03 apart; what is right comes to 0.04
    near_in_bfloat16("SwiGLU", got, right, 0.1)
    print("SwiGLU: right, in float32 and bfloat16")


def _compare_swiglu(cls, emb_dim, hidden_dim, x):
    cfg = {"emb_dim": emb_dim, "hidden_dim": hidden_dim, "dtype": torch.float32}
    shapes = {
        "fc1.weight": (hidden_dim, emb_dim),
        "fc2.weight": (hidden_dim, emb_dim),
        "fc3.weight": (emb_dim, hidden_dim),
    }
    got, found = result_and_weights(
        randomised(built(cls, cfg, hint=f"The config has {', '.join(cfg)}")),
        shapes,
        x,
        extra="SwiGLU has three matrices and no biases: nn.Linear(..., bias=False)",
    )
    w1, w2, w3 = (found[name] for name in shapes)
    gate, value = x @ w1.T, x @ w2.T
    right = (F.silu(gate) * value) @ w3.T

    def mistakes():
        return {
            "Gate and value are exchanged: the activation belongs on fc1's side": (
                (gate * F.silu(value)) @ w3.T
            ),
            "The activation is missing: fc1's side goes through SiLU": (gate * value) @ w3.T,
            "SiLU is applied to the product: it belongs on fc1's side, before multiplying": (
                F.silu(gate * value) @ w3.T
            ),
            "SiLU is applied to both sides: the value goes through as it is": (
                (F.silu(gate) * F.silu(value)) @ w3.T
            ),
            "Gate and value are added: they are multiplied": (F.silu(gate) + value) @ w3.T,
            "The gate is a sigmoid (GLU); SwiGLU's is SiLU": (torch.sigmoid(gate) * value) @ w3.T,
            "The gate is GELU (GeGLU); SwiGLU's is SiLU": [
                (F.gelu(gate) * value) @ w3.T,
                (F.gelu(gate, approximate="tanh") * value) @ w3.T,
            ],
            "The gate is ReLU; SwiGLU's is SiLU": (F.relu(gate) * value) @ w3.T,
            "The value is not used: multiply by fc2(x)": F.silu(gate) @ w3.T,
            "fc1 is used for gate and value: the value comes from fc2": (
                (F.silu(gate) * gate) @ w3.T
            ),
            "fc2 is used for gate and value: the gate comes from fc1": (
                (F.silu(value) * value) @ w3.T
            ),
            "SiLU comes after fc3: it belongs on fc1's side, before multiplying": (
                F.silu((gate * value) @ w3.T)
            ),
            "The input is added: that is the block's task": x + right,
            "fc3 is missing": F.silu(gate) * value,
            "x comes back as it is": x,
        }

    judge(f"SwiGLU, {emb_dim} to {hidden_dim}", got, right, 1e-4, mistakes)  # rounding is 1e-6
