"""What all checks share: comparing with words, running the reader's code, naming the mistake."""

import functools
import math

import torch
from torch import nn


class CheckFailed(AssertionError):
    """A proof did not hold; the message says where, by how much, and which mistake gives this."""


class StillOpen(CheckFailed):
    """An exercise's stub that returns nothing yet."""


def seeded(seed):
    """A generator of its own for the random numbers of one cell."""
    return torch.Generator().manual_seed(seed)


def distance(a, b):
    """The largest difference of two tensors, in float64; infinite where one of them is NaN."""
    return differences(a, b).max().item() if a.numel() else 0.0


def assert_same(got, wanted, tolerance=1e-5, hint=""):
    """Two tensors agree within `tolerance`; prints one fixed line.

    Errors   CheckFailed with the position and the values of the largest difference, and the hint
    """
    same_kind(got, wanted, hint)
    if not distance(got, wanted) <= tolerance < math.inf:
        raise CheckFailed(in_words(f"{where_apart(got, wanted)}; allowed is {tolerance:g}", hint))
    print(f"same, to {tolerance:.0e}" if tolerance else "same, to the last bit")


def assert_differs(got, other, at_least=1e-2, hint=""):
    """Two tensors are really different: the wrong variant beside a proof shows that it can fail.

    Errors   CheckFailed if they are not, or if a NaN or another shape would make any two differ
    """
    if not at_least > 0:
        raise ValueError(f"at_least={at_least} must be above 0: anything differs by 0 or more")
    same_kind(got, other, hint)
    if got.isnan().any() or other.isnan().any():
        raise CheckFailed(in_words("there is a NaN, which differs from everything", hint))
    apart = distance(got, other)
    if apart < at_least:
        failure = f"these should differ by {at_least:g} or more; the largest difference is"
        raise CheckFailed(in_words(f"{failure} {apart:.1e}", hint))
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


def in_words(*sentences):
    return ". ".join(s for s in sentences if s)


def unwritten(value):
    """Nothing yet: `pass` returns None, and `...` stands for what is still to be written."""
    return value is None or value is ...


def differences(a, b):
    """|a - b| in float64: 0 where equal (infinities too), infinite where one is NaN."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.detach().cpu().to(wide), b.detach().cpu().to(wide)
    return torch.where(a == b, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def same_kind(got, wanted, hint=""):
    if unwritten(got):
        raise StillOpen("nothing was returned yet")
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(in_words(f"expected a tensor, got {type(got).__name__}", hint))
    if got.shape != wanted.shape:
        raise CheckFailed(in_words(both_shapes(got, wanted), hint))
    if not wanted.numel():
        raise CheckFailed(f"there is nothing to compare: the shape is {tuple(wanted.shape)}")


def both_shapes(got, wanted):
    return f"the shape is {tuple(got.shape)}, expected {tuple(wanted.shape)}"


def where_apart(got, wanted):
    """The largest difference in words: where it is and which two values differ."""
    apart = differences(got, wanted)
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    values = f"{got[at].item():.6g} instead of {wanted[at].item():.6g}"
    return f"the largest difference is {apart.max().item():.3g} at {at}: {values}"


def judge(what, got, wanted, tolerance, mistakes=dict):
    """Compare in float32, and where it fails name the mistake whose result this is.

    mistakes   called on failure: {hint: its result, or a list of them}, in any shape
    """
    if unwritten(got):
        raise StillOpen("nothing was returned yet")
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(f"{what}: expected a tensor, got {type(got).__name__}")
    apart = distance(got, wanted) if got.shape == wanted.shape else math.inf
    if apart <= tolerance:
        dtype_kept(what, got, torch.float32)
        return
    candidates = [
        (max(gap(got, wrong), tolerance), hint)  # of several that fit, the first
        for hint, results in mistakes().items()
        for wrong in (results if isinstance(results, list) else [results])
        if wrong.shape != wanted.shape or distance(wrong, wanted) > tolerance
    ]
    near, hint = min(candidates, key=lambda pair: pair[0], default=(math.inf, ""))
    if got.shape != wanted.shape:
        failure = both_shapes(got, wanted)
    else:
        failure = f"{where_apart(got, wanted)}; allowed is {tolerance:g}"
    # fifty times nearer to the mistake's result than to the right one is no accident
    found = near <= (tolerance if math.isinf(apart) else max(tolerance, apart / 50))
    raise CheckFailed(in_words(f"{what}: {failure}", hint if found else ""))


def gap(got, wrong):
    """The distance to a mistake's result, where NaN in the same places counts as the same."""
    if got.shape != wrong.shape or not torch.equal(got.isnan(), wrong.isnan()):
        return math.inf
    return distance(got.nan_to_num(), wrong.nan_to_num())


def dtype_kept(what, got, dtype):
    if got.dtype != dtype:
        put, came = (str(d).removeprefix("torch.") for d in (dtype, got.dtype))
        raise CheckFailed(
            f"{what}: {put} went in and {came} came out. Cast the result back to x.dtype"
        )


