"""Twins of the RoPE tables, the rotation and the order of rows."""

import math

import torch

from helpers.checks import check_apply_rope, check_permute, check_rope_params
from helpers.positions import apply_rope, compute_rope_params, permute, unpermute
from twins.registry import accepted, proves, refused

proves(
    check_rope_params, compute_rope_params, "RoPE tables: right, in float32, up to position 99,999"
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
