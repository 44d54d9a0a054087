"""Twins of next_token: temperature, top-k and top-p."""

import torch

from helpers.checks import check_sampling
from helpers.generate import next_token
from twins.registry import accepted, proves, refused

proves(
    check_sampling,
    next_token,
    "sampling: right, greedy and drawn, with temperature, top-k and top-p, row by row",
)


def argmax(logits):
    return logits.argmax(dim=-1)


def divided(logits, temperature):
    return logits / temperature


def cut_k(logits, k):
    kth = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def cut_p(logits, p, ordered_keep=lambda chances, p: chances.cumsum(-1) - chances < p):
    chances, order = logits.softmax(-1).sort(dim=-1, descending=True)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ordered_keep(chances, p))
    return logits.masked_fill(~kept, -torch.inf)


def draw(logits, generator):
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def sampler(greedy=argmax, divide=divided, top_k=cut_k, top_p=cut_p, draw=draw):
    """A right next_token in five steps; a twin does one of them wrong."""
    cut_k, cut_p = top_k, top_p

    def next_one(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
        if temperature == 0:
            return greedy(logits)
        logits = divide(logits.float(), temperature)
        if top_k is not None:
            logits = cut_k(logits, top_k)
        if top_p is not None:
            logits = cut_p(logits, top_p)
        return draw(logits, generator)

    return next_one


accepted(check_sampling)(sampler())


@accepted(check_sampling)
def sorted_once(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    """Everything happens in the sorted list; the token is looked up at the end."""
    if temperature == 0:
        return torch.argmax(logits, -1)
    logits, order = torch.sort(logits.float(), descending=True)
    if top_k:
        logits[:, top_k:] = -float("inf")
    p = torch.softmax((logits / temperature).double(), -1)
    if top_p:
        p[p.cumsum(-1) - p >= top_p] = 0
    return order.gather(1, torch.multinomial(p, 1, generator=generator)).squeeze(1)


@accepted(check_sampling)
def by_gumbel_noise(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    """The largest of logits plus Gumbel noise is a draw from the softmax (Gumbel-max trick)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    if top_k:
        worse = (logits[:, None, :] > logits[:, :, None]).sum(-1)  # how many are larger
        logits = logits.masked_fill(worse >= top_k, -torch.inf)
    if top_p:
        p = logits.softmax(-1)
        larger = torch.where(p[:, None, :] > p[:, :, None], p[:, None, :], 0).sum(-1)
        logits = logits.masked_fill(larger >= top_p, -torch.inf)
    uniform = torch.rand(logits.shape, generator=generator, dtype=logits.dtype)
    return (logits - (-uniform.log()).log()).argmax(-1)


@accepted(check_sampling)
def row_by_row(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    """One row at a time, with the place of a uniform number in the cumulative sum."""
    tokens = []
    uniform = torch.rand(len(logits), generator=generator)
    for row, place in zip(logits.float(), uniform, strict=True):
        if temperature == 0:
            tokens.append(int(row.argmax()))
            continue
        p, order = torch.softmax(row / temperature, 0).sort(descending=True)
        p = p[: top_k or len(p)]
        p = p / p.sum()
        if top_p is not None:
            needed = int((p.cumsum(0) < top_p).sum()) + 1
            p = p[:needed] / p[:needed].sum()
        tokens.append(int(order[torch.searchsorted(p.cumsum(0), place).clamp(max=len(p) - 1)]))
    return torch.tensor(tokens)


# --- wrong ones ----------


def of_sorted(logits, generator):
    return torch.multinomial(
        logits.sort(descending=True).values.softmax(-1), 1, generator=generator
    )[:, 0]


def scaled_twice(logits, generator):
    return draw(logits.softmax(-1), generator)


def over_rows(logits, generator):
    return torch.multinomial(logits.softmax(0), 1, generator=generator)[:, 0]


def uniform(logits, generator):
    return torch.multinomial((logits > -torch.inf).float(), 1, generator=generator)[:, 0]


def once_for_all(logits, generator):
    return draw(logits[:1], generator).expand(len(logits))


def of_the_largest(logits, generator):
    return torch.topk(logits, 1).indices[:, 0]


def by_exp(logits, generator):
    return torch.multinomial(logits.exp(), 1, generator=generator)[:, 0]


def seeded_inside(logits, generator):
    return draw(logits, torch.Generator().manual_seed(0))


def not_the_generators(logits, generator):
    return draw(logits, None)


def kth_of(which):
    def cut(logits, k):
        largest = logits.topk(min(k, logits.shape[-1])).values
        return logits.masked_fill(logits < which(logits, largest, k), -torch.inf)

    return cut


def cut_k_too_hard(logits, k):
    kth = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits <= kth, -torch.inf) if k > 1 else cut_k(logits, k)


def distinct_values(logits, k):
    kth = torch.stack([row.unique().flip(0)[:k][-1:] for row in logits])
    return logits.masked_fill(logits < kth, -torch.inf)


def smallest(logits, k):
    kth = (-logits).topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(-logits < kth, -torch.inf)


def kept_in_order(logits, p):
    chances = logits.softmax(-1).sort(dim=-1, descending=True).values
    return logits.masked_fill(chances.cumsum(-1) - chances >= p, -torch.inf)


def from_below(logits, p):
    chances, order = logits.softmax(-1).sort(dim=-1)
    kept = torch.zeros_like(logits).scatter(-1, order, (chances.cumsum(-1) - chances < p).float())
    return logits.masked_fill(kept == 0, -torch.inf)


def keeping(rule):
    return lambda logits, p: cut_p(logits, p, rule)


def drops_the_crossing(chances, p):
    kept = chances.cumsum(-1) <= p
    kept[:, 0] = True
    return kept


def one_more(chances, p):
    return (chances.cumsum(-1) - chances).roll(1, dims=-1).index_fill(-1, torch.tensor([0]), 0) < p


def masked_to(value):
    return lambda logits, k: logits.masked_fill(cut_k(logits, k) == -torch.inf, value)


WRONG = {
    "draws_at_0": (
        sampler(greedy=lambda logits: draw(logits, None)),
        "At temperature 0 take the argmax of each row",
    ),
    "divides_by_0": (
        sampler(greedy=lambda logits: draw(logits / 0.0, None)),
        "before anything is divided or drawn",
    ),
    "argmax_over_rows": (sampler(greedy=lambda z: z.argmax(0)), "One token for each row"),
    "a_column": (sampler(greedy=lambda z: z.argmax(-1, keepdim=True)), "Drop the last axis"),
    "squeezed": (sampler(greedy=lambda z: z.argmax(-1).squeeze()), "One token for each row"),
    "floats": (sampler(greedy=lambda z: z.argmax(-1).float()), "ids are whole numbers"),
    "lists": (sampler(greedy=lambda z: z.argmax(-1).tolist()), "a tensor of ids, got list"),
    "the_logit_itself": (
        sampler(greedy=lambda z: (z.amax(-1) * 9).long()),
        "outside the vocabulary",
    ),
    "temperature_ignored": (sampler(divide=lambda z, t: z), "The temperature is not used"),
    "temperature_multiplies": (sampler(divide=lambda z, t: z * t), "The temperature multiplies"),
    "softmax_over_rows": (sampler(draw=over_rows), "The softmax runs over the rows of the batch"),
    "softmax_twice": (sampler(draw=scaled_twice), "The softmax is taken twice"),
    "always_greedy": (sampler(draw=of_the_largest), "It takes the likeliest token"),
    "draws_uniformly": (sampler(draw=uniform), "are equally likely here"),
    "returns_places": (sampler(draw=of_sorted), "These are places in the sorted list"),
    "one_draw_for_all": (sampler(draw=once_for_all), "Draw for each row anew"),
    "overflows": (sampler(draw=by_exp), "exp overflows"),
    "generator_ignored": (sampler(draw=not_the_generators), "hand the generator to"),
    "seeded_in_each_call": (sampler(draw=seeded_inside), "is something seeded in each call?"),
    "k_ignored": (sampler(top_k=lambda z, k: z), "top_k is not used"),
    "k_minus_1": (sampler(top_k=cut_k_too_hard), "the k-th belongs to the k"),
    "k_plus_1": (sampler(top_k=lambda z, k: cut_k(z, k + 1)), "top_k counts from 1"),
    "k_of_the_lowest_row": (
        sampler(top_k=kth_of(lambda z, largest, k: largest[:, -1].min())),
        "top_k takes its threshold from another row",
    ),
    "k_of_the_whole_batch": (
        sampler(top_k=kth_of(lambda z, largest, k: z.flatten().topk(k).values[-1])),
        "Each has its own k-th logit",
    ),
    "k_of_the_last_row": (
        sampler(top_k=kth_of(lambda z, largest, k: largest[-1, -1])),
        "Each has its own k-th logit",
    ),
    "k_above_the_vocabulary": (
        sampler(top_k=lambda z, k: z.masked_fill(z < z.topk(k).values[:, -1:], -torch.inf)),
        "A top_k above the vocabulary keeps all",
    ),
    "k_smallest": (sampler(top_k=smallest), "The least likely tokens are kept"),
    "k_different_values": (sampler(top_k=distinct_values), "top_k counts tokens, also equal ones"),
    "ties_all_cut": (
        sampler(
            top_k=lambda z, k: (
                cut_k(z, k)
                if (z == z[:, :1]).all() or (z.topk(min(k, 8)).values[:, -1:] == z).sum() <= len(z)
                else z * float("nan")
            )
        ),
        "Equal logits: keep those that are at least the k-th",
    ),
    "cut_to_0": (sampler(top_k=masked_to(0.0)), "which is a logit like others: -inf"),
    "cut_to_minus_10": (sampler(top_k=masked_to(-10.0)), "was cut and is still drawn"),
    "p_ignored": (sampler(top_p=lambda z, p: z), "top_p is not used"),
    "p_drops_the_crossing": (
        sampler(top_p=keeping(drops_the_crossing)),
        "The token that crosses top_p is dropped",
    ),
    "p_keeps_nothing": (
        sampler(top_p=keeping(lambda chances, p: chances.cumsum(-1) <= p)),
        "The token that crosses top_p is dropped",
    ),
    "p_keeps_one_more": (sampler(top_p=keeping(one_more)), "stop with the one that reaches top_p"),
    "p_the_other_way": (sampler(top_p=lambda z, p: cut_p(z, 1 - p)), "adds up to 1 - top_p"),
    "p_unsorted": (sampler(top_p=kept_in_order), "scatter it back"),
    "p_from_below": (sampler(top_p=from_below), "sort descending"),
}
for name, (function, hint) in WRONG.items():
    function.__name__ = name
    refused(check_sampling, hint)(function)


@refused(check_sampling, "top_p is taken before the temperature")
def p_before_temperature(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    if temperature and top_p is not None:
        logits = cut_p(logits, top_p)
    return sampler()(logits, temperature, top_k, None, generator)


@refused(check_sampling, "top_p adds up all probabilities: after top_k")
def p_before_k(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_p is not None:
        logits = cut_p(logits, top_p)
    return sampler()(logits, 1.0, top_k, None, generator)


@refused(check_sampling, "your code changes its input")
def in_place(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    if temperature:
        logits /= temperature
    return sampler()(logits, min(temperature, 1.0), top_k, top_p, generator)


@refused(check_sampling, "compute in logits.float()")
def through_numpy(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    return sampler()(torch.tensor(logits.numpy()), temperature, top_k, top_p, generator)


@refused(check_sampling, "Sums in bfloat16 lose their small terms")
def sums_in_bfloat16(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(-1)
    ordered, order = (logits / temperature).sort(dim=-1, descending=True)
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    if top_p is not None:
        chances = ordered.softmax(-1)
        ordered = ordered.masked_fill(chances.cumsum(-1) - chances >= top_p, -torch.inf)
    place = torch.multinomial(ordered.float().softmax(-1), 1, generator=generator)
    return order.gather(-1, place)[:, 0]
