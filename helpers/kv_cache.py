"""KVCache: the keys and values of the tokens seen so far, so that no token is computed twice."""

from typing import NamedTuple

import torch


class KVCache:
    """Room for `capacity` tokens of `batch_size` rows in every layer, made once.

    The position lives here. A model called with a cache continues what it holds:
    `model(prompt, cache)`, then `model(next, cache)`. The position moves when the whole model has
    run, so a call that fails leaves the cache as it was. It is for generating: call the model under
    torch.no_grad(), or the cache keeps the graph of every token.

    Shapes   per layer: keys and values (batch_size, G, capacity, E) in the dtype of the model
    Errors   ValueError when more tokens come than there is room for
    """

    def __init__(self, model, batch_size, capacity):
        self.capacity, self.position = capacity, 0
        self.keys, self.values = [], []  # one tensor a layer
        weight = model.tok_emb.weight
        for block in model.trf_blocks:
            shape = (batch_size, block.att.num_kv_groups, capacity, block.att.head_dim)
            for kept in (self.keys, self.values):
                kept.append(torch.empty(shape, dtype=weight.dtype, device=weight.device))

    def __getitem__(self, layer):
        return LayerCache(self, layer)

    @property
    def cache_bytes(self):
        """Bytes of all keys and values: 2 * layers * rows * G * capacity * E * bytes per number."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def reset(self):
        """Forget everything, and keep the memory."""
        self.position = 0


class LayerCache(NamedTuple):
    """One layer's view of a KVCache: what an attention part is given."""

    cache: KVCache
    layer: int

    def append(self, keys, values):
        """Keep (B, G, T, E) keys and values; return all that is kept, (B, G, S, E) each."""
        cache = self.cache
        kept_keys, kept_values = cache.keys[self.layer], cache.values[self.layer]
        start, end = cache.position, cache.position + keys.shape[2]
        if end > cache.capacity:
            raise ValueError(
                f"the cache has room for {cache.capacity} tokens; it holds {start} "
                f"and got {keys.shape[2]} more"
            )
        if keys.shape[0] != kept_keys.shape[0]:
            raise ValueError(
                f"the cache was made for {kept_keys.shape[0]} rows, not {keys.shape[0]}"
            )
        kept_keys[:, :, start:end] = keys
        kept_values[:, :, start:end] = values
        return kept_keys[:, :, :end], kept_values[:, :, :end]
