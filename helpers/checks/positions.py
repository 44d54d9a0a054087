"""Proofs of the RoPE tables and their rescaling, of the rotation, and of the order of rows."""

import math

import torch

from helpers.checks.judging import (
    CheckFailed,
    bfloat16_steps,
    distance,
    dtype_kept,
    judge,
    proof,
    run,
    same_kind,
    seeded,
)


def angles_of(head_dim, base, positions):
    """From first principles: position m turns pair i by m * base^(-2i / head_dim) radians."""
    i = torch.arange(head_dim // 2, dtype=torch.float64)
    return positions.double()[..., None] * base ** (-2 * i / head_dim)


def _twice(half):
    return torch.cat([half, half], dim=-1)


def tables_of(angles):
    """cos and sin as apply_rope takes them."""
    return _twice(angles.cos()).float(), _twice(angles.sin()).float()


_DRIFT = (
    "The first positions are right, later ones drift: positions, frequencies, angles and tables "
    "are all float32, never bfloat16 or float16"
)


@proof
def check_rope_params(fn):
    """compute_rope_params(head_dim, theta_base, context_length), against angles in float64."""
    for head_dim, base, length in ((16, 10_000, 40), (64, 500_000.0, 300), (8, 10_000.0, 7)):
        _compare_tables(fn, head_dim, base, length)
    longest = torch.tensor(99_999)
    cos, _ = run(fn, head_dim=8, theta_base=500_000.0, context_length=100_000)
    same_kind(cos, torch.empty(100_000, 8), "There is one row for each of context_length positions")
    wanted = _twice(angles_of(8, 500_000.0, longest).cos())
    # a float32 angle of 1e5 radians is good to 4e-3; anything coarser is far off
    judge("cos at position 99,999", cos[longest], wanted, 2e-2, lambda: {_DRIFT: cos[longest]})
    print("RoPE tables: right, in float32, up to position 99,999")


def _two_tables(got):
    if not isinstance(got, tuple | list) or len(got) != 2:
        kind = "complex numbers" if getattr(got, "is_complex", bool)() else "something else"
        raise CheckFailed(f"expected two tables, cos and sin, got {kind}: return cos, sin")
    return got


def _in_float32(name, table):
    if isinstance(table, torch.Tensor) and table.dtype != torch.float32:
        dtype = str(table.dtype).removeprefix("torch.")
        raise CheckFailed(f"the {name} table is {dtype}: it is float32, whatever the model's dtype")


def _compare_tables(fn, head_dim, base, length):
    got = _two_tables(run(fn, head_dim=head_dim, theta_base=base, context_length=length))
    m = torch.arange(length, dtype=torch.float64)
    i = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = angles_of(head_dim, base, m)

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
        "theta_base is not used": angles_of(head_dim, 10_000.0, m),
        "The angles are taken as degrees: cos and sin want radians": angles.deg2rad(),
    }
    names = ("cos", torch.cos, torch.sin), ("sin", torch.sin, torch.cos)
    for table, (name, function, other) in zip(got, names, strict=True):
        what, wanted = f"{name} for heads of {head_dim}, base {base:,}", _twice(function(angles))
        _in_float32(name, table)
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
        judge(what, table, wanted, 1e-4, mistakes.copy)  # 300 radians in float32 are good to 2e-5


_NOTHING = "freq_config is None here: nothing is rescaled (Llama 2, Llama 3.0)"


@proof
def check_rope_rescaling(fn):
    """compute_rope_params with a freq_config: how fast each pair turns, against float64."""
    llama31, other = (8.0, 1.0, 4.0, 8192), (5.0, 2.0, 16.0, 1000)
    for head_dim, base, length, numbers in (
        (128, 500_000.0, 40, llama31),
        (64, 500_000.0, 9, (32.0, *llama31[1:])),
        (64, 10_000.0, 300, other),
    ):
        _compare_speeds(fn, head_dim, base, length, numbers)
    sizes = {"head_dim": 16, "theta_base": 500_000.0, "context_length": 131_072}
    got = _two_tables(run(fn, **sizes, freq_config=_freq_config(32.0, *llama31[1:])))
    far = torch.tensor([8191, 8192, 65_536, 131_071])
    share = _shares(16, 500_000.0, 32.0, *llama31[1:])[0]
    angles = angles_of(16, 500_000.0, far) * share
    for table, name, function in zip(got, ("cos", "sin"), (torch.cos, torch.sin), strict=True):
        same_kind(table, torch.empty(131_072, 16), "There is one row for each position")
        _in_float32(name, table)
        rows = table[far]
        # a float32 angle of 1e5 radians is good to 1e-2; anything coarser is far off
        what = f"{name} at positions up to 131,071"
        judge(what, rows, _twice(function(angles)), 2e-2, lambda rows=rows: {_DRIFT: rows})
    sizes["context_length"] = 40
    plain = _two_tables(run(fn, **sizes, freq_config=None, hint=_NOTHING))
    wanted = _twice(angles_of(16, 500_000.0, torch.arange(40)).cos())
    by_default = _twice((angles_of(16, 500_000.0, torch.arange(40)) * share).cos())
    judge("cos without a freq_config", plain[0], wanted, 1e-4, lambda: {_NOTHING: by_default})
    print("RoPE rescaling: right, for factors 8 and 32 and for other bands, up to position 131,071")


