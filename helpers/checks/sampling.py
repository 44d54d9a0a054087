"""Proof of sampling: greedy, temperature, top-k and top-p, by the frequencies of many draws."""

import torch
from torch.nn.functional import one_hot

from helpers.checks.judging import CheckFailed, both_shapes, in_words, judge, proof, run, seeded

DRAWS = 5000  # of each row
TOLERANCE = 0.035  # five standard errors of a frequency, at most 0.5 / sqrt(5000) = 0.0071
_LOGITS = torch.tensor(
    [
        [0.02, 0.31, 0.05, 0.21, 0.15, 0.08, 0.12, 0.06],
        [0.19, 0.03, 0.14, 0.09, 0.17, 0.12, 0.11, 0.15],
    ]
).log() + torch.tensor([[-3.0], [6.0]])  # two rows, far apart: a row's threshold fits no other
_CASES = (  # temperature, top_k, top_p
    (0.5, None, None),
    (2.0, None, None),
    (1.0, None, None),
    (1.0, 3, None),
    (1.0, None, 0.7),
    (2.0, None, 0.7),
    (1.5, 5, 0.6),
    (0.7, 1, None),
    (1.0, 100, None),
    (1.0, None, 1.0),
    (1.0, None, 1e-6),
)
_GREEDY = "At temperature 0 take the argmax of each row, before anything is divided or drawn"


@proof
def check_sampling(fn):
    """next_token(logits, temperature, top_k, top_p, generator): (B, V) -> (B,) ids.

    The frequencies of its draws are compared with the probabilities of the formula, computed in
    float64: softmax(logits / temperature), cut to the top_k likeliest tokens, and of these to the
    fewest that add up to top_p.
    """
    for settings in ((0.0, None, None), (0.0, 3, 0.5)):
        for logits in (_LOGITS, _LOGITS[:1]):
            ids = _ids(run(fn, logits, *settings, seeded(0), hint=_GREEDY), logits)
            if not torch.equal(ids, logits.argmax(-1)):
                got, best = ids.tolist(), logits.argmax(-1).tolist()
                raise CheckFailed(f"temperature 0: tokens {got} instead of {best}. {_GREEDY}")
    for case in _CASES:
        _compare(fn, _LOGITS, *case)
    _compare_ties(fn)
    _draws_are_the_generators(fn)
    steep = run(fn, 20 * _LOGITS, 0.01, None, None, seeded(0), hint="exp overflows: torch.softmax")
    if not torch.equal(_ids(steep, _LOGITS), _LOGITS.argmax(-1)):
        raise CheckFailed("logits of several thousand: not the likeliest. Is there an overflow?")
    hint = "Models also give bfloat16: compute in logits.float()"
    _ids(run(fn, _LOGITS.bfloat16(), 1.0, 3, 0.7, seeded(0), hint=hint), _LOGITS)
    close = ((255 - torch.arange(512)) * 2**-14).bfloat16().expand(6000, 512)  # all of them differ
    kept = _ids(run(fn, close, 1.0, None, 0.7, seeded(0), hint=hint), close).unique().numel()
    wanted = (close[0].double().softmax(-1).cumsum(-1) < 0.7).sum().item() + 1
    if kept != wanted:
        raise CheckFailed(
            f"top_p 0.7 of 512 close logits in bfloat16: {kept} tokens are drawn, not {wanted}. "
            "Sums in bfloat16 lose their small terms: compute in logits.float()"
        )
    print("sampling: right, greedy and drawn, with temperature, top-k and top-p, row by row")


def _ids(got, logits):
    """What came back, which must be one id for each row."""
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(f"expected a tensor of ids, got {type(got).__name__}")
    wanted = logits[:, 0]
    if got.shape != wanted.shape:
        extra = "Drop the last axis: [:, 0]" if got.shape == (*wanted.shape, 1) else ""
        raise CheckFailed(in_words(both_shapes(got, wanted), extra or "One token for each row"))
    if got.is_floating_point() or got.is_complex() or got.dtype == torch.bool:
        raise CheckFailed(f"ids are whole numbers, and these are {got.dtype}")
    if got.min() < 0 or got.max() >= logits.shape[1]:
        raise CheckFailed(f"a token is outside the vocabulary of 0 to {logits.shape[1] - 1}")
    return got


