"""The proofs of the course as functions.

A test proves the helper's class with them, a reader the class that she wrote. Each `check_...`
takes the thing to be proved, compares it with something that it did not write, and prints one line
when all is well. Otherwise it raises CheckFailed, which says what was wrong, with the values, and
names the likely mistake: the typical wrong results are computed too, and compared.
"""

import functools
import inspect
import math

import torch
from torch import nn
from torch.nn import functional as F


class CheckFailed(AssertionError):
    """A proof did not hold; the message says where, by how much, and which mistake gives this."""


class StillOpen(CheckFailed):
    """An exercise's stub that returns nothing yet."""


def seeded(seed):
    """A generator of its own for the random numbers of one cell."""
    return torch.Generator().manual_seed(seed)


def distance(a, b):
    """The largest difference of two tensors, in float64; infinite where one of them is NaN."""
    return _differences(a, b).max().item() if a.numel() else 0.0


def assert_same(got, wanted, tolerance=1e-5, hint=""):
    """Two tensors agree within `tolerance`; prints one fixed line.

    Errors   CheckFailed with the position and the values of the largest difference, and the hint
    """
    _same_kind(got, wanted, hint)
    if not distance(got, wanted) <= tolerance < math.inf:
        raise CheckFailed(_text(f"{_where(got, wanted)}; allowed is {tolerance:g}", hint))
    print(f"same, to {tolerance:.0e}" if tolerance else "same, to the last bit")


def assert_differs(got, other, at_least=1e-2, hint=""):
    """Two tensors are really different: the wrong variant beside a proof shows that it can fail.

    Errors   CheckFailed if they are not, or if a NaN or another shape would make any two differ
    """
    if not at_least > 0:
        raise ValueError(f"at_least={at_least} must be above 0: anything differs by 0 or more")
    _same_kind(got, other, hint)
    if got.isnan().any() or other.isnan().any():
        raise CheckFailed(_text("there is a NaN, which differs from everything", hint))
    apart = distance(got, other)
    if apart < at_least:
        failure = f"these should differ by {at_least:g} or more; the largest difference is"
        raise CheckFailed(_text(f"{failure} {apart:.1e}", hint))
    print("different, as it should be")


def exercise(check, answer):
    """Judge an exercise: `still open` while the stub returns nothing, else what the check says."""
    try:
        check(answer)
    except StillOpen:
        print("still open")
    except CheckFailed as failure:
        print(f"not yet: {failure}")


# --- comparing ----------


def _text(*sentences):
    return ". ".join(s for s in sentences if s)


def _open(value):
    """Nothing yet: `pass` returns None, and `...` stands for what is still to be written."""
    return value is None or value is ...


def _differences(a, b):
    """|a - b| in float64: 0 where equal (infinities too), infinite where one is NaN."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.detach().cpu().to(wide), b.detach().cpu().to(wide)
    return torch.where(a == b, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def _same_kind(got, wanted, hint=""):
    if _open(got):
        raise StillOpen("nothing was returned yet")
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(_text(f"expected a tensor, got {type(got).__name__}", hint))
    if got.shape != wanted.shape:
        raise CheckFailed(_text(_shapes(got, wanted), hint))
    if not wanted.numel():
        raise CheckFailed(f"there is nothing to compare: the shape is {tuple(wanted.shape)}")


def _shapes(got, wanted):
    return f"the shape is {tuple(got.shape)}, expected {tuple(wanted.shape)}"


def _where(got, wanted):
    """The largest difference in words: where it is and which two values differ."""
    apart = _differences(got, wanted)
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    values = f"{got[at].item():.6g} instead of {wanted[at].item():.6g}"
    return f"the largest difference is {apart.max().item():.3g} at {at}: {values}"


def _judge(what, got, wanted, tolerance, mistakes=dict):
    """Compare in float32, and where it fails name the mistake whose result this is.

    mistakes   called on failure: {hint: its result, or a list of them}, in any shape
    """
    if _open(got):
        raise StillOpen("nothing was returned yet")
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(f"{what}: expected a tensor, got {type(got).__name__}")
    apart = distance(got, wanted) if got.shape == wanted.shape else math.inf
    if apart <= tolerance:
        _dtype_kept(what, got, torch.float32)
        return
    candidates = [
        (max(_gap(got, wrong), tolerance), hint)  # of several that fit, the first
        for hint, results in mistakes().items()
        for wrong in (results if isinstance(results, list) else [results])
        if wrong.shape != wanted.shape or distance(wrong, wanted) > tolerance
    ]
    near, hint = min(candidates, key=lambda pair: pair[0], default=(math.inf, ""))
    if got.shape != wanted.shape:
        failure = _shapes(got, wanted)
    else:
        failure = f"{_where(got, wanted)}; allowed is {tolerance:g}"
    # fifty times nearer to the mistake's result than to the right one is no accident
    found = near <= (tolerance if math.isinf(apart) else max(tolerance, apart / 50))
    raise CheckFailed(_text(f"{what}: {failure}", hint if found else ""))


def _gap(got, wrong):
    """The distance to a mistake's result, where NaN in the same places counts as the same."""
    if got.shape != wrong.shape or not torch.equal(got.isnan(), wrong.isnan()):
        return math.inf
    return distance(got.nan_to_num(), wrong.nan_to_num())


def _dtype_kept(what, got, dtype):
    if got.dtype != dtype:
        put, came = (str(d).removeprefix("torch.") for d in (dtype, got.dtype))
        raise CheckFailed(
            f"{what}: {put} went in and {came} came out. Cast the result back to x.dtype"
        )