def _freq_config(*numbers):
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
    return dict(zip(keys, numbers, strict=True))


def _turns(head_dim, base, original):
    """Turns of each pair within the original context."""
    return original * angles_of(head_dim, base, torch.ones(())) / (2 * math.pi)


def _shares(head_dim, base, factor, low, high, original):
    """What is left of each pair's speed, 1 down to 1 / factor, and how much of the pair is kept."""
    keep = ((_turns(head_dim, base, original) - low) / (high - low)).clamp(0, 1)
    return keep + (1 - keep) / factor, keep


def _compare_speeds(fn, head_dim, base, length, numbers):
    config = _freq_config(*numbers)
    sizes = {"head_dim": head_dim, "theta_base": base, "context_length": length}
    cos, sin = got = _two_tables(run(fn, **sizes, freq_config=config))
    if config != _freq_config(*numbers):
        raise CheckFailed("your code changes freq_config, which belongs to the model's config")
    for table, name in zip(got, ("cos", "sin"), strict=True):
        same_kind(table, torch.empty(length, head_dim), "One row a position, each angle twice")
        _in_float32(name, table)
    size = torch.hypot(cos, sin)
    judge(
        "the length of (cos, sin)",
        size,
        torch.ones(length, head_dim).double(),
        1e-4,
        lambda: {"cos and sin are scaled too: Llama 3 has no attention factor": 0 * size + size[0]},
    )
    unscaled = angles_of(head_dim, base, torch.ones(()))  # of position 1
    shares = (torch.atan2(sin[1], cos[1]) / _twice(unscaled)).float()  # of the speed before
    wanted, keep = _shares(head_dim, base, *numbers)
    factor, low, high, original = numbers
    turns = _turns(head_dim, base, original)

    def instead(factor=factor, low=low, high=high, original=original):
        return _shares(head_dim, base, factor, low, high, original)[0]

    def blended(keep):
        return keep + (1 - keep) / factor

    def seen(share):
        """The share as one step shows it: a turn by more than half a circle looks like less."""
        angle = unscaled * share
        return torch.atan2(angle.sin(), angle.cos()) / unscaled

    def mistakes():
        pair = torch.arange(head_dim // 2).double()
        raw = (turns - low) / (high - low)
        inside = (keep > 0) & (keep < 1)
        by_wavelength = (1 / low - 1 / turns) / (1 / low - 1 / high)
        again = ((turns * wanted - low) / (high - low)).clamp(0, 1)
        wrong = {
            "Nothing is rescaled: is freq_config used, for a short context_length too, and is a "
            "wavelength 2 pi / frequency?": torch.ones_like(keep),
            "All pairs are slowed down, as if positions were divided (position interpolation): the "
            "fast ones keep their speed": torch.ones_like(keep) / factor,
            "The wrong end is slowed down: pairs of short wavelength keep their speed, those of "
            "long wavelength are divided": blended(1 - keep),
            "The slow pairs turn faster: divide by the factor": keep + (1 - keep) * factor,
            "There is no blend: a pair between the two bands gets a share of both speeds": [
                blended((turns > bound).double()) for bound in (low, high, (low + high) / 2)
            ],
            "The blend runs the wrong way: the faster a pair turns, the more it keeps": (
                blended(torch.where(inside, 1 - keep, keep))
            ),
            "The blend is of the frequencies, not of the wavelengths": (
                1 / (keep + (1 - keep) * factor)
            ),
            "The blend follows the turns, original_context_length / wavelength, and not the "
            "wavelength itself": blended(by_wavelength.clamp(0, 1)),
            "How much is kept is (turns - low) / (high - low)": [
                blended(torch.where(inside, other, keep))
                for other in ((turns - low) / high, turns / high, turns / (high - low))
            ],
            "What is kept lies between 0 and 1: clamp it": blended(raw),
            "The factor is a constant: read it from freq_config (8 in Llama 3.1, 32 in 3.2)": [
                instead(factor=8.0),
                instead(factor=32.0),
            ],
            "low_freq_factor and high_freq_factor are constants: read them from freq_config": (
                instead(low=1.0, high=4.0)
            ),
            "original_context_length is a constant: read it from freq_config": (
                instead(original=8192)
            ),
            "The bands follow the reader's context_length: they belong to original_context_length, "
            "on which the model was trained": instead(original=length),
            "A wavelength is 2 pi / frequency: the 2 pi is missing": (
                instead(original=original * 2 * math.pi)
            ),
            "The base is changed instead (NTK): that slows down every pair but the first": [
                factor ** (-2 * pair / (head_dim - 2)),
                factor ** (-2 * pair / head_dim),
            ],
            "It is rescaled twice": wanted * blended(again),
        }
        return {
            hint: [_twice(seen(result)) for result in (r if isinstance(r, list) else [r])]
            for hint, r in wrong.items()
        }

    what = f"the share of its speed that each pair keeps, heads of {head_dim}, factor {factor:g}"
    judge(what, shares, _twice(wanted), 1e-4, mistakes)


def rotate_half_split(x, angles):
    """Half-split rotation by complex numbers: element i is real, element i + E/2 imaginary."""
    E = x.shape[-1]
    z = torch.complex(x[..., : E // 2].double(), x[..., E // 2 :].double())
    turned = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def rotate_interleaved(x, angles):
    z = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@proof
def check_apply_rope(fn):
    """apply_rope(x, cos, sin) in the half-split layout, against products of complex numbers."""
    for B, H, T, E in ((2, 3, 9, 16), (1, 1, 1, 4), (1, 6, 6, 8)):
        _compare_rotation(fn, B, H, T, E)
    x = torch.randn(2, 3, 9, 16, generator=seeded(5))
    positions = torch.arange(2, 22)  # position 0 would hide every mistake
    angles = angles_of(16, 100.0, positions)
    first_rows = rotate_half_split(x, angles[:9])
    hint = "A table longer than the text: use its first T rows"
    longer = run(fn, x, *tables_of(angles), hint=hint)
    judge(
        "a longer table",
        longer,
        first_rows,
        1e-4,
        lambda: {hint: rotate_half_split(x, angles[-9:])},
    )
    angles = angles_of(16, 100.0, torch.stack([positions[:9], positions[6:15]]))  # (B, T, E / 2)
    hint = (
        "cos and sin of shape (B, T, E), where each row of the batch has its own positions: put "
        "the head's axis between, cos[:, None]"
    )
    got = run(fn, x, *tables_of(angles), hint=hint)
    own = "Each row of the batch has its own positions: all follow one row here"
    judge(
        "tables of shape (B, T, E)",
        got,
        rotate_half_split(x, angles[:, None]),
        1e-4,
        lambda: {own: [rotate_half_split(x, angles[0]), rotate_half_split(x, angles[-1])]},
    )
    long = angles_of(16, 100.0, torch.stack([positions[:12], positions[6:18]]))
    hint = "Tables of shape (B, S, E), longer than the text: cut them to [:, :T]"
    got = run(fn, x, *tables_of(long), hint=hint)
    judge("longer tables of shape (B, S, E)", got, rotate_half_split(x, angles[:, None]), 1e-4)
    angles, x = angles_of(16, 100.0, positions[:9]), x.to(torch.bfloat16)
    got = run(fn, x, *tables_of(angles))
    dtype_kept("apply_rope", got, torch.bfloat16)
    if bfloat16_steps(got, rotate_half_split(x, angles)) > 1.01:  # one rounding is half a step
        raise CheckFailed(
            "apply_rope in bfloat16 loses digits: multiply in the tables' float32, cast at the end"
        )
    print("apply_rope: right, in float32 and bfloat16, for one and for many rows of positions")


def _compare_rotation(fn, B, H, T, E):
    # as it comes out of the attention: the tokens' and the heads' axes were exchanged
    x = torch.randn(B, T, H, E, generator=seeded(4)).transpose(1, 2)
    angles = angles_of(E, 100.0, torch.arange(3, T + 3))  # position 0 would hide every mistake
    cos, sin = tables_of(angles)
    right = rotate_half_split(x, angles)

    def mistakes():
        half = E // 2
        first, second = x[..., :half], x[..., half:]
        turned = torch.cat([-second, first], -1)
        wrong = {
            "It turns backwards: the minus belongs to the second half, (-second, first)": (
                rotate_half_split(x, -angles)
            ),
            "Neighbours are paired, 0 with 1 (interleaved); half-split pairs i with i + E/2": [
                rotate_interleaved(x, angles),
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
            "It is rotated twice": rotate_half_split(right, angles),
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
    judge(f"apply_rope on {(B, H, T, E)}", run(fn, x, cos, sin, hint=hint), right, 1e-4, mistakes)


@proof
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

    got = run(fn, weight, n_heads)
    judge(f"permute of {n_heads} heads of {E} rows", got, weight[order], 0.0, mistakes)
    x, angles = torch.randn(3, D, generator=seeded(7)), angles_of(E, 100.0, torch.arange(3))

    def scores(w, rotate):
        heads = (x.double() @ w.double().T).reshape(3, n_heads, E).transpose(0, 1)
        return rotate(heads, angles) @ rotate(heads, angles).transpose(1, 2)

    # float64 rounds by 1e-14
    if distance(scores(weight, rotate_interleaved), scores(got, rotate_half_split)) > 1e-9:
        raise CheckFailed("the two rotations give different scores")