def _settings(temperature, top_k, top_p):
    given = (("temperature", temperature), ("top_k", top_k), ("top_p", top_p))
    return ", ".join(f"{name} {value:g}" for name, value in given if value is not None)


def _compare(fn, logits, temperature, top_k, top_p):
    case, R = _settings(temperature, top_k, top_p), len(logits)
    hint = ""
    if top_k is not None:
        hint = "Is a whole row cut away? Each has its own k-th logit, topk(k).values[:, -1:]"
    if top_k is not None and top_k > logits.shape[1]:
        hint = "A top_k above the vocabulary keeps all: min(top_k, V)"
    if top_p is not None:
        hint = "Is a whole row cut away? The likeliest token always stays"
    many = logits.repeat(DRAWS, 1)  # (DRAWS * R, V), the rows in turn
    ids = _ids(run(fn, many, temperature, top_k, top_p, seeded(1), hint=hint), many)
    ids = ids.reshape(DRAWS, R)
    got = one_hot(ids.long(), logits.shape[1]).float().mean(dim=0)  # (R, V)
    wanted = probabilities(logits, temperature, top_k, top_p)
    if (got.amax(-1) == 1).all() and not torch.equal(ids[0], logits.argmax(-1)):
        raise CheckFailed(f"{case}: all rows of one kind got one token. Draw for each row anew")
    what = f"frequencies of {DRAWS:,} draws, {case}"
    judge(
        what, got, wanted, TOLERANCE, lambda: _mistakes(logits.double(), temperature, top_k, top_p)
    )
    never = (wanted == 0) & (got > 0)
    if never.any():
        row, token = never.nonzero()[0].tolist()
        raise CheckFailed(
            f"{case}: token {token} of row {row} was cut and is still drawn. Cut with -inf"
        )


def probabilities(logits, temperature, top_k=None, top_p=None):
    """The formula in float64: (R, V) logits -> (R, V) probabilities."""
    p = torch.softmax(logits.double() / temperature, dim=-1)
    if top_k is not None:
        p = _likeliest(p, top_k)
    return p if top_p is None else _likeliest(p, _needed(p, top_p))


def _ranks(p):
    return p.argsort(dim=-1, descending=True).argsort(dim=-1)


def _likeliest(p, number):
    """Only the `number` likeliest tokens of each row, an int or (R, 1)."""
    return _normalised(p * (_ranks(p) < number))


def _normalised(weights):
    return weights / weights.sum(dim=-1, keepdim=True)


def _needed(p, top_p):
    """How many of the likeliest tokens add up to top_p: (R, 1)."""
    ordered = p.sort(dim=-1, descending=True).values
    return (ordered.cumsum(-1) - ordered < top_p - 1e-9).sum(-1, keepdim=True)