def _near_in_bfloat16(what, got, wanted, most):
    """A result in bfloat16 is at most `most` away from what it should be."""
    _dtype_kept(what, got, torch.bfloat16)
    if not distance(got, wanted) <= most:
        raise CheckFailed(
            f"{what} in bfloat16: {_where(got, wanted)}; allowed is {most:g}. In float32 it is "
            "right, so something is rounded too much on the way"
        )


def _bfloat16_steps(got, wanted):
    """The largest distance in units of bfloat16's spacing at the wanted value.

    bfloat16 has 8 bits of mantissa. Below 2^-10 the unit stays as it is there, 7.6e-6: what sums to
    nearly 0 carries the rounding of float32, about 1e-6, of the larger numbers that it came from.
    """
    unit = 2.0 ** (torch.log2(wanted.abs().clamp(min=2**-10)).floor() - 7)
    return ((got.double() - wanted).abs() / unit).nan_to_num(math.inf).max().item()


# --- running the code that is to be proved ----------


def _proof(check):
    """A check leaves no trace: no gradients, and the global random numbers go on as before.

    It runs in one thread: for matrices this small a second one only waits, a hundred times longer
    than the check takes where the machine is busy.
    """

    @functools.wraps(check)
    def judge(answer):
        if _open(answer):
            raise StillOpen("nothing is there yet")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # a failure has the same values each time
                check(answer)
        finally:
            torch.set_num_threads(threads)

    return judge


