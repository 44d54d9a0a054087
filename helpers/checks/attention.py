"""Proof of causal attention, plain and rotated."""

import inspect
import math

import torch
from torch.nn import functional as F

from helpers.checks.judging import (
    built,
    judge,
    near_in_bfloat16,
    proof,
    randomised,
    result_and_weights,
    run,
    seeded,
)
from helpers.checks.positions import angles_of, rotate_half_split, rotate_interleaved, tables_of


def split_heads(x, n):
    B, T, width = x.shape
    return x.view(B, T, n, width // n).transpose(1, 2)


def merged_heads(x):
    return x.transpose(1, 2).flatten(2)


@proof
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
    att = randomised(built(cls, d_in, d_out, 32, 0.5, H, bias))
    x = torch.randn(2, T, d_in, generator=seeded(8))
    names = ("W_query", "W_key", "W_value")
    shapes = {f"{n}.weight": (d_out, d_in) for n in names} | {"out_proj.weight": (d_out, d_out)}
    shapes |= {f"{n}.bias": (d_out,) for n in names} if bias else {}
    got, found = result_and_weights(
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
    q, k, v = (split_heads(p, H) for p in projected)

    def out(merged):
        return merged @ found["out_proj.weight"].T + found.get("out_proj.bias", zeros)

    right = out(merged_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def mistakes():
        return {
            "The biases of the projections are not used": (
                out(merged_heads(_attended(*(split_heads(p, H) for p in plain))))
            ),
            "x comes back as it is": x,
            **_attention_mistakes(q, k, v, projected, out),
        }

    what = f"attention with {H} heads over {T} tokens"
    judge(what, got, right, 1e-4, mistakes)  # float32 rounds by 1e-6
    shorter = "Each call has its own T: is a mask or a shape kept from the call before?"
    got = run(att, x[:, :-1], hint=shorter)
    judge("the same attention without the last token", got, right[:, :-1], 1e-4)
    in_half = [(what, (), right)]
    if _takes_rope(att):
        # with gaps: the scores depend on distances, so that a shift of all positions is not seen
        positions = 3 + torch.arange(T) + 4 * (torch.arange(T) // 3)
        angles = angles_of(d_out // H, 100.0, positions)
        cos, sin = tables_of(angles)
        turned = [rotate_half_split(t, angles).float() for t in (q, k)]
        wanted = out(merged_heads(F.scaled_dot_product_attention(*turned, v, is_causal=True)))

        def rope_mistakes():
            return _rope_mistakes(q, k, v, angles, out)

        judge(f"rotated {what}", run(att, x, None, cos, sin), wanted, 1e-4, rope_mistakes)
        in_half += [(f"rotated {what}", (None, cos, sin), wanted)]
    att.to(torch.bfloat16)
    for what, tables, wanted in in_half:
        hint = "Cast the softmax, or what was rotated, back to x.dtype"
        half = run(att, x.to(torch.bfloat16), *tables, hint=hint)
        # results up to 3, where the numbers are 0.016 apart; what is right comes to 0.015
        near_in_bfloat16(what, half, wanted, 0.05)
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
        return out(merged_heads(_attended(*(args or (q, k, v)), **changes)))

    def weighted(weights):
        return out(merged_heads(weights @ v))

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
            out(merged_heads(_attended(*scrambled))),
            out(_attended(*scrambled).reshape(B, T, H * E)),
        ],
        "All heads look as one: split queries and keys into heads": [
            out(_attended(*one_head, scale=scale)[:, 0]) for scale in ((H * E) ** -0.5, E**-0.5)
        ],
        "out_proj is missing": merged_heads(mixed),
        "The heads are not put side by side: transpose(1, 2), then reshape to (B, T, d_out)": (
            mixed.transpose(1, 2)
        ),
    }


def _rope_mistakes(q, k, v, angles, out):
    T = q.shape[2]
    base_angles = angles_of(q.shape[-1], 10_000.0, torch.arange(T))

    def attended(turn_q, turn_k, turn_v=False, rotate=rotate_half_split, angles=angles):
        turns = zip((q, k, v), (turn_q, turn_k, turn_v), strict=True)
        return out(
            merged_heads(_attended(*(rotate(t, angles).float() if on else t for t, on in turns)))
        )

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
            attended(True, True, rotate=rotate_interleaved)
        ),
        "The given cos and sin are not used: these are other positions' angles": (
            attended(True, True, angles=base_angles)
        ),
    }
