"""The skeleton that all models share: embed, a stack of blocks, a final norm, a head.

A family is a subclass of Skeleton that names its parts. An intermediate model of a lesson is just
another choice of parts:

    class GPTWithRMSNorm(GPTModel):
        parts = replace(GPTModel.parts, norm=RMSNorm)

A new variant arrives as a new class beside the old one: a norm with another weight, an attention
that also normalises its queries, a block that is wired otherwise, a feed-forward of many experts.
Families whose layers take turns override `parts_for`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from helpers.config import complete


class PreNormBlock(nn.Module):
    """Two steps along the residual stream: attention, then feed-forward, each behind its own norm.

    Shapes   x (B, T, D) -> (B, T, D)
    Source   pre-norm: GPT-2 (Radford et al. 2019, section 2.3) and every Llama; the Transformer of
             2017 and GPT-1 put the norm behind the addition
    """

    def __init__(self, cfg, parts):
        super().__init__()
        self.att = parts.attention.from_config(cfg, parts.attend)
        self.ff = parts.feed_forward.from_config(cfg)
        self.norm1 = parts.norm.from_config(cfg)
        self.norm2 = parts.norm.from_config(cfg)
        self.drop_shortcut = nn.Dropout(cfg["drop_rate"])

    @staticmethod
    def label(cfg):
        return "norm, then step"

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        x = x + self.drop_shortcut(self.att(self.norm1(x), mask, cos, sin, cache))
        return x + self.drop_shortcut(self.ff(self.norm2(x)))


@dataclass(frozen=True)
class Parts:
    """What a model is made of: five classes, each with `from_config`, and an attention function."""

    norm: type
    positions: type
    attention: type
    attend: Callable
    feed_forward: type
    block: type = PreNormBlock


class Skeleton(nn.Module):
    """Token ids in, logits out; what happens between depends on `parts` and the config alone.

    cfg      a Config, or a plain dict: keys left out take the family's `defaults`, unknown ones are
             refused
    Shapes   in_idx (B, T) -> logits (B, T, V), or (B, 1, V) with last_only
    Errors   ValueError when tokens and cache together exceed the config's context_length
    """

    parts = None  # a Parts, given by the family
    defaults = {}  # config values of the family, for plain dicts
    layouts = {}  # file format -> weights.Layout
    model_type = None  # what config.json calls the family
    config_names = {}  # our config key -> its name in config.json

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg = complete(cfg, self.defaults)
        self.tok_emb = nn.Embedding(cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype)
        self.pos_emb = self.parts.positions.from_config(cfg)
        self.drop_emb = nn.Dropout(cfg.drop_rate)
        parts = (self.parts_for(layer) for layer in range(cfg.n_layers))
        self.trf_blocks = nn.ModuleList(p.block(cfg, p) for p in parts)
        self.final_norm = self.parts.norm.from_config(cfg)
        self.out_head = nn.Linear(cfg.emb_dim, cfg.vocab_size, bias=False, dtype=cfg.dtype)
        if cfg.tie_embeddings:
            self.tie()
        self.register_load_state_dict_post_hook(_tie_after_loading)

    def parts_for(self, layer):
        """The parts of block number `layer`, counted from 0."""
        return self.parts

    def forward(self, in_idx, cache=None, *, padding=None, last_only=False):
        """Logits of every token, or of the last; with a cache, `in_idx` continues what it holds.

        padding   (B,) how many tokens at the left of each row are no text; they are hidden, and the
                  row's positions begin after them
        """
        T = in_idx.shape[1]
        start = cache.position if cache is not None else 0
        if start + T > self.cfg.context_length:
            raise ValueError(
                f"{start} cached and {T} new tokens exceed context_length={self.cfg.context_length}"
            )
        positions = torch.arange(start, start + T, device=in_idx.device)
        mask = None
        if padding is not None:
            mask = padding_mask(padding, T, start + T)  # (B, 1, T, S)
            positions = (positions - padding[:, None]).clamp(min=0)  # (B, T)
        logits = self.at(in_idx, positions, mask, cache, last_only)
        if cache is not None:
            cache.position += T
        return logits

    def at(self, in_idx, positions, mask=None, cache=None, last_only=False):
        """The computation alone: the caller says where the tokens stand and what is hidden.

        cache   one layer's cache per block, or None
        Shapes  in_idx (B, T), positions (T,) or (B, T) -> logits as forward
        """
        x, cos, sin = self.pos_emb.place(self.tok_emb(in_idx), positions)
        x = self.drop_emb(x)
        for layer, block in enumerate(self.trf_blocks):
            x = block(x, mask, cos, sin, cache[layer] if cache is not None else None)
        if last_only:
            x = x[:, -1:]
        return self.out_head(self.final_norm(x))

    # Tied means one tensor, also after .to(), to_empty() and load_state_dict(assign=True)
    @property
    def tied(self):
        return getattr(self.out_head, "weight", None) is self.tok_emb.weight

    def tie(self):
        """Make the head use the embedding's own tensor."""
        self.out_head.weight = self.tok_emb.weight

    def _apply(self, fn, recurse=True):
        tied = self.tied
        super()._apply(fn, recurse)
        if tied:
            self.tie()
        return self

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        """A tied model takes its one matrix under either name, and refuses two different ones."""
        names = [prefix + name for name in ("tok_emb.weight", "out_head.weight")]
        given = [name for name in names if name in state_dict]
        self._tie_again = self.tied and bool(given)
        if self._tie_again:
            if len(given) == 2 and not torch.equal(*(state_dict[name] for name in names)):
                raise ValueError(
                    "the head of this model is tied to its embedding, but the state dict holds two "
                    'different matrices: build the model with {**cfg, "tie_embeddings": False} '
                    "to keep both"
                )
            for name in names:
                state_dict[name] = state_dict[given[0]]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _tie_after_loading(model, keys):
    if model._tie_again:
        model.tie()


def padding_mask(padding, T, S):
    """(B, 1, T, S), True where a query must not look: the future, the padding at its row's left.

    A padded query looks at itself alone, so that no row of the softmax is empty; nobody reads its
    result.
    """
    keys = torch.arange(S, device=padding.device)
    queries = keys[S - T :, None]  # (T, 1)
    hidden = (keys > queries) | (keys < padding[:, None, None])  # (B, T, S)
    return (hidden & (keys != queries))[:, None]


def count_parameters(model):
    """(unique, counted twice): the second number counts a tied head as a matrix of its own."""
    unique = sum(p.numel() for p in model.parameters())
    return unique, unique + (model.out_head.weight.numel() if model.tied else 0)
