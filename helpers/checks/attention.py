"""Proofs of causal attention, plain and rotated, and of grouped-query attention."""

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


@proof
def check_gqa(cls):
    """GroupedQueryAttention(d_in, d_out, num_heads, num_kv_groups, dtype=None), without biases.

    It is called as att(x, mask, cos, sin); the mask (T, T) is True where a query must not look. A
    forward pass in which mask, cos and sin have defaults is also called as att(x), and must then be
    causal and not rotate. num_kv_groups is the number of key/value heads; query head h reads
    number h // (num_heads / num_kv_groups), and a num_kv_groups that does not divide num_heads is
    refused. All is compared with torch.nn.functional.scaled_dot_product_attention, one query head
    at a time.
    """
    for sizes in ((24, 48, 6, 2, 11), (16, 32, 4, 1, 7), (40, 64, 8, 4, 9), (24, 24, 3, 3, 5)):
        _compare_groups(cls, *sizes)
    _grouped_in_bfloat16(cls)
    for d_out, H, G, rule in (
        (24, 6, 4, "num_kv_groups=4 does not divide num_heads=6"),
        (20, 6, 2, "num_heads=6 does not divide d_out=20"),
    ):
        try:
            cls(24, d_out, H, G)
        except Exception:
            continue
        raise CheckFailed(f"{rule}, and nothing was said: raise a ValueError that names both")
    print("grouped-query attention: right, from multi-head to multi-query, in float32 and bfloat16")


_GROUPS_HINT = (
    "Keys are (B, G, T, E) and queries (B, H, T, E): give every query head its key head, "
    "repeat_interleave(H // G, dim=1), or without a copy keys (B, G, 1, T, E); a mask is (T, T)"
)


