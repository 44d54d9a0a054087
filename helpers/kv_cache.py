"""KVCache: the keys and values of the tokens seen so far, so that no token is computed twice."""

import torch


class KVCache:
    """Room for `capacity` tokens of `batch_size` rows in every layer, made once.

    The position lives here. A model called with a cache continues what it holds:
    `model(prompt, cache)`, then `model(next, cache)`. The position moves when the whole model has
    run, so a call that fails leaves the cache as it was.

    Shapes   per layer: keys and values (batch_size, G, capacity, E) in the dtype of the model
    Errors   ValueError when more tokens come than there is room for
    """

    def __init__(self, model, batch_size, capacity):
        self.capacity, self.position = capacity, 0
        self.layers = [LayerCache(self, block.att, batch_size) for block in model.trf_blocks]

    def __getitem__(self, layer):
        return self.layers[layer]

    @property
    def cache_bytes(self):
        """Bytes of all keys and values: 2 * layers * rows * G * capacity * E * bytes per number."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def reset(self):
        """Forget everything, and keep the memory."""
        self.position = 0


class LayerCache:
    """One layer's share of a KVCache."""

    def __init__(self, cache, att, batch_size):
        self.cache = cache
        weight = att.W_key.weight
        shape = (batch_size, att.num_kv_groups, cache.capacity, att.head_dim)
        self.keys = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.empty_like(self.keys)

    def append(self, keys, values):
        """Keep (B, G, T, E) keys and values; return all that is kept, (B, G, S, E) each."""
        start, end = self.cache.position, self.cache.position + keys.shape[2]
        if end > self.cache.capacity:
            raise ValueError(
                f"the cache has room for {self.cache.capacity} tokens; it holds {start} "
                f"and got {keys.shape[2]} more"
            )
        if keys.shape[0] != self.keys.shape[0]:
            raise ValueError(
                f"the cache was made for {self.keys.shape[0]} rows, not {keys.shape[0]}"
            )
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]