def _run(thing, *args, hint="", **kwargs):
    """Call the code that is to be proved: its result, which is not None.

    Errors   StillOpen for a stub, which returns nothing, raises NotImplementedError or computes
             with a `...`; CheckFailed with a sentence for any other error, with `hint` where that
             helps, and for a changed input
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]
    begun = _begun(thing)
    try:
        result = (thing if begun else thing.forward)(*args, **kwargs)
    except CheckFailed:
        raise
    except NotImplementedError as error:
        raise StillOpen("nothing is there yet") from error
    except Exception as error:
        if "ellipsis" in str(error):
            raise StillOpen("a ... is still to be replaced") from error
        reason = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
        stop = f"your code stopped with {type(error).__name__}: {reason}"
        raise CheckFailed(_text(stop, hint)) from error
    if _open(result):
        raise StillOpen("nothing was returned yet")
    if not begun:
        raise CheckFailed(f"{type(thing).__name__}.__init__ must begin with super().__init__()")
    if not all(map(torch.equal, tensors, before)):
        raise CheckFailed(
            "your code changes its input, which others still need: write x = x - ..., not x -= ..."
        )
    return result


def _begun(thing):
    """False for a module whose __init__ did not call super().__init__(): so far it is empty."""
    return not isinstance(thing, nn.Module) or "_parameters" in vars(thing)


def _built(cls, *args, hint="", **kwargs):
    """An instance in eval mode; a class without a forward pass is a stub."""
    if getattr(cls, "forward", None) is nn.Module.forward:
        raise StillOpen("there is no forward pass yet")
    module = _run(cls, *args, hint=hint, **kwargs)
    if not isinstance(module, nn.Module):
        raise CheckFailed(f"{type(module).__name__} is not an nn.Module: class Name(nn.Module)")
    return module.eval() if _begun(module) else module


def _randomised(module, seed=0):
    """Weights at which a forgotten one shows: normal with std 0.2, vectors around 1."""
    generator = seeded(seed)
    for parameter in module.parameters() if _begun(module) else ():
        centre = 0.0 if parameter.dim() > 1 else 1.0
        parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return module


def _weights(module, shapes, optional=(), extra=""):
    """The module's parameters, which must be these, in these shapes, and no others.

    shapes   {name with dots: shape}; `optional` ones may be missing
    extra    a hint for a parameter that is not among them
    """
    kind, found = type(module).__name__, dict(module.named_parameters(remove_duplicate=False))
    for name, shape in shapes.items():
        if name not in found and name not in optional:
            there = functools.reduce(lambda m, n: getattr(m, n, None), name.split("."), module)
            if isinstance(there, torch.Tensor):
                raise CheckFailed(f"{name} of {kind} is a plain tensor: wrap it in nn.Parameter")
            names = ", ".join(found) or "none"
            raise CheckFailed(f"{kind} needs a parameter {name!r}; it has {names}")
        if name in found and found[name].shape != shape:
            has = tuple(found[name].shape)
            raise CheckFailed(f"{name} of {kind} has shape {has}, expected {tuple(shape)}")
    for number, (name, parameter) in enumerate(found.items()):
        if name not in shapes:
            raise CheckFailed(_text(f"{kind} has a parameter {name!r} too many", extra))
        for other in list(found)[:number]:
            if found[other] is parameter:
                raise CheckFailed(f"{other} and {name} are one and the same parameter: build two")
    return found


def _result_and_weights(module, shapes, *args, optional=(), extra="", hint=""):
    """What the module makes of `args`, and its parameters as `_weights` checks them.

    A stub is told from its result, before its parameters count; a wrong parameter is named before
    the error that it leads to.
    """
    try:
        got = _run(module, *args, hint=hint)
    except StillOpen:
        raise
    except CheckFailed:
        if _begun(module):
            _weights(module, shapes, optional, extra)
        raise
    weights = _weights(module, shapes, optional, extra)
    again = _run(module, *args, hint=hint)
    if isinstance(got, torch.Tensor) and _gap(got, again) > 0:
        raise CheckFailed(
            "two calls with the same input give different results in eval mode: dropout is still "
            "on. Use nn.Dropout, or F.dropout(..., training=self.training)"
        )
    return got, weights


# --- norms ----------


def _check_norm(what, cls, starts, right, mistakes, most_steps):
    """Both norms: shapes, small inputs where eps counts, weights away from 1, and bfloat16.

    starts       {name of a parameter: its first value}
    right        (x, *weights) -> the result
    mistakes     (x, *weights) -> {hint: wrong result}
    most_steps   of bfloat16 that the result may be away
    """
    for emb_dim, shape in ((48, (2, 7, 48)), (5, (3, 5)), (16, (1, 1, 16))):
        norm = _randomised(_built(cls, emb_dim))
        for size, offset in ((1.0, 0.5), (0.01, 0.003)):
            x = size * torch.randn(shape, generator=seeded(1)) + offset
            _compare_norm(f"{what} of {size:g} * normal numbers", norm, starts, x, right, mistakes)
    for name, parameter in _built(cls, 7).named_parameters():
        if (parameter != starts[name]).any():
            raise CheckFailed(
                f"{name} must begin as {starts[name]:g} everywhere: at first the norm only "
                f"normalises. Here it begins as {parameter[0].item():g}"
            )
    norm = _randomised(_built(cls, 64)).to(torch.bfloat16)
    weights = (norm.get_parameter(name).double() for name in starts)
    x = (3 * torch.randn(2, 30, 64, generator=seeded(2)) + 10).to(torch.bfloat16)
    got = _run(norm, x)
    _dtype_kept(what, got, torch.bfloat16)
    steps = _bfloat16_steps(got, right(x.double(), *weights))
    if steps > most_steps:
        raise CheckFailed(
            f"{what} in bfloat16 is {steps:.1f} bfloat16 steps from the float64 formula; up to "
            f"{most_steps:.1f} is rounding. Take the statistics in float32 and cast once, at the "
            "end"
        )
    print(f"{what}: right, in float32 and bfloat16")


def _compare_norm(what, norm, names, x, right, mistakes):
    got, found = _result_and_weights(
        norm,
        dict.fromkeys(names, x.shape[-1:]),
        x,
        extra=f"It learns {' and '.join(names)}, nothing else",
        hint="Do the statistics keep their axis (keepdim=True)?",
    )
    weights = [found[name] for name in names]
    # float32 rounds by 1e-6 here; the smallest mistake, another eps, changes 1e-2 and more
    _judge(what, got, right(x, *weights), 1e-4, lambda: mistakes(x, *weights))


@_proof
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


@_proof
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

    norm = _randomised(_built(cls, 16, eps=0.1))
    x = 0.03 * torch.randn(2, 3, 16, generator=seeded(3))  # small, so that 1e-5 and 0 differ too
    _compare_norm("RMSNorm, eps=0.1", norm, ["weight"], x, lambda x, w: right(x, w, 0.1), with_eps)
    # Meta and transformers round before and after the weight: up to a step and a half
    _check_norm("RMSNorm", cls, {"weight": 1.0}, right, mistakes, 1.51)


# --- activations and feed-forward ----------


def _check_activation(what, thing, right, mistakes):
    function = _run(thing) if inspect.isclass(thing) else thing
    for shape in ((401,), (2, 3, 7)):
        x = torch.linspace(-6, 6, math.prod(shape)).reshape(shape)
        # float32 rounds by 1e-6; GELU's two forms are 5e-4 apart
        _judge(what, _run(function, x), right(x), 1e-5, functools.partial(mistakes, x))
    x = torch.tensor([-100.0, -30.0, 30.0, 100.0])
    if not (got := _run(function, x)).isfinite().all():
        raise CheckFailed(f"{what} of {x.tolist()} is {got.tolist()}: a power of e overflows")
    x = torch.linspace(-6, 6, 200).to(torch.bfloat16)
    # near 6 the numbers of bfloat16 are 0.03 apart, and some formulas round more than once
    _near_in_bfloat16(what, _run(function, x), right(x.float()), 0.05)
    print(f"{what}: right, in float32 and bfloat16")


@_proof
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


@_proof
def check_silu(fn_or_cls):
    """SiLU, against torch.nn.functional.silu."""

    def mistakes(x):
        return {
            "The factor x is missing: this is the sigmoid alone": torch.sigmoid(x),
            "The sign in the exponent is wrong: x / (1 + exp(-x))": x * torch.sigmoid(-x),
            "This is x * sigmoid(1.702 x), the approximation of GELU": x * torch.sigmoid(1.702 * x),
            "This is x * tanh(x)": x * torch.tanh(x),
            "This is GELU": [F.gelu(x), F.gelu(x, approximate="tanh")],
            "x comes back as it is": x,
            "This is ReLU": F.relu(x),
            "This is Mish": F.mish(x),
            "This is the piecewise approximation (hard swish)": F.hardswish(x),
        }

    _check_activation("SiLU", fn_or_cls, F.silu, mistakes)


_DTYPE_HINT = 'Does every nn.Linear get dtype=cfg["dtype"], and is a result cast back to x.dtype?'


@_proof
def check_swiglu(cls):
    """FeedForward(cfg) with fc1 (gate), fc2 (value), fc3, against the formula on the matrices."""
    for emb_dim, hidden_dim, shape in ((24, 40, (2, 5, 24)), (16, 16, (3, 16))):
        _compare_swiglu(cls, emb_dim, hidden_dim, torch.randn(shape, generator=seeded(1)))
    cfg = {"emb_dim": 24, "hidden_dim": 40, "dtype": torch.bfloat16}
    ff, x = _randomised(_built(cls, cfg)), torch.randn(2, 5, 24, generator=seeded(1))
    got = _run(ff, x.to(torch.bfloat16), hint=_DTYPE_HINT)
    w1, w2, w3 = (ff.get_parameter(f"fc{i}.weight").double() for i in (1, 2, 3))
    x = x.to(torch.bfloat16).double()
    right = (F.silu(x @ w1.T) * (x @ w2.T)) @ w3.T
    # results up to 5, where the numbers of bfloat16 are 0.03 apart; what is right comes to 0.04
    _near_in_bfloat16("SwiGLU", got, right, 0.1)
    print("SwiGLU: right, in float32 and bfloat16")


def _compare_swiglu(cls, emb_dim, hidden_dim, x):
    cfg = {"emb_dim": emb_dim, "hidden_dim": hidden_dim, "dtype": torch.float32}
    shapes = {
        "fc1.weight": (hidden_dim, emb_dim),
        "fc2.weight": (hidden_dim, emb_dim),
        "fc3.weight": (emb_dim, hidden_dim),
    }
    got, found = _result_and_weights(
        _randomised(_built(cls, cfg, hint=f"The config has {', '.join(cfg)}")),
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

    _judge(f"SwiGLU, {emb_dim} to {hidden_dim}", got, right, 1e-4, mistakes)  # rounding is 1e-6


# --- positions ----------


def _angles(head_dim, base, positions):
    """From first principles: position m turns pair i by m * base^(-2i / head_dim) radians."""
    i = torch.arange(head_dim // 2, dtype=torch.float64)
    return positions.double()[..., None] * base ** (-2 * i / head_dim)


def _twice(half):
    return torch.cat([half, half], dim=-1)


def _tables(angles):
    """cos and sin as apply_rope takes them."""
    return _twice(angles.cos()).float(), _twice(angles.sin()).float()


_DRIFT = (
    "The first positions are right, later ones drift: positions, frequencies, angles and tables "
    "are all float32, never bfloat16 or float16"
)


@_proof
def check_rope_params(fn):
    """compute_rope_params(head_dim, theta_base, context_length), against angles in float64."""
    for head_dim, base, length in ((16, 10_000, 40), (64, 500_000.0, 300), (8, 10_000.0, 7)):
        _compare_tables(fn, head_dim, base, length)
    longest = torch.tensor(99_999)
    cos, _ = _run(fn, head_dim=8, theta_base=500_000.0, context_length=100_000)
    _same_kind(
        cos, torch.empty(100_000, 8), "There is one row for each of context_length positions"
    )
    wanted = _twice(_angles(8, 500_000.0, longest).cos())
    # a float32 angle of 1e5 radians is good to 4e-3; anything coarser is far off
    _judge("cos at position 99,999", cos[longest], wanted, 2e-2, lambda: {_DRIFT: cos[longest]})
    print("RoPE tables: right, in float32, up to position 99,999")


def _compare_tables(fn, head_dim, base, length):
    got = _run(fn, head_dim=head_dim, theta_base=base, context_length=length)
    if not isinstance(got, tuple | list) or len(got) != 2:
        kind = "complex numbers" if getattr(got, "is_complex", bool)() else "something else"
        raise CheckFailed(f"expected two tables, cos and sin, got {kind}: return cos, sin")
    m = torch.arange(length, dtype=torch.float64)
    i = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = _angles(head_dim, base, m)

    def turned_by(exponent, m=m):
        return m[:, None] * base**exponent

    wrong_angles = {
        "The exponent grows half as fast as it should: pair i has -2i / head_dim": (
            turned_by(-i / head_dim)
        ),
        "The exponent is twice what it should be: an arange in steps of 2 already is 2i, and it is "
        "divided by head_dim, not by half of it": turned_by(-4 * i / head_dim),
        "The exponents begin at 2 / head_dim: pair 0 turns by 1 radian, its exponent is 0": (
            turned_by(-2 * (i + 1) / head_dim)
        ),
        "The frequencies grow with the pair: the exponent is negative": turned_by(2 * i / head_dim),
        "All pairs turn equally fast: is the exponent cut to 0 by //?": turned_by(0 * i),
        "Positions begin at 1: the first token is not rotated at all": (
            turned_by(-2 * i / head_dim, m + 1)
        ),
        "theta_base is not used": _angles(head_dim, 10_000.0, m),
        "The angles are taken as degrees: cos and sin want radians": angles.deg2rad(),
    }
    names = ("cos", torch.cos, torch.sin), ("sin", torch.sin, torch.cos)
    for table, (name, function, other) in zip(got, names, strict=True):
        what, wanted = f"{name} for heads of {head_dim}, base {base:,}", _twice(function(angles))
        if isinstance(table, torch.Tensor) and table.dtype != torch.float32:
            dtype = str(table.dtype).removeprefix("torch.")
            raise CheckFailed(
                f"the {name} table is {dtype}: it is float32, whatever the model's dtype"
            )
        mistakes = {
            "cos and sin are exchanged": _twice(other(angles)),
            "The columns pair up as 0 and 1, 2 and 3 (interleaved); half-split repeats the whole "
            "half": function(angles).repeat_interleave(2, dim=-1),
            "Each angle is there once: repeat the half, torch.cat([cos, cos], dim=-1)": (
                function(angles)
            ),
            "These are the angles: take their cos and sin": _twice(angles),
            "The sign is wrong: the angles are positive": -wanted,
            **{hint: _twice(function(a)) for hint, a in wrong_angles.items()},
        }
        if isinstance(table, torch.Tensor) and table.shape == wanted.shape:
            if distance(table[:4], wanted[:4]) < 1e-2:  # what else goes wrong shows there already
                mistakes[_DRIFT] = table
        _judge(what, table, wanted, 1e-4, mistakes.copy)  # 300 radians in float32 are good to 2e-5


def _rotated(x, angles):
    """Half-split rotation by complex numbers: element i is real, element i + E/2 imaginary."""
    E = x.shape[-1]
    z = torch.complex(x[..., : E // 2].double(), x[..., E // 2 :].double())
    turned = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _interleaved(x, angles):
    z = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@_proof
def check_apply_rope(fn):
    """apply_rope(x, cos, sin) in the half-split layout, against products of complex numbers."""
    for B, H, T, E in ((2, 3, 9, 16), (1, 1, 1, 4), (1, 6, 6, 8)):
        _compare_rotation(fn, B, H, T, E)
    x = torch.randn(2, 3, 9, 16, generator=seeded(5))
    positions = torch.arange(2, 22)  # position 0 would hide every mistake
    angles = _angles(16, 100.0, positions)
    first_rows = _rotated(x, angles[:9])
    hint = "A table longer than the text: use its first T rows"
    longer = _run(fn, x, *_tables(angles), hint=hint)
    _judge("a longer table", longer, first_rows, 1e-4, lambda: {hint: _rotated(x, angles[-9:])})
    angles = _angles(16, 100.0, torch.stack([positions[:9], positions[6:15]]))  # (B, T, E / 2)
    hint = (
        "cos and sin of shape (B, T, E), where each row of the batch has its own positions: put "
        "the head's axis between, cos[:, None]"
    )
    got = _run(fn, x, *_tables(angles), hint=hint)
    own = "Each row of the batch has its own positions: all follow one row here"
    _judge(
        "tables of shape (B, T, E)",
        got,
        _rotated(x, angles[:, None]),
        1e-4,
        lambda: {own: [_rotated(x, angles[0]), _rotated(x, angles[-1])]},
    )
    long = _angles(16, 100.0, torch.stack([positions[:12], positions[6:18]]))
    hint = "Tables of shape (B, S, E), longer than the text: cut them to [:, :T]"
    got = _run(fn, x, *_tables(long), hint=hint)
    _judge("longer tables of shape (B, S, E)", got, _rotated(x, angles[:, None]), 1e-4)
    angles, x = _angles(16, 100.0, positions[:9]), x.to(torch.bfloat16)
    got = _run(fn, x, *_tables(angles))
    _dtype_kept("apply_rope", got, torch.bfloat16)
    if _bfloat16_steps(got, _rotated(x, angles)) > 1.01:  # one rounding is half a step
        raise CheckFailed(
            "apply_rope in bfloat16 loses digits: multiply in the tables' float32, cast at the end"
        )
    print("apply_rope: right, in float32 and bfloat16, for one and for many rows of positions")


def _compare_rotation(fn, B, H, T, E):
    # as it comes out of the attention: the tokens' and the heads' axes were exchanged
    x = torch.randn(B, T, H, E, generator=seeded(4)).transpose(1, 2)
    angles = _angles(E, 100.0, torch.arange(3, T + 3))  # position 0 would hide every mistake
    cos, sin = _tables(angles)
    right = _rotated(x, angles)

    def mistakes():
        half = E // 2
        first, second = x[..., :half], x[..., half:]
        turned = torch.cat([-second, first], -1)
        wrong = {
            "It turns backwards: the minus belongs to the second half, (-second, first)": (
                _rotated(x, -angles)
            ),
            "Neighbours are paired, 0 with 1 (interleaved); half-split pairs i with i + E/2": [
                _interleaved(x, angles),
                x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin,
            ],
            "The halves are exchanged without a minus": (
                x * cos + torch.cat([second, first], -1) * sin
            ),
            "The halves are not exchanged": x * cos + torch.cat([-first, second], -1) * sin,
            "Both halves have a minus: only the second": (
                x * cos - torch.cat([second, first], -1) * sin
            ),
            "cos and sin are exchanged": x * sin + turned * cos,
            "The turned part is missing: x * cos alone": x * cos,
            "Only the first half is rotated": torch.cat([right[..., :half].float(), second], -1),
            "Nothing is rotated: x comes back as it is": x,
            "It is rotated twice": _rotated(right, angles),
            "The tokens' and the heads' axes are exchanged: the result is (B, H, T, E)": (
                right.transpose(1, 2)
            ),
        }
        if H == T:
            wrong["The angle follows the head: axis 2 of (B, H, T, E) is the token"] = (
                x * cos[:, None] + turned * sin[:, None]
            )
        return wrong

    hint = "cos and sin are (T, E), x is (B, H, T, E)"
    _judge(f"apply_rope on {(B, H, T, E)}", _run(fn, x, cos, sin, hint=hint), right, 1e-4, mistakes)


@_proof
def check_permute(fn):
    """permute(weight, n_heads): interleaved rows to half-split, against the two rotations."""
    for n_heads, E, D in ((1, 8, 8), (3, 4, 5), (2, 16, 32)):
        _compare_order(fn, n_heads, E, D)
    print("permute: right; interleaved rotation before is half-split rotation after")


def _compare_order(fn, n_heads, E, D):
    weight, rows = torch.randn(n_heads * E, D, generator=seeded(6)), n_heads * E
    heads = range(n_heads)
    order = [h * E + 2 * i + odd for h in heads for odd in (0, 1) for i in range(E // 2)]
    back = [h * E + (r % 2) * (E // 2) + r // 2 for h in heads for r in range(E)]
    across = [2 * i for i in range(rows // 2)] + [2 * i + 1 for i in range(rows // 2)]

    def mistakes():
        wrong = {
            "Nothing is reordered: the weight comes back as it is": weight,
            "This is the inverse: it goes from half-split back to interleaved": weight[back],
            "The rows of different heads are mixed: reorder within each head": [
                weight[across],
                weight[torch.tensor(across).argsort()],
            ],
            "Each head is reversed": weight.reshape(n_heads, E, D).flip(1).reshape(rows, D),
            "The even rows are not together: 0, 2, 4, ... then 1, 3, 5, ...": (
                weight.reshape(n_heads, E // 2, 2, D).flip(2).reshape(rows, D)
            ),
            "The heads are not put together again: the result is (n_heads * E, D)": (
                weight[order].reshape(n_heads, 2, E // 2, D)
            ),
        }
        if rows == D:
            hint = "The columns are reordered: what comes out are a weight's rows"
            wrong[hint] = weight[:, order]
        return wrong

    got = _run(fn, weight, n_heads)
    _judge(f"permute of {n_heads} heads of {E} rows", got, weight[order], 0.0, mistakes)
    x, angles = torch.randn(3, D, generator=seeded(7)), _angles(E, 100.0, torch.arange(3))

    def scores(w, rotate):
        heads = (x.double() @ w.double().T).reshape(3, n_heads, E).transpose(0, 1)
        return rotate(heads, angles) @ rotate(heads, angles).transpose(1, 2)

    # float64 rounds by 1e-14
    if distance(scores(weight, _interleaved), scores(got, _rotated)) > 1e-9:
        raise CheckFailed("the two rotations give different scores")


# --- attention ----------


def _heads(x, n):
    B, T, width = x.shape
    return x.view(B, T, n, width // n).transpose(1, 2)


def _merged(x):
    return x.transpose(1, 2).flatten(2)


@_proof
def check_causal_attention(cls):
    """MultiHeadAttention(d_in, d_out, context_length, dropout, num_heads, qkv_bias), in eval mode.

    A forward pass with a `cos` among its parameters is also called as att(x, None, cos, sin) and
    must then rotate queries and keys, and not values. All is compared with
    torch.nn.functional.scaled_dot_product_attention.
    """
    for sizes in ((24, 24, 3, 11, False), (16, 32, 4, 4, True), (8, 8, 1, 5, False)):
        att = _compare_attention(cls, *sizes)
    rotated = ", plain and rotated" if _takes_rope(att) else ""
    print(f"causal attention: right, in float32 and bfloat16{rotated}")


def _takes_rope(att):
    return "cos" in inspect.signature(att.forward).parameters


def _compare_attention(cls, d_in, d_out, H, T, bias):
    att = _randomised(_built(cls, d_in, d_out, 32, 0.5, H, bias))
    x = torch.randn(2, T, d_in, generator=seeded(8))
    names = ("W_query", "W_key", "W_value")
    shapes = {f"{n}.weight": (d_out, d_in) for n in names} | {"out_proj.weight": (d_out, d_out)}
    shapes |= {f"{n}.bias": (d_out,) for n in names} if bias else {}
    got, found = _result_and_weights(
        att,
        shapes | {"out_proj.bias": (d_out,)},
        x,
        optional=["out_proj.bias"],
        extra="Biases only where qkv_bias asks for them; a mask is a buffer, not a parameter",
        hint="Are queries, keys and values (B, H, T, E)? view(B, T, H, E), then transpose(1, 2); "
        "is the mask cut to (T, T)?",
    )
    zeros = torch.zeros(d_out)
    plain = [x @ found[f"{n}.weight"].T for n in names]
    projected = [p + found.get(f"{n}.bias", zeros) for p, n in zip(plain, names, strict=True)]
    q, k, v = (_heads(p, H) for p in projected)

    def out(merged):
        return merged @ found["out_proj.weight"].T + found.get("out_proj.bias", zeros)

    right = out(_merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def mistakes():
        return {
            "The biases of the projections are not used": (
                out(_merged(_attended(*(_heads(p, H) for p in plain))))
            ),
            "x comes back as it is": x,
            **_attention_mistakes(q, k, v, projected, out),
        }

    what = f"attention with {H} heads over {T} tokens"
    _judge(what, got, right, 1e-4, mistakes)  # float32 rounds by 1e-6
    shorter = "Each call has its own T: is a mask or a shape kept from the call before?"
    got = _run(att, x[:, :-1], hint=shorter)
    _judge("the same attention without the last token", got, right[:, :-1], 1e-4)
    in_half = [(what, (), right)]
    if _takes_rope(att):
        # with gaps: the scores depend on distances, so that a shift of all positions is not seen
        positions = 3 + torch.arange(T) + 4 * (torch.arange(T) // 3)
        angles = _angles(d_out // H, 100.0, positions)
        cos, sin = _tables(angles)
        turned = [_rotated(t, angles).float() for t in (q, k)]
        wanted = out(_merged(F.scaled_dot_product_attention(*turned, v, is_causal=True)))

        def rope_mistakes():
            return _rope_mistakes(q, k, v, angles, out)

        _judge(f"rotated {what}", _run(att, x, None, cos, sin), wanted, 1e-4, rope_mistakes)
        in_half += [(f"rotated {what}", (None, cos, sin), wanted)]
    att.to(torch.bfloat16)
    for what, tables, wanted in in_half:
        hint = "Cast the softmax, or what was rotated, back to x.dtype"
        half = _run(att, x.to(torch.bfloat16), *tables, hint=hint)
        # results up to 3, where the numbers are 0.016 apart; what is right comes to 0.015
        _near_in_bfloat16(what, half, wanted, 0.05)
    return att


def _attended(q, k, v, scale=None, diagonal=1, fill=-math.inf, dim=-1):
    """Causal attention written out, with what people change by accident."""
    T, scale = q.shape[-2], q.shape[-1] ** -0.5 if scale is None else scale
    hidden = torch.ones(T, T, dtype=torch.bool).triu(diagonal)
    return torch.softmax((q @ k.transpose(-2, -1) * scale).masked_fill(hidden, fill), dim) @ v


def _attention_mistakes(q, k, v, projected, out):
    B, H, T, E = q.shape
    scores = q @ k.transpose(-2, -1) / math.sqrt(E)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def attended(*args, **changes):
        return out(_merged(_attended(*(args or (q, k, v)), **changes)))

    def weighted(weights):
        return out(_merged(weights @ v))

    def softmax_of(hidden):
        return weighted(torch.softmax(scores.masked_fill(hidden, -math.inf), -1))

    untransposed = [p.view(B, T, H, E) for p in projected]
    scrambled = [p.view(B, H, T, E) for p in projected]
    mixed = _attended(q, k, v)
    one_head = [p[:, None] for p in projected]
    return {
        "The future is not hidden: the causal mask is missing": attended(diagonal=T),
        "Each token sees the next one: the mask begins one diagonal too late (diagonal=1)": (
            attended(diagonal=2)
        ),
        "A token does not see itself: the mask begins on the diagonal; use diagonal=1": (
            attended(diagonal=0)
        ),
        "The past is hidden instead of the future: the mask is the wrong way round": [
            softmax_of(future.T),
            softmax_of(~future),
        ],
        "The scores are not scaled: divide by sqrt(head size)": attended(scale=1.0),
        "The scores are divided by sqrt(d_out): divide by the root of one head's size": (
            attended(scale=(H * E) ** -0.5)
        ),
        "The scores are divided by the head size: divide by its root": attended(scale=1 / E),
        "The scores are multiplied by sqrt(head size): divide by it": attended(scale=E**0.5),
        "The softmax runs over the queries: it runs over the keys, dim=-1": attended(dim=-2),
        "The softmax runs over the heads: it runs over the keys, dim=-1": [
            attended(dim=1),
            weighted(torch.softmax(scores.masked_fill(future, -math.inf), 1).nan_to_num()),
        ],
        "The softmax is missing": weighted(scores.masked_fill(future, 0)),
        "Masked scores are 0: fill them with -inf before the softmax": attended(fill=0.0),
        "The mask comes after the softmax, so that rows do not add up to 1: fill with -inf before "
        "it": weighted(torch.softmax(scores, -1).masked_fill(future, 0)),
        "Queries and keys are exchanged": attended(k, q, v),
        "Keys and values are exchanged": attended(q, v, k),
        "Queries and values are exchanged": attended(v, k, q),
        "W_query makes the keys too: they come from W_key": attended(q, q, v),
        "W_key makes the queries too: they come from W_query": attended(k, k, v),
        "W_key makes the values too: they come from W_value": attended(q, k, k),
        "The heads were not transposed before they were merged: (B, H, T, E) to (B, T, H, E) "
        "first": out(mixed.reshape(B, T, H * E)),
        "Tokens and heads are mixed: view as (B, T, H, E), then transpose(1, 2)": [
            out(_attended(*untransposed).flatten(2)),
            out(_merged(_attended(*scrambled))),
            out(_attended(*scrambled).reshape(B, T, H * E)),
        ],
        "All heads look as one: split queries and keys into heads": [
            out(_attended(*one_head, scale=scale)[:, 0]) for scale in ((H * E) ** -0.5, E**-0.5)
        ],
        "out_proj is missing": _merged(mixed),
        "The heads are not put side by side: transpose(1, 2), then reshape to (B, T, d_out)": (
            mixed.transpose(1, 2)
        ),
    }


def _rope_mistakes(q, k, v, angles, out):
    T = q.shape[2]
    base_angles = _angles(q.shape[-1], 10_000.0, torch.arange(T))

    def attended(turn_q, turn_k, turn_v=False, rotate=_rotated, angles=angles):
        turns = zip((q, k, v), (turn_q, turn_k, turn_v), strict=True)
        return out(_merged(_attended(*(rotate(t, angles).float() if on else t for t, on in turns))))

    return {
        "cos and sin are given, but nothing is rotated, or each head as a whole: the angle "
        "follows the token, so rotate in the shape (B, H, T, E), after transpose(1, 2)": (
            attended(False, False)
        ),
        "The values are rotated too: only queries and keys are": attended(True, True, True),
        "Only the queries are rotated: keys too": attended(True, False),
        "Only the keys are rotated: queries too": attended(False, True),
        "It turns backwards, or cos and sin are exchanged": attended(True, True, angles=-angles),
        "Neighbours are paired (interleaved); the layout here is half-split": (
            attended(True, True, rotate=_interleaved)
        ),
        "The given cos and sin are not used: these are other positions' angles": (
            attended(True, True, angles=base_angles)
        ),
    }


# --- a whole block ----------

_BLOCK = {
    "vocab_size": 11,
    "context_length": 32,
    "emb_dim": 24,
    "n_heads": 3,
    "n_layers": 1,
    "hidden_dim": 40,
    "dtype": torch.float32,
}


@_proof
def check_llama2_block(cls):
    """TransformerBlock(cfg) with norm1, att, norm2 and ff, against PyTorch's own functions.

    It is called as block(x, None, cos, sin): the mask None is causal.
    """
    config_hint = f"The config has {', '.join(_BLOCK)}"
    block = _randomised(_built(cls, _BLOCK, hint=config_hint))
    normal = torch.randn(2, 9, 24, generator=seeded(9))
    # with gaps: the scores depend on distances, so that a shift of all positions is not seen
    angles = _angles(8, 10_000.0, 3 + torch.arange(9) + 4 * (torch.arange(9) // 3))
    cos, sin = _tables(angles)
    for x in (normal, 0.01 * normal):  # small inputs show the norms' eps
        _compare_block(block, x, angles)
    right = _run(block, normal, None, cos, sin)
    half = _randomised(_built(cls, {**_BLOCK, "dtype": torch.bfloat16}, hint=config_hint))
    got = _run(half, normal.to(torch.bfloat16), None, cos, sin, hint=_DTYPE_HINT)
    # results up to 5, where the numbers of bfloat16 are 0.03 apart; what is right comes to 0.035
    _near_in_bfloat16("a block of Llama 2", got, right, 0.1)
    print("a block of Llama 2: right, in float32 and bfloat16")


def _compare_block(block, x, angles):
    names = ("W_query", "W_key", "W_value", "out_proj")
    shapes = {"norm1.weight": (24,), "norm2.weight": (24,)}
    shapes |= {f"att.{n}.weight": (24, 24) for n in names}
    shapes |= {"ff.fc1.weight": (40, 24), "ff.fc2.weight": (40, 24), "ff.fc3.weight": (24, 40)}
    cos, sin = _tables(angles)
    got, found = _result_and_weights(
        block, shapes, x, None, cos, sin, extra="A Llama block has no biases and no other weights"
    )
    n1, n2, w_query, w_key, w_value, w_out, w1, w2, w3 = (found[name] for name in shapes)

    def norm(x, weight, eps=1e-5):
        return F.rms_norm(x, (24,), weight, eps)

    def att(x, turns=(True, True, False), rotate=_rotated, angles=angles, causal=True):
        qkv = (_heads(x @ w.T, 3) for w in (w_query, w_key, w_value))
        qkv = (rotate(t, angles).float() if on else t for t, on in zip(qkv, turns, strict=True))
        return _merged(F.scaled_dot_product_attention(*qkv, is_causal=causal)) @ w_out.T

    def ff(x, activation=F.silu):
        return (activation(x @ w1.T) * (x @ w2.T)) @ w3.T

    def built(att=att, ff=ff, n1=n1, n2=n2, norm=norm):
        y = x + att(norm(x, n1))
        return y + ff(norm(y, n2))

    def mistakes():
        read = norm(x, n1)  # what the attention reads
        y = x + att(read)  # the sum after attention
        post, olmo = norm(y_raw := x + att(x), n1), x + norm(att(x), n1)
        shifted = read + att(read)
        first_ff = x + ff(norm(x, n2))
        return {
            "The norms come after the additions (post-norm); Llama normalises before each step": (
                norm(post + ff(post), n2)
            ),
            "Each norm comes after its step, before the addition (Olmo's order); Llama normalises "
            "what a step reads": olmo + norm(ff(olmo), n2),
            "Both steps read the input (a parallel block); the second reads the first one's "
            "result": [y + ff(read), y + ff(norm(x, n2))],
            "The feed-forward comes first: attention does": [
                first_ff + att(norm(first_ff, n1)),
                (z := x + ff(norm(x, n1))) + att(norm(z, n2)),
            ],
            "norm1 is used twice": built(n2=n1),
            "norm2 is used twice": built(n1=n2),
            "norm1 and norm2 are exchanged": built(n1=n2, n2=n1),
            "The addition around attention is missing": (att(read) + ff(norm(att(read), n2))),
            "The addition around the feed-forward is missing": ff(norm(y, n2)),
            "Both additions are missing": ff(norm(att(read), n2)),
            "The input is added at the end; the sum after attention is what goes on": (
                x + ff(norm(y, n2))
            ),
            "The normalised input is added: the shortcut carries x itself": [
                shifted + ff(norm(shifted, n2)),
                (m := norm(shifted, n2)) + ff(m),
            ],
            "The first norm is missing": y_raw + ff(norm(y_raw, n2)),
            "The second norm is missing": y + ff(y),
            "x comes back as it is": x,
            "The attention is missing": first_ff,
            "The feed-forward is missing": y,
            "Nothing is rotated: pass cos and sin on to the attention": (
                built(att=lambda h: att(h, (False, False, False)))
            ),
            "The values are rotated too: only queries and keys are": (
                built(att=lambda h: att(h, (True, True, True)))
            ),
            "It turns backwards, or cos and sin are exchanged": (
                built(att=lambda h: att(h, angles=-angles))
            ),
            "Neighbours are paired (interleaved); the layout here is half-split": (
                built(att=lambda h: att(h, rotate=_interleaved))
            ),
            "The future is not hidden: the causal mask is missing": (
                built(att=lambda h: att(h, causal=False))
            ),
            "The feed-forward's gate is GELU: it is SiLU": [
                built(ff=lambda h: ff(h, F.gelu)),
                built(ff=lambda h: ff(h, lambda g: F.gelu(g, approximate="tanh"))),
            ],
            "Gate and value are exchanged: SiLU belongs on fc1's side": (
                built(ff=lambda h: (h @ w1.T * F.silu(h @ w2.T)) @ w3.T)
            ),
            "The norms are LayerNorms without shift: they are RMSNorms": (
                built(norm=lambda h, w: F.layer_norm(h, (24,), w))
            ),
            "The norms' eps is 1e-6, the value of Llama 1; Llama 2 has 1e-5": (
                built(norm=lambda h, w: norm(h, w, 1e-6))
            ),
        }

    _judge("a block of Llama 2", got, built(), 1e-4, mistakes)  # float32 rounds by 1e-6