def near_in_bfloat16(what, got, wanted, most):
    """A result in bfloat16 is at most `most` away from what it should be."""
    dtype_kept(what, got, torch.bfloat16)
    if not distance(got, wanted) <= most:
        raise CheckFailed(
            f"{what} in bfloat16: {where_apart(got, wanted)}; allowed is {most:g}. In float32 it "
            "is right, so something is rounded too much on the way"
        )


def bfloat16_steps(got, wanted):
    """The largest distance in units of bfloat16's spacing at the wanted value.

    bfloat16 has 8 bits of mantissa. Below 2^-10 the unit stays as it is there, 7.6e-6: what sums to
    nearly 0 carries the rounding of float32, about 1e-6, of the larger numbers that it came from.
    """
    unit = 2.0 ** (torch.log2(wanted.abs().clamp(min=2**-10)).floor() - 7)
    return ((got.double() - wanted).abs() / unit).nan_to_num(math.inf).max().item()


# --- running the code that is to be proved ----------


def proof(check):
    """A check leaves no trace: no gradients, and the global random numbers go on as before.

    It runs in one thread: for matrices this small a second one only waits, a hundred times longer
    than the check takes where the machine is busy.
    """

    @functools.wraps(check)
    def proved(answer):
        if unwritten(answer):
            raise StillOpen("nothing is there yet")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # a failure has the same values each time
                check(answer)
        finally:
            torch.set_num_threads(threads)

    return proved


def run(thing, *args, hint="", state=None, **kwargs):
    """Call the code that is to be proved: its result, which is not None.

    Errors   StillOpen for a stub, which returns nothing, raises NotImplementedError or computes
             with a `...`; CheckFailed with a sentence for any other error, with `hint` where that
             helps, and for a changed input other than `state`, an argument that is to be changed
    """
    given = (a for a in (*args, *kwargs.values()) if a is not state)
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]
    has_begun = begun(thing)
    try:
        result = (thing if has_begun else thing.forward)(*args, **kwargs)
    except CheckFailed:
        raise
    except NotImplementedError as error:
        raise StillOpen("nothing is there yet") from error
    except Exception as error:
        if "ellipsis" in str(error):
            raise StillOpen("a ... is still to be replaced") from error
        reason = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
        stop = f"your code stopped with {type(error).__name__}: {reason}"
        raise CheckFailed(in_words(stop, hint)) from error
    if unwritten(result):
        raise StillOpen("nothing was returned yet")
    if not has_begun:
        raise CheckFailed(f"{type(thing).__name__}.__init__ must begin with super().__init__()")
    if not all(map(torch.equal, tensors, before)):
        raise CheckFailed(
            "your code changes its input, which others still need: write x = x - ..., not x -= ..."
        )
    return result


def begun(thing):
    """False for a module whose __init__ did not call super().__init__(): so far it is empty."""
    return not isinstance(thing, nn.Module) or "_parameters" in vars(thing)


def built(cls, *args, hint="", **kwargs):
    """An instance in eval mode; a class without a forward pass is a stub."""
    if getattr(cls, "forward", None) is nn.Module.forward:
        raise StillOpen("there is no forward pass yet")
    module = run(cls, *args, hint=hint, **kwargs)
    if not isinstance(module, nn.Module):
        raise CheckFailed(f"{type(module).__name__} is not an nn.Module: class Name(nn.Module)")
    return module.eval() if begun(module) else module


def randomised(module, seed=0):
    """Weights at which a forgotten one shows: normal with std 0.2, vectors around 1."""
    generator = seeded(seed)
    for parameter in module.parameters() if begun(module) else ():
        centre = 0.0 if parameter.dim() > 1 else 1.0
        parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return module


def weights_of(module, shapes, optional=(), extra="", wrong_shapes=None):
    """The module's parameters, which must be these, in these shapes, and no others.

    shapes         {name with dots: shape}; `optional` ones may be missing
    extra          a hint for a parameter that is not among them
    wrong_shapes   {a shape that is not right: the mistake that leads to it}
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
            failure = f"{name} of {kind} has shape {has}, expected {tuple(shape)}"
            raise CheckFailed(in_words(failure, (wrong_shapes or {}).get(has, "")))
    for number, (name, parameter) in enumerate(found.items()):
        if name not in shapes:
            raise CheckFailed(in_words(f"{kind} has a parameter {name!r} too many", extra))
        for other in list(found)[:number]:
            if found[other] is parameter:
                raise CheckFailed(f"{other} and {name} are one and the same parameter: build two")
    return found


def result_and_weights(module, shapes, *args, optional=(), extra="", wrong_shapes=None, hint=""):
    """What the module makes of `args`, and its parameters as `weights_of` checks them.

    A stub is told from its result, before its parameters count; a wrong parameter is named before
    the error that it leads to.
    """
    try:
        got = run(module, *args, hint=hint)
    except StillOpen:
        raise
    except CheckFailed:
        if begun(module):
            weights_of(module, shapes, optional, extra, wrong_shapes)
        raise
    weights = weights_of(module, shapes, optional, extra, wrong_shapes)
    again = run(module, *args, hint=hint)
    if isinstance(got, torch.Tensor) and gap(got, again) > 0:
        raise CheckFailed(
            "two calls with the same input give different results in eval mode: dropout is still "
            "on. Use nn.Dropout, or F.dropout(..., training=self.training)"
        )
    return got, weights
