"""The proofs of the course as functions.

A test proves the helper's class with them, a reader the class that she wrote. Each `check_...`
takes the thing to be proved, compares it with something that it did not write, and prints one line
when all is well. Otherwise it raises CheckFailed, which says what was wrong, with the values, and
names the likely mistake: the typical wrong results are computed too, and compared.

judging.py       what all of them share: comparing, running the reader's code, naming the mistake
the other files  the proofs of the parts in the file of the same name one folder up
"""

from helpers.checks.attention import check_causal_attention, check_gqa
from helpers.checks.block import check_llama2_block
from helpers.checks.feed_forward import check_gelu, check_silu, check_swiglu
from helpers.checks.judging import (
    CheckFailed,
    StillOpen,
    assert_differs,
    assert_same,
    distance,
    exercise,
    seeded,
)
from helpers.checks.kv_cache import check_kv_cache
from helpers.checks.norms import check_layernorm, check_rmsnorm
from helpers.checks.positions import (
    check_apply_rope,
    check_permute,
    check_rope_params,
    check_rope_rescaling,
)
from helpers.checks.sampling import check_sampling
from helpers.checks.tokenizers import check_chat_format, check_tokenizer
from helpers.checks.weights import check_tied, check_weight_table

__all__ = [
    "CheckFailed",
    "StillOpen",
    "assert_differs",
    "assert_same",
    "check_apply_rope",
    "check_causal_attention",
    "check_chat_format",
    "check_gelu",
    "check_gqa",
    "check_kv_cache",
    "check_layernorm",
    "check_llama2_block",
    "check_permute",
    "check_rmsnorm",
    "check_rope_params",
    "check_rope_rescaling",
    "check_sampling",
    "check_silu",
    "check_swiglu",
    "check_tied",
    "check_tokenizer",
    "check_weight_table",
    "distance",
    "exercise",
    "seeded",
]
