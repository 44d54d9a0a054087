"""Config: the numbers that turn a skeleton and its parts into one model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real

import torch

ROPE_FREQ_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")


class _FixedDict(dict):
    """The rope_freq of a Config, which does not change either."""

    def __setitem__(self, key, value):
        raise TypeError(f"a Config does not change: {key!r} of its rope_freq cannot be set")

    __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = __setitem__

    def __reduce__(self):
        return type(self), (dict(self),)


@dataclass(frozen=True, eq=False, repr=False)
class Config(Mapping):
    """The sizes and switches of one model: frozen, checked, and readable like a dict.

    `cfg.emb_dim` and `cfg["emb_dim"]` are the same; `{**cfg, "emb_dim": 64}`, `cfg | {...}` and
    `cfg.copy()` give plain dicts, which every model accepts; `dataclasses.replace` gives a Config.

    Errors   ValueError names the field, the value and the rule it breaks; assigning to a key raises
             TypeError and says what to write instead
    """

    vocab_size: int  # V, rows of the token embedding
    context_length: int  # most tokens that one sequence may have
    emb_dim: int  # D, width of the residual stream
    n_heads: int  # H, query heads
    n_layers: int  # L, blocks
    hidden_dim: int | None = None  # F, width inside the feed-forward; None is 4 * emb_dim
    n_kv_groups: int | None = None  # G, key/value heads; None gives every query head its own
    head_dim: int | None = None  # E; None is emb_dim / n_heads
    norm_eps: float = 1e-5  # added to the mean square (or variance) under the root
    drop_rate: float = 0.0  # dropout after embedding, attention weights and sub-layers
    qkv_bias: bool = False  # biases on W_query, W_key, W_value
    bias: bool = False  # biases on out_proj and in the feed-forward
    rope_base: float | None = None  # RoPE: the slowest pair turns about once in 2 pi * base tokens
    rope_freq: Mapping | None = None  # Llama 3.1's rescaling of RoPE: see positions.py
    tie_embeddings: bool | None = None  # head is the embedding; None: let the weight file decide
    dtype: torch.dtype | None = None  # of the weights; None is torch's default

    def __post_init__(self):
        for name in ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers"):
            self._whole_number(name)
        for name in ("hidden_dim", "n_kv_groups", "head_dim"):
            if self[name] is not None:
                self._whole_number(name)
        for name in ("qkv_bias", "bias"):
            if not isinstance(self[name], bool):
                raise ValueError(f"{name}={self[name]!r} must be True or False")
        if not (self.tie_embeddings is None or isinstance(self.tie_embeddings, bool)):
            raise ValueError(f"tie_embeddings={self.tie_embeddings!r} must be True, False or None")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ValueError(
                f"dtype={self.dtype!r} must be a torch.dtype such as torch.bfloat16, or None"
            )
        self._number("norm_eps", above=0)
        self._number("drop_rate", least=0, below=1)
        if self.head_dim is None and self.emb_dim % self.n_heads:
            raise ValueError(
                f"n_heads={self.n_heads} does not divide emb_dim={self.emb_dim}: "
                "every head needs the same width"
            )
        if self.n_kv_groups is not None and self.n_heads % self.n_kv_groups:
            raise ValueError(
                f"n_kv_groups={self.n_kv_groups} does not divide n_heads={self.n_heads}: "
                "every key/value head must serve the same number of query heads"
            )
        if self.rope_base is not None:
            self._number("rope_base", above=0)
            head_dim = self.head_dim or self.emb_dim // self.n_heads
            if head_dim % 2:
                raise ValueError(
                    f"a head of size {head_dim} cannot be rotated: RoPE turns pairs, "
                    "so emb_dim / n_heads must be even"
                )
        if self.rope_freq is not None:
            check_rope_freq(self.rope_freq)
            object.__setattr__(self, "rope_freq", _FixedDict(self.rope_freq))

    def _whole_number(self, name):
        value = self[name]
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")

    def _number(self, name, *, above=None, least=None, below=None):
        value = self[name]
        good = isinstance(value, Real) and not isinstance(value, bool) and abs(value) < 1e300
        if not (
            good
            and (above is None or value > above)
            and (least is None or value >= least)
            and (below is None or value < below)
        ):
            rule = " and ".join(
                f"{sign} {bound}"
                for sign, bound in ((">", above), (">=", least), ("<", below))
                if bound is not None
            )
            raise ValueError(f"{name}={value!r} must be a number {rule}")

    # A mapping for everybody who writes cfg["emb_dim"]
    def __getitem__(self, key):
        if key not in FIELDS:
            raise KeyError(key)
        value = getattr(self, key)
        return dict(value) if isinstance(value, _FixedDict) else value  # a copy may be changed

    def __iter__(self):
        return iter(FIELDS)

    def __len__(self):
        return len(FIELDS)

    def __setitem__(self, key, value):
        raise TypeError(
            f'a Config does not change: write {{**cfg, "{key}": {value!r}}} for a changed copy'
        )

    def __delitem__(self, key):
        raise TypeError(f"a Config does not change: {key!r} cannot be deleted")

    def copy(self):
        """A plain dict with the same entries."""
        return dict(self)

    def __or__(self, other):
        return {**self, **other}

    def __ror__(self, other):
        return {**other, **self}

    def __repr__(self):
        shown = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Config({', '.join(shown)})"


FIELDS = tuple(f.name for f in fields(Config))
REQUIRED = ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers")


def complete(cfg, defaults):
    """Turn a plain dict into a Config.

    Keys left out take the family's `defaults`, unknown keys are refused.
    """
    if isinstance(cfg, Config):
        return cfg
    if not isinstance(cfg, Mapping):
        raise TypeError(f"a config is a Config or a dict, not {type(cfg).__name__}")
    for key in cfg:
        if key not in FIELDS:
            near = get_close_matches(str(key), FIELDS, n=1)
            raise ValueError(
                f"unknown config key {key!r}"
                + (
                    f": did you mean {near[0]!r}?"
                    if near
                    else f"; known keys are {', '.join(FIELDS)}"
                )
            )
    merged = {**defaults, **cfg}
    missing = [key for key in REQUIRED if key not in merged]
    if missing:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    return Config(**merged)


def check_rope_freq(rope_freq):
    """Refuse a RoPE rescaling that is not the four numbers of Llama 3.1 in a sensible order."""
    if not isinstance(rope_freq, Mapping) or sorted(rope_freq) != sorted(ROPE_FREQ_KEYS):
        raise ValueError(
            f"rope_freq={rope_freq!r} must be a dict with exactly {', '.join(ROPE_FREQ_KEYS)}"
        )
    for key, value in rope_freq.items():
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < 1e300:
            raise ValueError(f"rope_freq[{key!r}]={value!r} must be a number > 0")
    if rope_freq["low_freq_factor"] >= rope_freq["high_freq_factor"]:
        raise ValueError(
            f"low_freq_factor={rope_freq['low_freq_factor']} must be below "
            f"high_freq_factor={rope_freq['high_freq_factor']}"
        )