def _compare_groups(cls, d_in, d_out, H, G, T):
    E, share = d_out // H, H // G
    att = randomised(built(cls, d_in, d_out, H, G))
    x = torch.randn(2, T, d_in, generator=seeded(10))
    angles = angles_of(E, 100.0, 3 + torch.arange(T) + 4 * (torch.arange(T) // 3))  # with gaps
    cos, sin = tables_of(angles)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    wrong_shapes = {
        (share * E, d_in): "num_kv_groups was taken as the size of a group: it is the number of "
        "key/value heads",
        (H * E, d_in): "Keys and values have all num_heads heads: num_kv_groups of them are enough",
        (G, d_in): "Each key/value head has head_dim rows, not one",
    }
    got, found = result_and_weights(
        att,
        _grouped_shapes(d_in, d_out, H, G),
        x,
        future,
        cos,
        sin,
        extra="Grouped-query attention has no biases and no other weights",
        wrong_shapes=wrong_shapes,
        hint=_GROUPS_HINT,
    )
    weights = (found[f"W_{name}.weight"] for name in ("query", "key", "value"))
    q, k, v = (
        split_heads(x @ w.T, n) for w, n in zip(weights, (H, G, G), strict=True)
    )  # (B, H, T, E), and twice (B, G, T, E)

    def turn(t):
        return rotate_half_split(t, angles).float()

    def out(merged):
        return merged @ found["out_proj.weight"].T

    def right(hidden, turn=turn):
        return out(merged_heads(_head_by_head(turn(q), turn(k), v, hidden)))

    def mistakes():
        wide = (t.repeat_interleave(share, dim=1) for t in (k, v))
        wrong = _group_mistakes(q, k, v, future, turn, out)
        early = [rotate_half_split(t.transpose(1, 2), angles[: t.shape[1]]) for t in (q, k)]
        early = [t.transpose(1, 2).float() for t in early]  # heads took the place of tokens
        wrong["Rotated before the heads were transposed: apply_rope takes (B, heads, T, E)"] = out(
            merged_heads(_head_by_head(*early, v, future))
        )
        return {**wrong, **_rope_mistakes(q, *wide, angles, out), "x comes back as it is": x}

    what = f"attention with {H} query heads on {G} key/value heads"
    judge(what, got, right(future), 1e-4, mistakes)  # float32 rounds by 1e-6
    more = future | ((torch.arange(T) % 3 == 1) & (torch.arange(T)[:, None] > 2))
    hint = "The mask that is given is not used: hide what it says, and nothing else"
    got = run(att, x, more, cos, sin, hint=_GROUPS_HINT)
    others = {hint: right(future)}
    judge(f"{what}, with a mask that hides more", got, right(more), 1e-4, others.copy)
    defaults = [p.default for p in inspect.signature(att.forward).parameters.values()][1:4]
    if inspect.Parameter.empty not in defaults:
        hint = "Without a mask it is causal, and without cos and sin nothing is rotated"
        got = run(att, x, hint=hint)
        everything = torch.zeros_like(future)
        others = {hint: [right(everything, lambda t: t), right(everything), right(future)]}
        what = f"{what}, without mask, cos and sin"
        judge(what, got, right(future, lambda t: t), 1e-4, others.copy)


def _grouped_shapes(d_in, d_out, H, G):
    rows = G * d_out // H
    return {
        "W_query.weight": (d_out, d_in),
        "W_key.weight": (rows, d_in),
        "W_value.weight": (rows, d_in),
        "out_proj.weight": (d_out, d_out),
    }


def _head_by_head(q, k, v, hidden):
    """Every query head alone with its key/value head, by PyTorch: (B, H, T, E)."""
    share = q.shape[1] // k.shape[1]
    heads = [
        F.scaled_dot_product_attention(q[:, h], k[:, h // share], v[:, h // share], ~hidden)
        for h in range(q.shape[1])
    ]
    return torch.stack(heads, dim=1)


def _grouped_in_bfloat16(cls):
    """The weights come in the dtype that is asked for, and the result is near the right one."""
    att = randomised(built(cls, 24, 48, 6, 2, dtype=torch.bfloat16))
    for name, weight in att.named_parameters():
        if weight.dtype != torch.bfloat16:
            raise CheckFailed(f"{name} is not in the dtype given to the constructor: pass it on to "
                              "every nn.Linear")  # fmt: skip
    x = torch.randn(2, 9, 24, generator=seeded(11))
    angles = angles_of(8, 100.0, torch.arange(9))
    cos, sin = tables_of(angles)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    hint = "Cast the softmax, or what was rotated, back to x.dtype"
    got = run(att, x.to(torch.bfloat16), future, cos, sin, hint=hint)
    weights = [getattr(att, n).weight.float() for n in ("W_query", "W_key", "W_value", "out_proj")]
    q, k, v = (split_heads(x @ w.T, n) for w, n in zip(weights, (6, 2, 2), strict=False))
    q, k = (rotate_half_split(t, angles).float() for t in (q, k))
    wanted = merged_heads(_head_by_head(q, k, v, future)) @ weights[3].T
    # results up to 4, where the numbers are 0.016 to 0.03 apart
    near_in_bfloat16("grouped-query attention", got, wanted, 0.05)


def _group_mistakes(q, k, v, hidden, turn, out):
    """What goes wrong with groups; q (B, H, T, E), k and v (B, G, T, E), before `turn` rotates."""
    (B, H, T, E), G = q.shape, k.shape[1]
    share = H // G

    def wide(t):
        return t.repeat_interleave(share, dim=1)

    def in_turn(t):
        return t.repeat(1, share, 1, 1)

    def scrambled(t):
        return merged_heads(t).view(t.shape)

    def attended(q=q, k=wide(k), v=wide(v), hidden=hidden, scale=E**-0.5, dim=-1):
        scores = (turn(q) @ turn(k).transpose(-2, -1) * scale).masked_fill(hidden, -math.inf)
        return torch.softmax(scores, dim) @ v

    def result(**changes):
        return out(merged_heads(attended(**changes)))

    mixed = attended()
    grouped = mixed.unflatten(1, (G, share))  # (B, G, H / G, T, E)
    all_mixed = attended(scrambled(q), wide(scrambled(k)), wide(scrambled(v)))
    widths = {H, G, share}
    return {
        "Query head h got key/value head h % G, repeat where repeat_interleave is needed: "
        "neighbouring query heads share one": result(k=in_turn(k), v=in_turn(v)),
        "The queries are grouped in turn and come back in order: the query heads of a group are "
        "neighbours, unflatten(1, (G, H // G))": (
            result(q=q.unflatten(1, (share, G)).transpose(1, 2).flatten(1, 2))
        ),
        "The values are repeated in turn and the keys are not: repeat_interleave both": (
            result(v=in_turn(v))
        ),
        "The keys are repeated in turn and the values are not: repeat_interleave both": (
            result(k=in_turn(k))
        ),
        "All query heads read key/value head 0: that is right for one group only": (
            result(k=k[:, :1], v=v[:, :1])
        ),
        "All query heads read the mean of the key/value heads: each reads its own group's": (
            result(k=k.mean(1, keepdim=True), v=v.mean(1, keepdim=True))
        ),
        "The query heads of a group are averaged: every head keeps its own query": (
            result(q=wide(q.unflatten(1, (G, share)).mean(2)))
        ),
        "The heads come back in another order than they went in: (B, G, H / G, T, E) becomes "
        "(B, H, T, E)": out(merged_heads(grouped.transpose(1, 2).flatten(1, 2))),
        "Keys and values are exchanged": result(k=wide(v), v=wide(k)),
        "W_key makes the values too: they come from W_value": result(v=wide(k)),
        "The future is not hidden: the causal mask is missing": (
            result(hidden=torch.zeros_like(hidden))
        ),
        "The mask is used the wrong way round: True is hidden here, and is seen in "
        "scaled_dot_product_attention": [
            result(hidden=~hidden),
            out(merged_heads(attended(hidden=~hidden).nan_to_num())),
        ],
        "The scores are not scaled: divide by sqrt(head size)": result(scale=1.0),
        "The scores are divided by the root of a width of several heads: divide by the root of one "
        "head's size": [result(scale=(heads * E) ** -0.5) for heads in widths],
        "The scores are divided by the head size: divide by its root": result(scale=1 / E),
        "The softmax runs over the queries: it runs over the keys, dim=-1": result(dim=-2),
        "Tokens and heads are mixed: view as (B, T, heads, E), then transpose(1, 2)": [
            result(k=wide(scrambled(k)), v=wide(scrambled(v))),
            out(merged_heads(all_mixed)),
            out(all_mixed.reshape(B, T, H * E)),
        ],
        "The heads were not transposed before they were merged: (B, H, T, E) to (B, T, H, E) "
        "first": out(mixed.reshape(B, T, H * E)),
        "out_proj is missing": merged_heads(mixed),
    }
