"""The finished classes of the course "From GPT-2 to Llama 3.2".

Every model here is one skeleton (skeleton.py) with swappable parts (norms.py, positions.py,
attention.py, feed_forward.py). A family (gpt2.py, llama1.py, llama2.py, llama3.py, smollm2.py) is
written as the difference from its ancestor. `python -m helpers.families` prints the parts table.

Shapes in comments and docstrings use one key of letters:

    B  batch, rows that are processed together     G  n_kv_groups, key/value heads
    T  tokens of this call                         E  head size, emb_dim / n_heads unless set
    S  tokens seen so far, the cached ones too     F  hidden_dim of the feed-forward
    D  emb_dim, width of the residual stream       V  vocab_size
    H  n_heads, query heads                        L  n_layers
"""

from importlib import import_module

_PUBLIC = {
    "Config": "config",
    "Parts": "skeleton",
    "Skeleton": "skeleton",
    "GPTModel": "gpt2",
    "Llama1Model": "llama1",
    "Llama2Model": "llama2",
    "Llama3Model": "llama3",
    "Llama3ModelFast": "llama3",
    "SmolLM2Model": "smollm2",
    "KVCache": "kv_cache",
    "load_model": "checkpoints",
    "save_model": "weights",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name):
    """Import a public name when it is first asked for, to keep `python -m helpers.X` cheap."""
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'helpers' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(f"helpers.{_PUBLIC[name]}"), name)
