"""Twins of the RoPE tables, the rotation and the order of rows."""

import math

import numpy as np
import torch

from helpers.checks import check_apply_rope, check_permute, check_rope_params, check_rope_rescaling
from helpers.positions import apply_rope, compute_rope_params, permute, unpermute
from twins.registry import accepted, proves, refused

proves(
    check_rope_params, compute_rope_params, "RoPE tables: right, in float32, up to position 99,999"
)
proves(
    check_rope_rescaling,
    compute_rope_params,
    "RoPE rescaling: right, for factors 8 and 32 and for other bands, up to position 131,071",
)
proves(
    check_apply_rope,
    apply_rope,
    "apply_rope: right, in float32 and bfloat16, for one and for many rows of positions",
)
proves(
    check_permute,
    permute,
    "permute: right; interleaved rotation before is half-split rotation after",
)


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


# --- rescaling ----------


def four(freq_config):
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
    return [freq_config[name] for name in names]


def speeds(head_dim, theta_base):
    return 1.0 / theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim)


def tables_at(inv_freq, context_length):
    angles = torch.outer(torch.arange(context_length).float(), inv_freq.float()).repeat(1, 2)
    return angles.cos(), angles.sin()


@accepted(check_rope_rescaling)
def rescaled_by_where(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    inv_freq = speeds(head_dim, theta_base)
    if freq_config:
        factor, low, high, original = four(freq_config)
        wavelength = 2 * math.pi / inv_freq
        smooth = (original / wavelength - low) / (high - low)
        middle = smooth * inv_freq + (1 - smooth) * inv_freq / factor
        slow, fast = wavelength > original / low, wavelength < original / high
        inv_freq = torch.where(slow, inv_freq / factor, torch.where(fast, inv_freq, middle))
    return tables_at(inv_freq, context_length)


@accepted(check_rope_rescaling)
def rescaled_pair_by_pair(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    new = []
    for frequency in speeds(head_dim, theta_base).tolist():
        if freq_config is not None:
            factor, low, high, original = four(freq_config)
            turns = original * frequency / (2 * math.pi)
            if turns < low:
                frequency /= factor
            elif turns <= high:
                keep = (turns - low) / (high - low)
                frequency *= keep + (1 - keep) / factor
        new.append(frequency)
    return tables_at(torch.tensor(new), context_length)


@accepted(check_rope_rescaling)
def rescaled_by_clamp(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    inv_freq = torch.exp(torch.arange(0, head_dim, 2) * (-math.log(theta_base) / head_dim))
    if freq_config is not None:
        factor, low, high, original = four(freq_config)
        share = ((original * inv_freq / math.tau - low) / (high - low)).clamp(min=0, max=1)
        inv_freq = torch.lerp(inv_freq / factor, inv_freq, share)
    return tables_at(inv_freq, context_length)


@accepted(check_rope_rescaling)
def rescaled_in_numpy(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    inv_freq = theta_base ** (-np.arange(0, head_dim, 2) / head_dim)
    if freq_config is not None:
        factor, low, high, original = four(freq_config)
        share = np.interp(original * inv_freq / (2 * np.pi), [low, high], [1 / factor, 1])
        inv_freq = inv_freq * share
    angles = np.tile(np.outer(np.arange(context_length), inv_freq), 2)
    return [torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]


def rescaling(change):
    """A function with the helper's parameters whose speeds are `change`d in another way."""

    def wrong(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
        inv_freq = speeds(head_dim, theta_base)
        if freq_config is not None:
            inv_freq = change(inv_freq, *four(freq_config))
        return tables_at(inv_freq, context_length)

    wrong.__name__ = change.__name__
    return wrong


def blend(inv_freq, factor, keep):
    return keep * inv_freq + (1 - keep) * inv_freq / factor


def smooth_factor(inv_freq, low, high, original):
    return (original * inv_freq / (2 * math.pi) - low) / (high - low)


def of_llama(inv_freq, factor, low, high, original):
    return blend(inv_freq, factor, smooth_factor(inv_freq, low, high, original).clamp(0, 1))


def not_rescaled(inv_freq, factor, low, high, original):
    return inv_freq


def position_interpolation(inv_freq, factor, low, high, original):
    return inv_freq / factor


def high_frequencies_divided(inv_freq, factor, low, high, original):
    return of_llama(inv_freq, factor, high, low, original)


def wavelengths_compared_the_wrong_way(inv_freq, factor, low, high, original):
    wavelength, keep = 2 * math.pi / inv_freq, smooth_factor(inv_freq, low, high, original)
    inside = (wavelength <= original / low) & (wavelength >= original / high)
    outside = torch.where(wavelength < original / high, inv_freq / factor, inv_freq)
    return torch.where(inside, blend(inv_freq, factor, 1 - keep), outside)


def multiplied(inv_freq, factor, low, high, original):
    return of_llama(inv_freq, 1 / factor, low, high, original)


def threshold_at_the_slow_end(inv_freq, factor, low, high, original):
    return torch.where(2 * math.pi / inv_freq > original / low, inv_freq / factor, inv_freq)


def threshold_at_the_fast_end(inv_freq, factor, low, high, original):
    return torch.where(2 * math.pi / inv_freq < original / high, inv_freq, inv_freq / factor)


def low_and_high_exchanged(inv_freq, factor, low, high, original):
    wavelength = 2 * math.pi / inv_freq
    new = torch.where(wavelength > original / high, inv_freq / factor, inv_freq)
    keep = smooth_factor(inv_freq, low, high, original)
    inside = (wavelength >= original / low) & (wavelength <= original / high)  # is empty
    return torch.where(inside, blend(inv_freq, factor, keep), new)


def blend_reversed(inv_freq, factor, low, high, original):
    keep = smooth_factor(inv_freq, low, high, original)
    keep = torch.where((keep > 0) & (keep < 1), 1 - keep, keep.clamp(0, 1))
    return blend(inv_freq, factor, keep)


def blend_of_wavelengths(inv_freq, factor, low, high, original):
    wavelength = 2 * math.pi / inv_freq
    keep = smooth_factor(inv_freq, low, high, original).clamp(0, 1)
    return 2 * math.pi / (keep * wavelength + (1 - keep) * factor * wavelength)


def blend_along_the_wavelength(inv_freq, factor, low, high, original):
    wavelength = 2 * math.pi / inv_freq
    keep = (original / low - wavelength) / (original / low - original / high)
    return blend(inv_freq, factor, keep.clamp(0, 1))


def blend_over_high(inv_freq, factor, low, high, original):
    turns = original * inv_freq / (2 * math.pi)
    keep = torch.where(turns < high, (turns - low) / high, 1)
    return blend(inv_freq, factor, torch.where(turns < low, 0, keep))


def blend_from_zero(inv_freq, factor, low, high, original):
    turns = original * inv_freq / (2 * math.pi)
    keep = torch.where(turns < high, turns / high, 1)
    return blend(inv_freq, factor, torch.where(turns < low, 0, keep))


def not_clamped(inv_freq, factor, low, high, original):
    return blend(inv_freq, factor, smooth_factor(inv_freq, low, high, original))


def factor_of_metas_code(inv_freq, factor, low, high, original):
    return of_llama(inv_freq, 8, low, high, original)


def factor_of_llama_32(inv_freq, factor, low, high, original):
    return of_llama(inv_freq, 32, low, high, original)


def bands_of_llama(inv_freq, factor, low, high, original):
    return of_llama(inv_freq, factor, 1, 4, original)


def original_of_llama(inv_freq, factor, low, high, original):
    return of_llama(inv_freq, factor, low, high, 8192)


def without_two_pi(inv_freq, factor, low, high, original):
    return of_llama(inv_freq, factor, low, high, original * 2 * math.pi)


def wavelength_upside_down(inv_freq, factor, low, high, original):
    wavelength = 2 * math.pi * inv_freq
    keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return blend(inv_freq, factor, keep)


def rescaled_twice(inv_freq, factor, low, high, original):
    once = of_llama(inv_freq, factor, low, high, original)
    return of_llama(once, factor, low, high, original)


for change, hint in {
    not_rescaled: "Nothing is rescaled: is freq_config used",
    position_interpolation: "as if positions were divided (position interpolation)",
    high_frequencies_divided: "The wrong end is slowed down",
    wavelengths_compared_the_wrong_way: "The wrong end is slowed down",
    multiplied: "The slow pairs turn faster: divide by the factor",
    threshold_at_the_slow_end: "There is no blend",
    threshold_at_the_fast_end: "There is no blend",
    low_and_high_exchanged: "There is no blend",
    blend_reversed: "The blend runs the wrong way",
    blend_of_wavelengths: "The blend is of the frequencies",
    blend_along_the_wavelength: "The blend follows the turns",
    blend_over_high: "How much is kept is (turns - low) / (high - low)",
    blend_from_zero: "How much is kept is (turns - low) / (high - low)",
    not_clamped: "What is kept lies between 0 and 1: clamp it",
    factor_of_metas_code: "The factor is a constant",
    factor_of_llama_32: "The factor is a constant",
    bands_of_llama: "low_freq_factor and high_freq_factor are constants",
    original_of_llama: "original_context_length is a constant",
    without_two_pi: "the 2 pi is missing",
    wavelength_upside_down: "and is a wavelength 2 pi / frequency?",
    rescaled_twice: "It is rescaled twice",
}.items():
    refused(check_rope_rescaling, hint)(rescaling(change))


@refused(check_rope_rescaling, "as if positions were divided (position interpolation)")
def positions_divided(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    positions = torch.arange(context_length) / (freq_config or {"factor": 1})["factor"]
    angles = torch.outer(positions, speeds(head_dim, theta_base)).repeat(1, 2)
    return angles.cos(), angles.sin()


@refused(check_rope_rescaling, "The bands follow the reader's context_length")
def bands_of_the_reader(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    if freq_config is not None:
        freq_config = {**freq_config, "original_context_length": context_length}
    return rescaled_by_where(head_dim, theta_base, context_length, freq_config)


@refused(
    check_rope_rescaling, "Nothing is rescaled: is freq_config used, for a short context_length too"
)
def only_when_longer(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    if freq_config and context_length <= freq_config["original_context_length"]:
        freq_config = None
    return rescaled_by_where(head_dim, theta_base, context_length, freq_config)


@refused(check_rope_rescaling, "The base is changed instead (NTK)")
def base_by_ntk(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    if freq_config is not None:
        theta_base *= freq_config["factor"] ** (head_dim / (head_dim - 2))
    return tables_at(speeds(head_dim, theta_base), context_length)


@refused(check_rope_rescaling, "The base is changed instead (NTK)")
def base_times_factor(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    if freq_config is not None:
        theta_base *= freq_config["factor"]
    return tables_at(speeds(head_dim, theta_base), context_length)


@refused(check_rope_rescaling, "Llama 3 has no attention factor")
def attention_factor_of_yarn(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    cos, sin = rescaled_by_where(head_dim, theta_base, context_length, freq_config)
    scale = 0.1 * math.log(freq_config["factor"]) + 1 if freq_config else 1
    return cos * scale, sin * scale


@refused(check_rope_rescaling, "freq_config is None here: nothing is rescaled")
def needs_a_freq_config(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    inv_freq = of_llama(speeds(head_dim, theta_base), *four(freq_config))
    return tables_at(inv_freq, context_length)


@refused(check_rope_rescaling, "freq_config is None here: nothing is rescaled")
def rescaled_by_default(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
    freq_config = freq_config or dict(zip(names, (32.0, 1.0, 4.0, 8192), strict=True))
    return rescaled_by_where(head_dim, theta_base, context_length, freq_config)


@refused(check_rope_rescaling, "your code changes freq_config")
def pops_its_config(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    inv_freq = speeds(head_dim, theta_base)
    if freq_config:
        factor = freq_config.pop("factor")
        inv_freq = of_llama(inv_freq, factor, *list(freq_config.values()))
    return tables_at(inv_freq, context_length)


@refused(check_rope_rescaling, "the sin table is bfloat16: it is float32")
def sin_in_bfloat16(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    cos, sin = rescaled_by_where(head_dim, theta_base, context_length, freq_config)
    return cos, sin.to(torch.bfloat16)


@refused(check_rope_rescaling, "float32, never bfloat16 or float16")
def positions_in_bfloat16(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    positions = torch.arange(context_length).to(torch.bfloat16).float()
    inv_freq = speeds(head_dim, theta_base)
    if freq_config is not None:
        inv_freq = of_llama(inv_freq, *four(freq_config))
    angles = torch.outer(positions, inv_freq).repeat(1, 2)
    return angles.cos(), angles.sin()


@refused(check_rope_rescaling, "There is one row for each position")
def rows_of_the_original_context(
    head_dim, theta_base=10_000, context_length=4096, freq_config=None
):
    rows = min(context_length, freq_config["original_context_length"]) if freq_config else 4096
    return rescaled_by_where(head_dim, theta_base, rows, freq_config)


@refused(check_rope_rescaling, "One row a position, each angle twice")
def columns_once(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    cos, sin = rescaled_by_where(head_dim, theta_base, context_length, freq_config)
    return cos[:, : head_dim // 2], sin[:, : head_dim // 2]


@refused(check_rope_rescaling, "expected two tables, cos and sin, got complex numbers")
def freqs_cis_rescaled(head_dim, theta_base=10_000, context_length=4096, freq_config=None):
    cos, sin = rescaled_by_where(head_dim, theta_base, context_length, freq_config)
    return torch.complex(cos, sin)


@refused(check_rope_rescaling, "your code stopped with TypeError")
def without_freq_config(head_dim, theta_base=10_000, context_length=4096):
    return tables_at(speeds(head_dim, theta_base), context_length)


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
