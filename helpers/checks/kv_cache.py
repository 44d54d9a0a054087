"""Proof of a key/value cache: a text in pieces gives the logits that it gives at once."""

import functools
import inspect

import torch

from helpers.checks.judging import (
    CheckFailed,
    StillOpen,
    both_shapes,
    built,
    distance,
    in_words,
    near_in_bfloat16,
    proof,
    randomised,
    run,
    seeded,
    where_apart,
)
from helpers.kv_cache import KVCache

T, TOLERANCE = 48, 1e-4  # logits up to 10, which float32 rounds by 1e-5 along two blocks
_CFG = {
    "vocab_size": 31,
    "context_length": 64,
    "emb_dim": 32,
    "n_heads": 4,
    "n_kv_groups": 2,
    "n_layers": 2,
    "hidden_dim": 48,
    "dtype": torch.float32,
}
_STATE = "A second text sees the first: keys and position belong to the cache, not to the model"
_MIXED = "Rows are mixed: each row keeps its own keys and values, (B, G, S, E)"
_DTYPE = "Keys and values are kept in the dtype of the model"


@proof
def check_kv_cache(cls):
    """A model class: cls(cfg), called as model(in_idx) and as model(in_idx, cache).

    The cache is KVCache(model, batch_size, capacity), or what the model's own
    make_cache(batch_size, capacity) returns. Calls with one cache continue the text, and must give
    the logits that the same model gives for the whole text without a cache. Where they do not,
    experiments with a model of one layer find out which tokens are seen, and in which order.
    A forward pass with `padding` among its parameters is also called with padded rows.
    """
    model = randomised(built(cls, _CFG, hint=f"The config has {', '.join(_CFG)}"))
    one, two, three = (_ids(1, seed) for seed in (1, 2, 3))
    _same(cls, model, "a text in one call with an empty cache", one, T)
    _same(cls, model, "a second text with a cache of its own", two, T, known=_STATE)
    _same(cls, model, "a text token by token", one, 1)
    _same(cls, model, "a text in pieces", one, (9, 1, 1, 17, 1, 12, 7))
    _two_at_once(model, two, three)
    _same(cls, model, "three rows in pieces", _ids(3, 4), (20, 1, 20, 7), known=_MIXED)
    _after_reset(model, one, two)
    if "padding" in inspect.signature(model.forward).parameters:
        _padded(model)
    model.to(torch.bfloat16)
    pieces = _in_pieces(model, _ids(2, 5), (20, *[1] * 28), hint=_DTYPE)
    # logits up to 10, which bfloat16 rounds by 0.06 at each step; the helpers' come to 0.2
    near_in_bfloat16("two rows in pieces", pieces, run(model, _ids(2, 5)).float(), 0.5)
    print("KV cache: right, at once, in pieces, token by token, for several rows and texts")


def _ids(B, seed, length=T):
    return torch.randint(_CFG["vocab_size"], (B, length), generator=seeded(seed))


def _new_cache(model, batch_size, capacity):
    if hasattr(model, "make_cache"):
        return run(model.make_cache, batch_size, capacity)
    hint = "KVCache needs tok_emb and trf_blocks; other models make_cache(batch_size, capacity)"
    return run(KVCache, model, batch_size, capacity, hint=hint)


def _in_pieces(model, ids, lengths, cache=None, hint="", **padding):
    """The logits of ids (B, length), given to the model in pieces of these lengths."""
    cache = _new_cache(model, *ids.shape) if cache is None else cache
    logits = []
    for piece in ids.split(lengths, dim=1):
        got = run(model, piece, cache, state=cache, **padding, hint=hint)
        if not isinstance(got, torch.Tensor) or got.dim() != 3 or got.shape[:2] != piece.shape:
            shape = tuple(getattr(got, "shape", ()))
            wanted = f"({piece.shape[0]}, {piece.shape[1]}, V)"
            raise CheckFailed(f"logits of {piece.shape[1]} new tokens are {shape}, not {wanted}")
        logits.append(got)
    return torch.cat(logits, dim=1)


