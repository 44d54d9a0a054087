"""Twins of causal attention, plain and rotated, and of grouped-query attention."""

import torch
from torch import nn
from torch.nn import functional as F

from helpers.attention import GroupedQueryAttention, MultiHeadAttention
from helpers.checks import check_causal_attention, check_gqa
from twins.positions import book_tables, rope_by_complex_numbers, rotation_of_meta
from twins.registry import accepted, proves, refused

PLAIN = "causal attention: right, in float32 and bfloat16"  # without cos and sin
proves(check_causal_attention, MultiHeadAttention, f"{PLAIN}, plain and rotated")


def turn(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """A right attention in steps; a twin does one of them wrong."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        future = torch.triu(torch.ones(context_length, context_length), diagonal=1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        q, k, v = self.project(x)
        q, k, v = (self.split(t) for t in (q, k, v))
        if cos is not None:
            q, k, v = self.rotate(q, k, v, cos, sin)
        scores = self.scores(q, k)
        return self.out(self.merge(self.dropped(self.weights(scores, self.hidden(scores))) @ v))

    def project(self, x):
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)

    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), turn(k, cos, sin), v

    def scores(self, q, k):
        return q @ k.transpose(2, 3) / self.head_dim**0.5

    def hidden(self, scores):
        T = scores.shape[-1]
        return self.future.bool()[:T, :T]

    def weights(self, scores, hidden):
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)

    def dropped(self, weights):
        return self.dropout(weights)

    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.transpose(1, 2).contiguous().view(B, T, H * E)

    def out(self, merged):
        return self.out_proj(merged)


accepted(check_causal_attention)(Attention)


@accepted(check_causal_attention, PLAIN)
class BookAttention(Attention):
    def forward(self, x):
        b, num_tokens, _ = x.shape
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        keys = keys.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        queries = queries.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = values.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        mask_bool = self.future.bool()[:num_tokens, :num_tokens]
        attn_scores.masked_fill_(mask_bool, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)
        context_vec = (attn_weights @ values).transpose(1, 2)
        return self.out_proj(context_vec.reshape(b, num_tokens, -1))


@accepted(check_causal_attention)
class FusedAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads, self.p = num_heads, dropout
        self.out_proj = nn.Linear(d_out, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        projected = (w(x) for w in (self.W_query, self.W_key, self.W_value))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in projected)
        if cos is not None:
            q, k = rope_by_complex_numbers(q, cos, sin), rope_by_complex_numbers(k, cos, sin)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


@accepted(check_causal_attention)
class AttentionByEinsum(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.num_heads, self.head_dim) for t in self.project(x))
        if cos is not None:  # (T, 1, E), since the tokens come first here
            q, k = turn(q, cos[:, None], sin[:, None]), turn(k, cos[:, None], sin[:, None])
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * self.head_dim**-0.5
        scores = scores - 1e9 * self.future[:T, :T].to(scores.dtype)
        mixed = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v)
        return self.out_proj(mixed.reshape(B, T, -1))


@accepted(check_causal_attention)
class AttentionInALoop(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        heads = []
        for h in range(self.num_heads):
            part = slice(h * self.head_dim, (h + 1) * self.head_dim)
            q, k, v = (t[..., part] for t in self.project(x))
            if cos is not None:
                q, k = turn(q, cos, sin), turn(k, cos, sin)
            rows = []
            for t in range(x.shape[1]):  # each token looks back
                weights = torch.softmax(q[:, t, None] @ k[:, : t + 1].mT / self.head_dim**0.5, -1)
                rows.append(weights @ v[:, : t + 1])
            heads.append(torch.cat(rows, dim=1))
        return self.out_proj(torch.cat(heads, dim=-1))


@refused(check_causal_attention, "the causal mask is missing")
class SeesTheFuture(Attention):
    def weights(self, scores, hidden):
        return scores.softmax(-1)


@refused(check_causal_attention, "x comes back as it is")
class AttentionUnchanged(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        return x


@refused(check_causal_attention, "is a mask or a shape kept from the call before?")
class MaskOfTheFirstCall(Attention):
    kept = None

    def hidden(self, scores):
        if self.kept is None:
            self.kept = super().hidden(scores)
        return self.kept


@refused(check_causal_attention, "begins one diagonal too late")
class SeesTheNextToken(Attention):
    def hidden(self, scores):
        return torch.ones_like(scores[0, 0], dtype=torch.bool).triu(diagonal=2)


@refused(check_causal_attention, "A token does not see itself")
class DoesNotSeeItself(Attention):
    def hidden(self, scores):
        return torch.triu(torch.ones_like(scores[0, 0])).bool()


@refused(check_causal_attention, "The past is hidden instead of the future")
class HidesThePast(Attention):
    def hidden(self, scores):
        return torch.ones_like(scores[0, 0]).tril(-1).bool()


@refused(check_causal_attention, "the mask is the wrong way round")
class TrilOfVisibleAsHidden(Attention):
    def hidden(self, scores):
        return torch.tril(torch.ones_like(scores[0, 0])).bool()


@refused(check_causal_attention, "the mask is the wrong way round")
class MaskInverted(Attention):
    def hidden(self, scores):
        return ~super().hidden(scores)


@refused(check_causal_attention, "is the mask cut to (T, T)?")
class MaskNotCut(Attention):
    def hidden(self, scores):
        return self.future.bool()


@refused(check_causal_attention, "The scores are not scaled")
class NotScaled(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3)


@refused(check_causal_attention, "The scores are divided by sqrt(d_out)")
class ScaledByTheWidth(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / (self.num_heads * self.head_dim) ** 0.5


@refused(check_causal_attention, "The scores are divided by the head size")
class ScaledWithoutRoot(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / self.head_dim


@refused(check_causal_attention, "The scores are multiplied by sqrt(head size)")
class ScaledUp(Attention):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) * self.head_dim**0.5


@refused(check_causal_attention, "The softmax runs over the queries")
class SoftmaxOverQueries(Attention):
    def weights(self, scores, hidden):
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=2)


@refused(check_causal_attention, "The softmax runs over the heads")
class SoftmaxOverHeads(Attention):
    def weights(self, scores, hidden):
        return torch.nan_to_num(scores.masked_fill(hidden, -torch.inf).softmax(dim=1))


@refused(check_causal_attention, "The softmax runs over the heads")
class SoftmaxOverHeadsWithNaN(Attention):
    def weights(self, scores, hidden):
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=1)


@refused(check_causal_attention, "The softmax is missing")
class NoSoftmax(Attention):
    def weights(self, scores, hidden):
        return scores.masked_fill(hidden, 0)


@refused(check_causal_attention, "Masked scores are 0")
class ScoresTimesMask(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores * ~hidden, dim=-1)


@refused(check_causal_attention, "Masked scores are 0")
class FilledWithNearlyNothing(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores.masked_fill(hidden, 1e-9), dim=-1)


@refused(check_causal_attention, "The mask comes after the softmax")
class MaskAfterSoftmax(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores, dim=-1) * ~hidden


@refused(check_causal_attention, "give different results in eval mode: dropout is still on")
class DropoutAlwaysOn(Attention):
    def dropped(self, weights):
        return F.dropout(weights, self.dropout.p)


@refused(check_causal_attention, "give different results in eval mode: dropout is still on")
class FusedDropoutAlwaysOn(FusedAttention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        self.training = True
        return super().forward(x, mask, cos, sin, cache)


@refused(check_causal_attention, "Queries and keys are exchanged")
class QueriesKeysExchanged(Attention):
    def project(self, x):
        return self.W_key(x), self.W_query(x), self.W_value(x)


@refused(check_causal_attention, "Keys and values are exchanged")
class KeysValuesExchanged(Attention):
    def project(self, x):
        return self.W_query(x), self.W_value(x), self.W_key(x)


@refused(check_causal_attention, "Queries and values are exchanged")
class QueriesValuesExchanged(Attention):
    def project(self, x):
        return self.W_value(x), self.W_key(x), self.W_query(x)


@refused(check_causal_attention, "W_query makes the keys too")
class KeysFromWQuery(Attention):
    def project(self, x):
        return self.W_query(x), self.W_query(x), self.W_value(x)


@refused(check_causal_attention, "W_key makes the queries too")
class QueriesFromWKey(Attention):
    def project(self, x):
        return self.W_key(x), self.W_key(x), self.W_value(x)


@refused(check_causal_attention, "W_key makes the values too")
class ValuesFromWKey(Attention):
    def project(self, x):
        return self.W_query(x), self.W_key(x), self.W_key(x)


@refused(check_causal_attention, "The biases of the projections are not used")
class BiasesIgnored(Attention):
    def project(self, x):
        return [x @ w.weight.T for w in (self.W_query, self.W_key, self.W_value)]


@refused(check_causal_attention, "needs a parameter 'W_query.bias'")
class QkvBiasIgnored(Attention):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__(d_in, d_out, context_length, dropout, num_heads)


@refused(
    check_causal_attention, "'W_query.bias' too many. Biases only where qkv_bias asks for them"
)
class AlwaysBiased(Attention):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__(d_in, d_out, context_length, dropout, num_heads, True)


@refused(check_causal_attention, "'mask' too many")
class MaskIsAParameter(Attention):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__(d_in, d_out, context_length, dropout, num_heads, qkv_bias)
        self.mask = nn.Parameter(torch.ones(context_length, context_length).triu(1))


@refused(check_causal_attention, "The heads were not transposed before they were merged")
class MergedWithoutTranspose(Attention):
    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.reshape(B, T, H * E)


@refused(check_causal_attention, "The heads are not put side by side")
class NotMerged(Attention):
    def merge(self, heads):
        return heads.transpose(1, 2)

    def out(self, merged):
        return merged


@refused(check_causal_attention, "Tokens and heads are mixed")
class ViewedStraightIntoHeads(Attention):
    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, self.num_heads, T, self.head_dim)


@refused(check_causal_attention, "Tokens and heads are mixed")
class ViewedThereAndBack(ViewedStraightIntoHeads):
    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.reshape(B, T, H * E)


@refused(check_causal_attention, "Tokens and heads are mixed")
class FusedWithoutTranspose(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.num_heads, self.head_dim) for t in self.project(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.reshape(B, T, -1))


@refused(check_causal_attention, "view(B, T, H, E), then transpose(1, 2)")
class TransposeForgotten(Attention):
    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.head_dim)


@refused(check_causal_attention, "All heads look as one")
class OneHead(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        q, k, v = self.project(x)
        scores = q @ k.mT / k.shape[-1] ** 0.5
        return self.out_proj(
            self.weights(scores, self.future.bool()[: x.shape[1], : x.shape[1]]) @ v
        )


@refused(check_causal_attention, "All heads look as one")
class OneHeadOtherScale(Attention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        q, k, v = self.project(x)
        scores = q @ k.mT / self.head_dim**0.5
        return self.out_proj(
            self.weights(scores, self.future.bool()[: x.shape[1], : x.shape[1]]) @ v
        )


@refused(check_causal_attention, "out_proj is missing")
class NoOutProj(Attention):
    def out(self, merged):
        return merged


@refused(check_causal_attention, "needs a parameter 'out_proj.weight'")
class OutProjNeverMade(BookAttention):
    def __init__(self, *args):
        super().__init__(*args)
        self.out_proj = nn.Identity()


@refused(check_causal_attention, "but nothing is rotated")
class CosSinIgnored(Attention):
    def rotate(self, q, k, v, cos, sin):
        return q, k, v


@refused(check_causal_attention, "The values are rotated too")
class ValuesRotated(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), turn(k, cos, sin), turn(v, cos, sin)


@refused(check_causal_attention, "Only the queries are rotated")
class OnlyQueriesRotated(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), k, v


@refused(check_causal_attention, "Only the keys are rotated")
class OnlyKeysRotated(Attention):
    def rotate(self, q, k, v, cos, sin):
        return q, turn(k, cos, sin), v


@refused(check_causal_attention, "It turns backwards")
class RotatedBackwards(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, -sin), turn(k, cos, -sin), v


@refused(check_causal_attention, "or cos and sin are exchanged")
class SinCosExchanged(Attention):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, sin, cos), turn(k, sin, cos), v


@refused(check_causal_attention, "Neighbours are paired (interleaved)")
class RotatedAsByMeta(Attention):
    def rotate(self, q, k, v, cos, sin):
        return rotation_of_meta(q, cos, sin), rotation_of_meta(k, cos, sin), v


@refused(check_causal_attention, "or each head as a whole: the angle follows the token")
class RotatedBeforeTranspose(Attention):
    def rotate(self, q, k, v, cos, sin):
        H = self.num_heads
        q, k = (turn(t.transpose(1, 2), cos[:H], sin[:H]).transpose(1, 2) for t in (q, k))
        return q, k, v


@refused(check_causal_attention, "The given cos and sin are not used")
class OwnTables(Attention):
    def rotate(self, q, k, v, cos, sin):
        cos, sin = book_tables(self.head_dim, 10_000, q.shape[2])
        return turn(q, cos, sin), turn(k, cos, sin), v


@refused(check_causal_attention, "bfloat16 went in and float32 came out")
class AttentionNotCastBack(Attention):
    def out(self, merged):
        return super().out(merged).float()


@refused(check_causal_attention, "Cast the softmax, or what was rotated, back to x.dtype")
class RotatedNotCastBack(FusedAttention):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        if cos is None:
            return super().forward(x)
        projected = (w(x) for w in (self.W_query, self.W_key, self.W_value))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in projected)
        q, k = turn(q.float(), cos, sin), turn(k.float(), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


@refused(check_causal_attention, "Cast the softmax, or what was rotated, back to x.dtype")
class SoftmaxNotCastBack(Attention):
    def weights(self, scores, hidden):
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1, dtype=torch.float32)


@refused(check_causal_attention, "In float32 it is right, so something is rounded too much")
class CoarseScoresInBfloat16(Attention):
    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores if scores.dtype == torch.float32 else scores.round()


@refused(check_causal_attention, "your code changes its input")
class InputScaledInPlace(Attention):
    def project(self, x):
        x *= 1.5
        return super().project(x)


# --- grouped-query attention ----------


proves(
    check_gqa,
    GroupedQueryAttention,
    "grouped-query attention: right, from multi-head to multi-query, in float32 and bfloat16",
)


@accepted(check_gqa)
class Grouped(nn.Module):
    """A right grouped-query attention in steps; a twin does one of them wrong."""

    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__()
        assert d_out % num_heads == 0 and num_heads % num_kv_groups == 0
        self.num_heads, self.num_kv_groups = num_heads, num_kv_groups
        self.head_dim = d_out // num_heads
        width = num_kv_groups * self.head_dim
        self.W_key = nn.Linear(d_in, width, bias=False, dtype=dtype)
        self.W_value = nn.Linear(d_in, width, bias=False, dtype=dtype)
        self.out_proj = nn.Linear(d_out, d_out, bias=False, dtype=dtype)
        self.W_query = nn.Linear(d_in, d_out, bias=False, dtype=dtype)

    def forward(self, x, mask, cos, sin):
        q, k, v = self.project(x)
        q, k, v = self.rotate(q, k, v, cos, sin)
        k, v = self.widen(k, v)
        weights = torch.softmax(self.masked(self.scores(q, k), mask), dim=-1)
        return self.out_proj(self.merge(weights @ v))

    def project(self, x):
        return (
            self.split(self.W_query(x), self.num_heads),
            self.split(self.W_key(x), self.num_kv_groups),
            self.split(self.W_value(x), self.num_kv_groups),
        )

    def split(self, x, heads):
        B, T, _ = x.shape
        return x.view(B, T, heads, self.head_dim).transpose(1, 2)

    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), turn(k, cos, sin), v

    def widen(self, k, v):
        share = self.num_heads // self.num_kv_groups
        return k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)

    def scores(self, q, k):
        return q @ k.transpose(2, 3) / self.head_dim**0.5

    def masked(self, scores, mask):
        return scores.masked_fill(mask, -torch.inf)

    def merge(self, heads):
        return heads.transpose(1, 2).flatten(2)


@accepted(check_gqa)
class GroupedByPyTorch(Grouped):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        q, k, v = self.project(x)
        if cos is not None:
            q, k = rope_by_complex_numbers(q, cos, sin), rope_by_complex_numbers(k, cos, sin)
        seen = None if mask is None else ~mask
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=mask is None, enable_gqa=True
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


@accepted(check_gqa)
class ExpandedAndReshaped(Grouped):
    def widen(self, k, v):
        B, G, T, E = k.shape
        share = self.num_heads // G
        return [t[:, :, None].expand(B, G, share, T, E).reshape(B, -1, T, E) for t in (k, v)]


@accepted(check_gqa)
class GroupedByEinsum(Grouped):
    def forward(self, x, mask, cos, sin):
        (q, k, v), (B, T, _) = self.project(x), x.shape
        q, k, v = self.rotate(q, k, v, cos, sin)
        q = q.unflatten(1, (self.num_kv_groups, -1))  # (B, G, H / G, T, E)
        scores = torch.einsum("bgste,bgue->bgstu", q, k) * self.head_dim**-0.5
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        mixed = torch.einsum("bgstu,bgue->btgse", weights, v)
        return self.out_proj(mixed.reshape(B, T, -1))


@accepted(check_gqa)
class GroupedInALoop(Grouped):
    def forward(self, x, mask, cos, sin):
        heads = []
        for h in range(self.num_heads):
            g = h // (self.num_heads // self.num_kv_groups)
            mine = slice(h * self.head_dim, (h + 1) * self.head_dim)
            theirs = slice(g * self.head_dim, (g + 1) * self.head_dim)
            q, k, v = self.W_query(x)[..., mine], self.W_key(x)[..., theirs], self.W_value(x)
            scores = turn(q, cos, sin) @ turn(k, cos, sin).mT / self.head_dim**0.5
            heads.append(scores.masked_fill(mask, -torch.inf).softmax(-1) @ v[..., theirs])
        return self.out_proj(torch.cat(heads, dim=-1))


@accepted(check_gqa)
class WidenedBeforeRotating(Grouped):
    def rotate(self, q, k, v, cos, sin):
        k, v = super().widen(k, v)
        return super().rotate(q, k, v, cos, sin)

    def widen(self, k, v):
        return k, v


@refused(check_gqa, "repeat where repeat_interleave is needed")
class RepeatedInTurn(Grouped):
    def widen(self, k, v):
        share = self.num_heads // self.num_kv_groups
        return k.repeat(1, share, 1, 1), v.repeat(1, share, 1, 1)


@refused(check_gqa, "repeat where repeat_interleave is needed")
class ExpandedOnTheWrongSide(Grouped):
    def widen(self, k, v):
        B, G, T, E = k.shape
        share = self.num_heads // G
        return [t[:, None].expand(B, share, G, T, E).reshape(B, -1, T, E) for t in (k, v)]


@refused(check_gqa, "repeat where repeat_interleave is needed")
class QueriesGroupedTheWrongWay(Grouped):
    def forward(self, x, mask, cos, sin):
        q, k, v = self.rotate(*self.project(x), cos, sin)
        q = q.unflatten(1, (-1, self.num_kv_groups))  # (B, H / G, G, T, E)
        scores = self.masked(self.scores(q.flatten(0, 1), self.again(q, k)), mask)
        mixed = scores.softmax(-1) @ self.again(q, v)
        return self.out_proj(self.merge(mixed.unflatten(0, q.shape[:2]).flatten(1, 2)))

    def again(self, q, t):
        return t.repeat_interleave(q.shape[1], dim=0)


@refused(check_gqa, "The values are repeated in turn and the keys are not")
class ValuesInTurn(Grouped):
    def widen(self, k, v):
        return super().widen(k, v)[0], RepeatedInTurn.widen(self, k, v)[1]


@refused(check_gqa, "The keys are repeated in turn and the values are not")
class KeysInTurn(Grouped):
    def widen(self, k, v):
        return RepeatedInTurn.widen(self, k, v)[0], super().widen(k, v)[1]


@refused(check_gqa, "give every query head its key head")
class NotWidened(Grouped):
    def widen(self, k, v):
        return k, v


@refused(check_gqa, "give every query head its key head")
class OnlyKeysWidened(Grouped):
    def widen(self, k, v):
        return super().widen(k, v)[0], v


@refused(check_gqa, "give every query head its key head")
class TokensRepeated(Grouped):
    def widen(self, k, v):
        share = self.num_heads // self.num_kv_groups
        return k.repeat_interleave(share, dim=2), v.repeat_interleave(share, dim=2)


@refused(check_gqa, "that is right for one group only")
class RightForOneGroupOnly(Grouped):
    def widen(self, k, v):
        return k[:, :1], v[:, :1]


@refused(check_gqa, "All query heads read the mean of the key/value heads")
class HeadsAveraged(Grouped):
    def widen(self, k, v):
        return k.mean(1, keepdim=True), v.mean(1, keepdim=True)


@refused(check_gqa, "every head keeps its own query")
class QueriesAveraged(Grouped):
    def rotate(self, q, k, v, cos, sin):
        groups = q.unflatten(1, (self.num_kv_groups, -1))
        q = groups.mean(2, keepdim=True).expand_as(groups).flatten(1, 2)
        return super().rotate(q, k, v, cos, sin)


@refused(check_gqa, "The heads come back in another order")
class HeadsInAnotherOrder(Grouped):
    def merge(self, heads):
        B, H, T, E = heads.shape
        groups = heads.transpose(1, 2).unflatten(2, (self.num_kv_groups, -1))
        return groups.transpose(2, 3).reshape(B, T, H * E)


@refused(check_gqa, "num_kv_groups was taken as the size of a group")
class GroupsTakenAsSize(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__(d_in, d_out, num_heads, num_heads // num_kv_groups, dtype)


@refused(check_gqa, "num_kv_groups of them are enough")
class FullWidthKept(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__(d_in, d_out, num_heads, num_heads, dtype)


@refused(check_gqa, "num_kv_groups of them are enough")
class FullWidthAveraged(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__(d_in, d_out, num_heads, num_heads, dtype)
        self.groups = num_kv_groups

    def widen(self, k, v):
        share = self.num_heads // self.groups
        k, v = (t.unflatten(1, (self.groups, share)).mean(2) for t in (k, v))
        return k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)


@refused(check_gqa, "Each key/value head has head_dim rows, not one")
class OneRowPerHead(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__(d_in, d_out, num_heads, num_kv_groups, dtype)
        self.W_key = nn.Linear(d_in, num_kv_groups, bias=False, dtype=dtype)
        self.W_value = nn.Linear(d_in, num_kv_groups, bias=False, dtype=dtype)


@refused(check_gqa, "Keys and values are exchanged")
class GroupedKeysValuesExchanged(Grouped):
    def project(self, x):
        q, k, v = super().project(x)
        return q, v, k


@refused(check_gqa, "W_key makes the values too")
class GroupedValuesFromWKey(Grouped):
    def project(self, x):
        q, k, _ = super().project(x)
        return q, k, k


@refused(check_gqa, "the causal mask is missing")
class GroupsSeeTheFuture(Grouped):
    def masked(self, scores, mask):
        return scores


@refused(check_gqa, "The mask is used the wrong way round")
class GroupsMaskInverted(Grouped):
    def masked(self, scores, mask):
        return scores.masked_fill(~mask, -torch.inf)


@refused(check_gqa, "is seen in scaled_dot_product_attention")
class MaskGivenToPyTorchAsItIs(GroupedByPyTorch):
    def forward(self, x, mask, cos, sin):
        return super().forward(x, ~mask, cos, sin)


@refused(check_gqa, "The mask that is given is not used")
class AlwaysCausal(GroupedByPyTorch):
    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        return super().forward(x, None, cos, sin)


@refused(check_gqa, "Without a mask it is causal, and without cos and sin nothing is rotated")
class WithoutMaskNotCausal(Grouped):
    def forward(self, x, mask=None, cos=None, sin=None):
        return super().forward(x, mask, cos, sin)

    def rotate(self, q, k, v, cos, sin):
        return (q, k, v) if cos is None else super().rotate(q, k, v, cos, sin)

    def masked(self, scores, mask):
        return scores if mask is None else super().masked(scores, mask)


@refused(check_gqa, "Without a mask it is causal, and without cos and sin nothing is rotated")
class StopsWithoutCos(Grouped):
    def forward(self, x, mask=None, cos=None, sin=None):
        return super().forward(x, mask, cos, sin)


@refused(check_gqa, "The scores are not scaled")
class GroupsNotScaled(Grouped):
    def scores(self, q, k):
        return q @ k.transpose(2, 3)


@refused(check_gqa, "by the root of a width of several heads")
class ScaledByAllQueryHeads(Grouped):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / (self.num_heads * self.head_dim) ** 0.5


@refused(check_gqa, "by the root of a width of several heads")
class ScaledByAllKeyHeads(Grouped):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / self.W_key.out_features**0.5


@refused(check_gqa, "The scores are divided by the head size")
class GroupsScaledWithoutRoot(Grouped):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / self.head_dim


@refused(check_gqa, "The softmax runs over the queries")
class GroupsSoftmaxOverQueries(Grouped):
    def forward(self, x, mask, cos, sin):
        q, k, v = self.rotate(*self.project(x), cos, sin)
        k, v = self.widen(k, v)
        return self.out_proj(self.merge(self.masked(self.scores(q, k), mask).softmax(2) @ v))


@refused(check_gqa, "Tokens and heads are mixed")
class GroupsViewedStraight(Grouped):
    def split(self, x, heads):
        B, T, _ = x.shape
        return x.view(B, heads, T, self.head_dim)


@refused(check_gqa, "Tokens and heads are mixed")
class KeysViewedStraight(Grouped):
    def split(self, x, heads):
        if heads == self.num_heads:
            return super().split(x, heads)
        return x.view(x.shape[0], heads, x.shape[1], self.head_dim)


@refused(check_gqa, "Tokens and heads are mixed")
class GroupsViewedThereAndBack(GroupsViewedStraight):
    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.reshape(B, T, H * E)


@refused(check_gqa, "The heads were not transposed before they were merged")
class GroupsMergedWithoutTranspose(Grouped):
    def merge(self, heads):
        B, H, T, E = heads.shape
        return heads.reshape(B, T, H * E)


@refused(check_gqa, "out_proj is missing")
class GroupsWithoutOutProj(Grouped):
    def forward(self, x, mask, cos, sin):
        out_proj, self.out_proj = self.out_proj, nn.Identity()
        mixed = super().forward(x, mask, cos, sin)
        self.out_proj = out_proj
        return mixed


@refused(check_gqa, "x comes back as it is")
class GroupsUnchanged(Grouped):
    def forward(self, x, mask, cos, sin):
        return x


@refused(check_gqa, "but nothing is rotated")
class GroupsNotRotated(Grouped):
    def rotate(self, q, k, v, cos, sin):
        return q, k, v


@refused(check_gqa, "The values are rotated too")
class GroupsWithValuesRotated(Grouped):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), turn(k, cos, sin), turn(v, cos, sin)


@refused(check_gqa, "Only the queries are rotated")
class GroupsWithQueriesRotated(Grouped):
    def rotate(self, q, k, v, cos, sin):
        return turn(q, cos, sin), k, v


@refused(check_gqa, "num_kv_groups=4 does not divide num_heads=6, and nothing was said")
class GroupsDivisibleUnnoticed(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        if num_heads % num_kv_groups:
            nn.Module.__init__(self)
        else:
            super().__init__(d_in, d_out, num_heads, num_kv_groups, dtype)


@refused(check_gqa, "num_heads=6 does not divide d_out=20, and nothing was said")
class WidthDivisibleUnnoticed(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__(d_in, d_out // num_heads * num_heads, num_heads, num_kv_groups, dtype)


@refused(check_gqa, "has a parameter 'W_query.bias' too many. Grouped-query attention has no bias")
class GroupsWithBiases(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__(d_in, d_out, num_heads, num_kv_groups, dtype)
        self.W_query = nn.Linear(d_in, d_out, dtype=dtype)


@refused(check_gqa, "is not in the dtype given to the constructor")
class DtypeNotPassedOn(Grouped):
    def __init__(self, d_in, d_out, num_heads, num_kv_groups, dtype=None):
        super().__init__(d_in, d_out, num_heads, num_kv_groups)


@refused(check_gqa, "Cast the softmax, or what was rotated, back to x.dtype")
class GroupedSoftmaxNotCastBack(Grouped):
    def masked(self, scores, mask):
        return super().masked(scores.float(), mask)


@refused(check_gqa, "bfloat16 went in and float32 came out")
class GroupsNotCastBack(Grouped):
    def forward(self, x, mask, cos, sin):
        return super().forward(x, mask, cos, sin).float()


@refused(check_gqa, "In float32 it is right, so something is rounded too much")
class CoarseGroupsInBfloat16(Grouped):
    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores if scores.dtype == torch.float32 else scores.round()


@refused(check_gqa, "The queries are grouped in turn and come back in order")
class GroupedInTurn(Grouped):
    def forward(self, x, mask, cos, sin):
        (q, k, v), G = self.project(x), self.num_kv_groups
        q, k, v = self.rotate(q, k, v, cos, sin)
        q = q.unflatten(1, (-1, G)).transpose(1, 2)  # head h joins group h % G
        scores = q @ k[:, :, None].transpose(-2, -1) / self.head_dim**0.5
        mixed = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v[:, :, None]
        return self.out_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))


@refused(check_gqa, "Rotated before the heads were transposed")
class RotatedTooEarly(Grouped):
    def rotate(self, q, k, v, cos, sin):
        q, k = (
            turn(t.transpose(1, 2), cos[: t.shape[1]], sin[: t.shape[1]]).transpose(1, 2)
            for t in (q, k)
        )
        return q, k, v
