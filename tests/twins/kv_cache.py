"""Twins of a model with a cache: an own model in steps, and the helpers' model with other caches."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from helpers.attention import GroupedQueryAttention, attend_plain
from helpers.checks import check_kv_cache
from helpers.gpt2 import GPTModel
from helpers.kv_cache import KVCache, LayerCache
from helpers.llama3 import Llama3Model, Llama3ModelFast
from helpers.positions import RoPE
from twins.attention import turn
from twins.positions import book_tables
from twins.registry import accepted, proves, refused

proves(
    check_kv_cache,
    Llama3Model,
    "KV cache: right, at once, in pieces, token by token, for several rows and texts",
)
accepted(check_kv_cache)(GPTModel)
accepted(check_kv_cache)(Llama3ModelFast)


class Kept:
    """What Small keeps: keys and values of each layer, growing."""

    def __init__(self, n_layers):
        self.position = 0
        self.keys, self.values = [None] * n_layers, [None] * n_layers


class Small(nn.Module):
    """A right model of its own: RoPE, attention, no feed-forward; a twin does one step wrong."""

    def __init__(self, cfg):
        super().__init__()
        D, self.n_heads, self.n_layers = cfg["emb_dim"], cfg["n_heads"], cfg["n_layers"]
        self.tok_emb = nn.Embedding(cfg["vocab_size"], D)
        names = ("W_query", "W_key", "W_value", "out_proj")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(D, D, bias=False) for name in names})
            for _ in range(self.n_layers)
        )
        self.out_head = nn.Linear(D, cfg["vocab_size"], bias=False)
        self.tables = book_tables(D // self.n_heads, 10_000.0, 128)

    def make_cache(self, batch_size, capacity):
        return Kept(self.n_layers)

    def forward(self, in_idx, cache=None):
        T, x = in_idx.shape[1], self.tok_emb(in_idx)
        positions = torch.arange(T) + (0 if cache is None else self.start(cache))
        for number, layer in enumerate(self.layers):
            normed = F.normalize(x, dim=-1) * x.shape[-1] ** 0.5
            x = x + self.attend(layer, normed, positions, cache, number)
        if cache is not None:
            self.move(cache, T)
        return self.out_head(F.normalize(x, dim=-1) * x.shape[-1] ** 0.5)

    def attend(self, layer, x, positions, cache, number):
        B, T, D = x.shape
        heads = (layer[name](x) for name in ("W_query", "W_key", "W_value"))
        q, k, v = (h.view(B, T, self.n_heads, -1).transpose(1, 2) for h in heads)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if cache is not None:
            k, v = self.keep(cache, number, k, v)
        return layer["out_proj"](self.mix(q, k, v).transpose(1, 2).reshape(B, T, D))

    def mix(self, q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.hidden(*scores.shape[-2:]), -torch.inf)
        return scores.softmax(-1) @ v

    def start(self, cache):
        return cache.position

    def move(self, cache, T):
        cache.position += T

    def rotate(self, x, positions):
        return turn(x, *(table[positions] for table in self.tables))

    def keep(self, cache, number, k, v):
        if cache.keys[number] is not None:
            k = torch.cat([cache.keys[number], k], dim=2)
            v = torch.cat([cache.values[number], v], dim=2)
        cache.keys[number], cache.values[number] = k, v
        return k, v

    def hidden(self, T, S):
        return torch.arange(S) > torch.arange(S - T, S)[:, None]


accepted(check_kv_cache)(Small)


@accepted(check_kv_cache)
class KeepsTheIds(Small):
    """Slow and right: the whole text is computed again."""

    def make_cache(self, batch_size, capacity):
        return {}

    def forward(self, in_idx, cache=None):
        if cache is None:
            return super().forward(in_idx)
        seen = cache.get("ids", in_idx[:, :0])
        cache["ids"] = torch.cat([seen, in_idx], dim=1)
        return super().forward(cache["ids"])[:, seen.shape[1] :]


@accepted(check_kv_cache)
class TurnsWhenRead(Small):
    """Keys are kept as they are, and turned by their own positions at every call."""

    def attend(self, layer, x, positions, cache, number):
        B, T, D = x.shape
        heads = (layer[name](x) for name in ("W_query", "W_key", "W_value"))
        q, k, v = (h.view(B, T, self.n_heads, -1).transpose(1, 2) for h in heads)
        if cache is not None:
            k, v = self.keep(cache, number, k, v)
        q, k = self.rotate(q, positions), self.rotate(k, torch.arange(k.shape[2]))
        return layer["out_proj"](self.mix(q, k, v).transpose(1, 2).reshape(B, T, D))


# --- a step of the own model is wrong ----------


@refused(check_kv_cache, "Every call begins at the same position")
class RestartsAtZero(Small):
    def start(self, cache):
        return 0


@refused(check_kv_cache, "Every call begins at the same position")
class PositionNeverMoves(Small):
    def move(self, cache, T):
        cache.position = cache.position or T


@refused(check_kv_cache, "is a position left out between two calls")
class SkipsAPosition(Small):
    def move(self, cache, T):
        cache.position += T + 1


@refused(check_kv_cache, "The first new token gets the position of the last kept one")
class OneTooSmall(Small):
    def start(self, cache):
        return max(cache.position - 1, 0)


@refused(check_kv_cache, "The mask is aligned with the first key")
class IsCausalTrap(Small):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@refused(check_kv_cache, "The mask is aligned with the first key")
class MaskCutFromTheCorner(Small):
    def hidden(self, T, S):
        return torch.ones(64, 64, dtype=torch.bool).triu(1)[:T, :S]


@refused(check_kv_cache, "A token sees those after it in the same call")
class NoMaskWithACache(Small):
    def mix(self, q, k, v):
        causal = q.shape[2] == k.shape[2]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


@refused(check_kv_cache, "are keys turned before and after keeping?")
class TurnedTwice(Small):
    def keep(self, cache, number, k, v):
        k, v = super().keep(cache, number, k, v)
        return self.rotate(k, torch.arange(k.shape[2])), v


@refused(check_kv_cache, "or are kept keys turned again?")
class KeptKeysTurnedAgain(Small):
    def keep(self, cache, number, k, v):
        before = cache.position
        k, v = super().keep(cache, number, k, v)
        again = self.rotate(k[:, :, :before], torch.arange(before))
        return torch.cat([again, k[:, :, before:]], dim=2), v


@refused(check_kv_cache, "Earlier tokens have no order")
class TurnedByThisCall(TurnsWhenRead):
    """All keys that were kept get the angle of the newest token."""

    def attend(self, layer, x, positions, cache, number):
        self.now = positions
        return super().attend(layer, x, positions, cache, number)

    def rotate(self, x, positions):
        decoding = len(positions) > len(self.now)
        return super().rotate(x, self.now[-1:] if decoding else positions)


@refused(check_kv_cache, "Earlier tokens have no order")
class KeptBeforeTheTurn(Small):
    def attend(self, layer, x, positions, cache, number):
        B, T, D = x.shape
        heads = (layer[name](x) for name in ("W_query", "W_key", "W_value"))
        q, k, v = (h.view(B, T, self.n_heads, -1).transpose(1, 2) for h in heads)
        q, turned, all_v = self.rotate(q, positions), self.rotate(k, positions), v
        if cache is not None:
            all_k, all_v = self.keep(cache, number, k, v)
            turned = torch.cat([all_k[:, :, : all_k.shape[2] - T], turned], dim=2)
        return layer["out_proj"](self.mix(q, turned, all_v).transpose(1, 2).reshape(B, T, D))


@refused(check_kv_cache, "The values of earlier calls are not those that were computed")
class ValuesNotKept(Small):
    def keep(self, cache, number, k, v):
        T, (k, v) = v.shape[2], super().keep(cache, number, k, v)
        return k, torch.cat([torch.zeros_like(v[:, :, :-T]), v[:, :, v.shape[2] - T :]], dim=2)


@refused(check_kv_cache, "The keys of earlier calls are not those that were computed")
class KeysNotKept(Small):
    def keep(self, cache, number, k, v):
        T, (k, v) = v.shape[2], super().keep(cache, number, k, v)
        return torch.cat([torch.zeros_like(k[:, :, :-T]), k[:, :, k.shape[2] - T :]], dim=2), v


@refused(check_kv_cache, "The tokens of earlier calls are not seen")
class NothingIsRead(Small):
    def keep(self, cache, number, k, v):
        super().keep(cache, number, k, v)
        return k, v


@refused(check_kv_cache, "Earlier tokens are overwritten or lost")
class OnlyTheCallBefore(Small):
    def keep(self, cache, number, k, v):
        before = cache.keys[number], cache.values[number]
        cache.keys[number], cache.values[number] = k, v
        if before[0] is None:
            return k, v
        return torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)


@refused(check_kv_cache, "One layer alone is right: each layer keeps its own")
class LayersShareTheirKeys(Small):
    def keep(self, cache, number, k, v):
        if number == 0:
            return super().keep(cache, number, k, v)
        k = torch.cat([cache.keys[0][:, :, : -k.shape[2]], k], dim=2)
        return k, torch.cat([cache.values[0][:, :, : -v.shape[2]], v], dim=2)


@refused(check_kv_cache, "A second text sees the first")
class CacheOfTheClass(Small):
    kept = None

    def make_cache(self, batch_size, capacity):
        type(self).kept = self.kept or super().make_cache(batch_size, capacity)
        return self.kept


@refused(check_kv_cache, "A second text sees the first")
class PositionOfTheModel(Small):
    def make_cache(self, batch_size, capacity):
        self.position = 0
        return super().make_cache(batch_size, capacity)

    def start(self, cache):
        return self.position

    def move(self, cache, T):
        self.position += T


@refused(check_kv_cache, "Rows are mixed")
class FirstRowForAll(Small):
    def keep(self, cache, number, k, v):
        k, v = super().keep(cache, number, k, v)
        return k[:1].expand_as(k), v


@refused(check_kv_cache, "Keys and values are kept in the dtype of the model")
class KeptInFloat32(Small):
    def keep(self, cache, number, k, v):
        return super().keep(cache, number, k.float(), v.float())


@refused(check_kv_cache, "logits of 9 new tokens are (1, 1, 31), not (1, 9, V)")
class OnlyTheLastLogits(Small):
    def forward(self, in_idx, cache=None):
        logits = super().forward(in_idx, cache)
        return logits if cache is None or cache.position == len(logits[0]) == 48 else logits[:, -1:]


# --- the helpers' model, another cache ----------


def with_cache(name, hint, **changes):
    """Refuse Llama 3 with a KVCache of which some methods are other ones."""
    mine = type(name, (KVCache,), {k: v for k, v in changes.items() if k != "append"})
    if "append" in changes:
        layer = type("Layer", (LayerCache,), {"append": changes["append"]})
        mine.__getitem__ = lambda cache, number: layer(cache, number)

    class Twin(Llama3Model):
        def make_cache(self, batch_size, capacity):
            return mine(self, batch_size, capacity)

    Twin.__name__ = name
    refused(check_kv_cache, hint)(Twin)


def unfilled_slots(layer, keys, values):
    if layer.cache.position == 0:
        for kept in (layer.cache.keys[layer.layer], layer.cache.values[layer.layer]):
            kept.zero_()
    LayerCache.append(layer, keys, values)
    return layer.cache.keys[layer.layer], layer.cache.values[layer.layer]


with_cache("ResetForgets", "reset() must forget the text before", reset=lambda cache: None)
with_cache("SlotsNotFilled", "Slots that nobody has filled yet are seen", append=unfilled_slots)


@refused(check_kv_cache, "The last token of each call is overwritten by the next")
class PositionSlips(Llama3Model):
    def forward(self, in_idx, cache=None, **settings):
        if cache is not None and cache.position:
            cache.position -= 1
        return super().forward(in_idx, cache, **settings)


@refused(check_kv_cache, "The padding is seen")
class PaddingNotHidden(Llama3Model):
    def forward(self, in_idx, cache=None, *, padding=None, last_only=False):
        return super().forward(in_idx, cache, last_only=last_only)


@refused(check_kv_cache, "A row's positions begin after its padding")
class PositionsBeginWithThePadding(GPTModel):
    def forward(self, in_idx, cache=None, *, padding=None, last_only=False):
        place, T = self.pos_emb.place, in_idx.shape[1]
        start = 0 if cache is None else cache.position
        self.pos_emb.place = lambda x, positions: place(x, torch.arange(start, start + T))
        try:
            return super().forward(in_idx, cache, padding=padding, last_only=last_only)
        finally:
            del self.pos_emb.place


def attend_top_left(queries, keys, values, mask=None, dropout=0.0):
    if mask is not None:
        return attend_plain(queries, keys, values, mask)
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


@refused(check_kv_cache, "The mask is aligned with the first key")
class LlamaWithIsCausal(Llama3Model):
    parts = replace(Llama3Model.parts, attend=attend_top_left)


class TurnsAgain(GroupedQueryAttention):
    """Appends turned keys, and turns all that comes back."""

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        if cache is None:
            return super().forward(x, mask, cos, sin)

        class Again:
            def append(self, keys, values):
                keys, values = cache.append(keys, values)
                return turn(keys, *book_tables(keys.shape[-1], 10_000, keys.shape[2])), values

        return super().forward(x, mask, cos, sin, Again())


@refused(check_kv_cache, "are keys turned before and after keeping?")
class LlamaTurnsTwice(Llama3Model):
    parts = replace(Llama3Model.parts, attention=TurnsAgain)


class FromZero(RoPE):
    def place(self, x, positions):
        return super().place(x, positions - positions[..., :1])


@refused(check_kv_cache, "Every call begins at the same position")
class LlamaRestarts(Llama3Model):
    parts = replace(Llama3Model.parts, positions=FromZero)


@refused(check_kv_cache, "KVCache needs tok_emb and trf_blocks")
class NoMakeCache(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.emb = nn.Embedding(cfg["vocab_size"], cfg["vocab_size"])

    def forward(self, in_idx, cache=None):
        return self.emb(in_idx)