def _mistakes(logits, temperature, top_k, top_p):
    full = torch.softmax(logits / temperature, dim=-1)
    right = probabilities(logits, temperature, top_k, top_p)
    kept = right > 0
    V = logits.shape[1]
    found = {
        "The temperature is not used: divide the logits by it": (
            probabilities(logits, 1.0, top_k, top_p)
        ),
        "The temperature multiplies: divide the logits by it": (
            probabilities(logits, 1 / temperature, top_k, top_p)
        ),
        "The softmax runs over the rows of the batch: it runs over the vocabulary, dim=-1": (
            _normalised(torch.softmax(logits / temperature, dim=0))
        ),
        "The softmax is taken twice": torch.softmax(full, -1),
        "It takes the likeliest token: above temperature 0 it is drawn, torch.multinomial": (
            one_hot(logits.argmax(-1), V).double()
        ),
        "All tokens that are kept are equally likely here: draw by their probabilities": (
            _normalised(kept.double())
        ),
        "These are places in the sorted list, not tokens: look up the token, gather": (
            right.sort(dim=-1, descending=True).values
        ),
    }
    number = kept.sum(-1, keepdim=True)
    if top_k is not None or top_p is not None:
        found |= {
            "The logits of the tokens that are cut become 0, which is a logit like others: -inf": [
                torch.softmax(torch.where(kept, logits / temperature, 0), -1),
                torch.softmax(torch.where(kept, logits, 0) / temperature, -1),
            ],
            "The cut was made in the sorted list and used in the unsorted: scatter it back": (
                _normalised(full * (torch.arange(V) < number))
            ),
        }
    if top_k is not None and top_p is None:
        found |= {
            "top_k is not used": full,
            "One token too few is kept: the k-th belongs to the k": (
                _likeliest(full, max(top_k - 1, 1))
            ),
            "One token too many is kept: top_k counts from 1": (_likeliest(full, top_k + 1)),
            "top_k takes its threshold from another row: each row has its own, [:, -1:]": (
                torch.stack([right[0], full[1]])
            ),
            "The least likely tokens are kept: take the largest logits": _likeliest(-full, top_k),
        }
    if top_k is not None and top_p is not None:
        found["top_p adds up all probabilities: after top_k, those of the kept add up to 1"] = (
            _likeliest(full, _needed(full, top_p).clamp(max=top_k))
        )
    if top_p is not None:
        found |= {
            "top_p is not used": probabilities(logits, temperature, top_k, None),
            "The token that crosses top_p is dropped: it is needed to reach the sum": (
                _likeliest(full, (number - 1).clamp(min=1))
            ),
            "One token too many is kept: stop with the one that reaches top_p": (
                _likeliest(full, number + 1)
            ),
            "top_p is taken before the temperature: divide first, then cut": (
                _likeliest(full, _needed(torch.softmax(logits, -1), top_p))
            ),
            "It keeps what adds up to 1 - top_p": _likeliest(full, _needed(full, 1 - top_p)),
            "The least likely tokens add up to top_p here: sort descending": (
                _normalised(full * _from_below(full, top_p))
            ),
        }
    return found


def _from_below(p, top_p):
    """The tokens that are kept when the sum begins with the least likely."""
    ordered, order = p.sort(dim=-1)
    kept = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _compare_ties(fn):
    """Two equal logits are two tokens; at the border either of them may stay."""
    hint = "Equal logits: keep those that are at least the k-th"
    for logits, most in (([2.0, 2.0, 1.0, 0.0], 1), ([2.0, 1.0, 1.0, 0.0], 2)):
        many = torch.tensor([logits]).repeat(500, 1)
        ids = _ids(run(fn, many, 1.0, 2, None, seeded(2), hint=hint), many)
        if ids.max() > most:
            raise CheckFailed(
                f"logits {logits}, top_k 2: token {ids.max()} is drawn. top_k counts tokens, also "
                "equal ones, and not different logits"
            )


def _draws_are_the_generators(fn):
    """The same seed gives the same draws, and a generator goes on from call to call."""
    flat = torch.zeros(64, 8)
    first, again = (run(fn, flat, 1.0, None, None, seeded(3)) for _ in range(2))
    if not torch.equal(first, again):
        raise CheckFailed(
            "two generators with one seed give different draws: hand the generator to "
            "torch.multinomial, or to what else draws"
        )
    generator = seeded(3)
    pairs = [[run(fn, flat, 1.0, None, None, generator) for _ in range(2)]]
    pairs += [[run(fn, flat, 1.0) for _ in range(2)]]
    if any(torch.equal(*pair) for pair in pairs):
        raise CheckFailed("two calls give the same 64 draws: is something seeded in each call?")
