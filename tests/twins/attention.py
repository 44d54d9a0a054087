"""Twins of causal attention, plain and rotated."""

import torch
from torch import nn
from torch.nn import functional as F

from helpers.attention import MultiHeadAttention
from helpers.checks import check_causal_attention
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
