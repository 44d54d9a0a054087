"""SmolLM2: Llama 3.2's architecture with a shorter context and another tokenizer.

Its weights are open (Apache-2.0).
"""

from dataclasses import replace

from helpers.llama3 import LLAMA32_CONFIG_1B, Llama3Model
from helpers.tokenizers import ChatMLFormat, SmolLM2Tokenizer

__all__ = [
    "SMOLLM2_CONFIG_1_7B",
    "SMOLLM2_CONFIG_135M",
    "SMOLLM2_CONFIG_360M",
    "ChatMLFormat",
    "SmolLM2Model",
    "SmolLM2Tokenizer",
]


class SmolLM2Model(Llama3Model):
    """Llama 3.2 without the rescaling of RoPE, in smaller sizes.

    Source   Ben Allal et al. 2025, arXiv:2502.02737
    """

    defaults = {**Llama3Model.defaults, "n_kv_groups": None, "rope_base": 100_000.0}


SMOLLM2_CONFIG_135M = replace(
    LLAMA32_CONFIG_1B,
    vocab_size=49_152,
    context_length=8192,
    emb_dim=576,
    n_heads=9,
    n_layers=30,
    hidden_dim=1536,
    n_kv_groups=3,
    rope_base=100_000.0,
    rope_freq=None,
)
SMOLLM2_CONFIG_360M = replace(
    SMOLLM2_CONFIG_135M, emb_dim=960, n_heads=15, n_layers=32, hidden_dim=2560, n_kv_groups=5
)
SMOLLM2_CONFIG_1_7B = replace(
    SMOLLM2_CONFIG_135M,
    emb_dim=2048,
    n_heads=32,
    n_layers=24,
    hidden_dim=8192,
    n_kv_groups=32,
    rope_base=130_000.0,
)