def _without(model, ids):
    whole = run(model, ids)
    wanted = (*ids.shape, _CFG["vocab_size"])
    if not isinstance(whole, torch.Tensor) or whole.shape != wanted:
        found = tuple(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
        raise CheckFailed(f"logits without a cache are {found}, expected {wanted}")
    return whole


def _same(cls, model, what, ids, lengths, known=""):
    """Fail with the hint `known`, or with what the experiments say, unless both ways agree."""
    whole = _without(model, ids)
    try:
        got = _in_pieces(model, ids, lengths, hint=known)
    except StillOpen:
        raise
    except CheckFailed as failure:
        if known:
            raise
        raise CheckFailed(in_words(str(failure), _experiments(cls))) from failure.__cause__
    _judge(what, got, whole, known or functools.partial(_experiments, cls))


def _judge(what, got, wanted, hint):
    if got.shape != wanted.shape:
        raise CheckFailed(f"{what}: {both_shapes(got, wanted)}")
    if not distance(got, wanted) <= TOLERANCE:
        hint = hint if isinstance(hint, str) else hint()
        failure = f"{what}: {where_apart(got, wanted)}; allowed is {TOLERANCE:g}"
        raise CheckFailed(in_words(failure, hint))


def _two_at_once(model, one, two):
    """Two texts that take turns, each with its own cache."""
    caches = [_new_cache(model, 1, T) for _ in range(2)]
    logits = [[], []]
    for at in range(0, T, 16):
        for number, ids in enumerate((one, two)):
            piece = ids[:, at : at + 16]
            logits[number].append(_in_pieces(model, piece, 16, caches[number], hint=_STATE))
    for ids, pieces in zip((one, two), logits, strict=True):
        _judge("two texts in turn", torch.cat(pieces, dim=1), _without(model, ids), _STATE)


def _after_reset(model, one, two):
    cache = _new_cache(model, 1, T)
    if hasattr(cache, "reset"):
        hint = "reset() must forget the text before: the position goes back to 0"
        _in_pieces(model, one, 16, cache)
        cache.reset()
        got = _in_pieces(model, two, 16, cache, hint=hint)
        _judge("a text after reset()", got, _without(model, two), hint)


def _padded(model):
    """Rows of three lengths, padded at the left: each gives the logits that it gives alone."""
    ids, lengths = _ids(3, 6), (T, 40, 29)
    padding = torch.tensor([T - length for length in lengths])
    for row, empty in enumerate(padding):
        ids[row, :empty] = 0
    other = torch.where(torch.arange(T) < padding[:, None], 7, ids)
    for what, pieces in (("without a cache", None), ("in pieces", (30, 1, 1, 16))):

        def padded(ids, pieces=pieces):
            if pieces is None:
                return run(model, ids, padding=padding)
            return _in_pieces(model, ids, pieces, padding=padding)

        got, with_other = padded(ids), padded(other)
        for row, length in enumerate(lengths):
            text = slice(T - length, T)
            hint = "A row's positions begin after its padding"
            if distance(got[row, text], with_other[row, text]) > TOLERANCE:
                hint = "The padding is seen: hide the keys of the first `padding` slots of a row"
            alone = _without(model, ids[row : row + 1, text])[0]
            _judge(f"row of {length} tokens, padded to {T}, {what}", got[row, text], alone, hint)


# --- experiments: what does the query see? ----------


def _experiments(cls):
    """The likely mistake, found by changing single tokens in a model of one layer.

    In one layer, keys and values depend on their own token and position alone.
    """
    try:
        model = randomised(built(cls, {**_CFG, "n_layers": 1}))
        ids = torch.randperm(_CFG["vocab_size"], generator=seeded(7))[None, :16]  # no token twice
        if distance(_in_pieces(model, ids, (6, 2, 2, 6)), _without(model, ids)) <= TOLERANCE:
            return "One layer alone is right: each layer keeps its own, and the position moves once"
        return _slots(model, ids) or _visible(model, ids) or _kept(model, ids) or _order(model, ids)
    except CheckFailed:
        return ""


def _slots(model, ids):
    """Does the room that is not filled yet matter?"""
    first = [run(model, ids[:, :6], _new_cache(model, 1, room)) for room in (16, 40)]
    if not distance(*first) <= TOLERANCE:
        return "Slots that nobody has filled yet are seen: return the keys up to the new position"
    return ""


def _visible(model, ids):
    """Which of the tokens before and after does the first token of the last of four calls see?"""
    lengths, at = (6, 2, 2, 6), 10
    base = _in_pieces(model, ids, lengths)[0, at]
    seen = []
    for j in range(ids.shape[1]):
        other = ids.clone()
        other[0, j] = (other[0, j] + 1) % _CFG["vocab_size"]
        apart = distance(_in_pieces(model, other, lengths)[0, at], base)
        seen += [j] if apart > 1e-6 else []
    before = [j for j in seen if j < at]
    missing = sorted(set(range(at)) - set(before))
    if max(seen, default=0) > at:
        return "A token sees those after it in the same call: the mask hides them there too"
    if not before:
        return "The tokens of earlier calls are not seen: are they kept, and are they attended to?"
    if before == [0]:
        return (
            "The mask is aligned with the first key (is_causal=True is): the T queries are the "
            "last T of the S tokens"
        )
    if missing and set(missing) <= {5, 7, 9}:
        return "The last token of each call is overwritten by the next: the position is 1 too small"
    if missing:
        return "Earlier tokens are overwritten or lost: write behind them, from the position on"
    return ""


def _kept(model, ids):
    """Are keys and values those that were computed when their token came?"""
    base = _in_pieces(model, ids, (10, 6))
    for name, what in (("key", "keys"), ("value", "values")):
        weights = [p for n, p in model.named_parameters() if name in n.lower()]
        before = [p.clone() for p in weights]
        cache = _new_cache(model, *ids.shape)
        for p in weights:
            p.copy_(p.flip(0))
        run(model, ids[:, :10], cache, state=cache)
        for p, was in zip(weights, before, strict=True):
            p.copy_(was)
        if weights and distance(run(model, ids[:, 10:], cache, state=cache), base[:, 10:]) < 1e-6:
            return f"The {what} of earlier calls are not those that were computed: keep them too"
    return ""


def _order(model, ids):
    """Does the order of earlier tokens matter, of one call and of several?"""

    def swapped(i, j, lengths):
        other = ids.clone()
        other[0, [i, j]] = ids[0, [j, i]]
        apart = _in_pieces(model, other, lengths)[0, 8:] - _in_pieces(model, ids, lengths)[0, 8:]
        return apart.abs().max() > TOLERANCE

    if not swapped(1, 3, (6, *[1] * 10)):
        return (
            "Earlier tokens have no order: turn each key once, by its own position, and keep it "
            "turned"
        )
    if not swapped(6, 7, (6, *[1] * 10)):
        return "Every call begins at the same position: positions go on where the cache ends"
    if not swapped(5, 6, (6, *[1] * 10)):
        return "The first new token gets the position of the last kept one: 1 too small"
    if distance(_in_pieces(model, ids, 16), _without(model, ids)) > TOLERANCE:
        return "With nothing kept yet it differs already: are keys turned before and after keeping?"
    return (
        "All tokens are seen, and in order: is a position left out between two calls, or are kept "
        "keys turned again?"
    )
