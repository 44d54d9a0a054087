"""Proof of a whole block of Llama 2."""

import torch
from torch.nn import functional as F

from helpers.checks.attention import merged_heads, split_heads
from helpers.checks.feed_forward import DTYPE_HINT
from helpers.checks.judging import (
    built,
    judge,
    near_in_bfloat16,
    proof,
    randomised,
    result_and_weights,
    run,
    seeded,
)
from helpers.checks.positions import angles_of, rotate_half_split, rotate_interleaved, tables_of

_BLOCK = {
    "vocab_size": 11,
    "context_length": 32,
    "emb_dim": 24,
    "n_heads": 3,
    "n_layers": 1,
    "hidden_dim": 40,
    "dtype": torch.float32,
}


@proof
def check_llama2_block(cls):
    """TransformerBlock(cfg) with norm1, att, norm2 and ff, against PyTorch's own functions.

    It is called as block(x, None, cos, sin): the mask None is causal.
    """
    config_hint = f"The config has {', '.join(_BLOCK)}"
    block = randomised(built(cls, _BLOCK, hint=config_hint))
    normal = torch.randn(2, 9, 24, generator=seeded(9))
    # with gaps: the scores depend on distances, so that a shift of all positions is not seen
    angles = angles_of(8, 10_000.0, 3 + torch.arange(9) + 4 * (torch.arange(9) // 3))
    cos, sin = tables_of(angles)
    for x in (normal, 0.01 * normal):  # small inputs show the norms' eps
        _compare_block(block, x, angles)
    right = run(block, normal, None, cos, sin)
    half = randomised(built(cls, {**_BLOCK, "dtype": torch.bfloat16}, hint=config_hint))
    got = run(half, normal.to(torch.bfloat16), None, cos, sin, hint=DTYPE_HINT)
    # results up to 5, where the numbers of bfloat16 are 0.03 apart; what is right comes to 0.035
    near_in_bfloat16("a block of Llama 2", got, right, 0.1)
    print("a block of Llama 2: right, in float32 and bfloat16")


def _compare_block(block, x, angles):
    names = ("W_query", "W_key", "W_value", "out_proj")
    shapes = {"norm1.weight": (24,), "norm2.weight": (24,)}
    shapes |= {f"att.{n}.weight": (24, 24) for n in names}
    shapes |= {"ff.fc1.weight": (40, 24), "ff.fc2.weight": (40, 24), "ff.fc3.weight": (24, 40)}
    cos, sin = tables_of(angles)
    got, found = result_and_weights(
        block, shapes, x, None, cos, sin, extra="A Llama block has no biases and no other weights"
    )
    n1, n2, w_query, w_key, w_value, w_out, w1, w2, w3 = (found[name] for name in shapes)

    def norm(x, weight, eps=1e-5):
        return F.rms_norm(x, (24,), weight, eps)

    def att(x, turns=(True, True, False), rotate=rotate_half_split, angles=angles, causal=True):
        qkv = (split_heads(x @ w.T, 3) for w in (w_query, w_key, w_value))
        qkv = (rotate(t, angles).float() if on else t for t, on in zip(qkv, turns, strict=True))
        return merged_heads(F.scaled_dot_product_attention(*qkv, is_causal=causal)) @ w_out.T

    def ff(x, activation=F.silu):
        return (activation(x @ w1.T) * (x @ w2.T)) @ w3.T

    def assembled(att=att, ff=ff, n1=n1, n2=n2, norm=norm):
        y = x + att(norm(x, n1))
        return y + ff(norm(y, n2))

    def mistakes():
        read = norm(x, n1)  # what the attention reads
        y = x + att(read)  # the sum after attention
        post, olmo = norm(y_raw := x + att(x), n1), x + norm(att(x), n1)
        shifted = read + att(read)
        first_ff = x + ff(norm(x, n2))
        return {
            "The norms come after the additions (post-norm); Llama normalises before each step": (
                norm(post + ff(post), n2)
            ),
            "Each norm comes after its step, before the addition (Olmo's order); Llama normalises "
            "what a step reads": olmo + norm(ff(olmo), n2),
            "Both steps read the input (a parallel block); the second reads the first one's "
            "result": [y + ff(read), y + ff(norm(x, n2))],
            "The feed-forward comes first: attention does": [
                first_ff + att(norm(first_ff, n1)),
                (z := x + ff(norm(x, n1))) + att(norm(z, n2)),
            ],
            "norm1 is used twice": assembled(n2=n1),
            "norm2 is used twice": assembled(n1=n2),
            "norm1 and norm2 are exchanged": assembled(n1=n2, n2=n1),
            "The addition around attention is missing": (att(read) + ff(norm(att(read), n2))),
            "The addition around the feed-forward is missing": ff(norm(y, n2)),
            "Both additions are missing": ff(norm(att(read), n2)),
            "The input is added at the end; the sum after attention is what goes on": (
                x + ff(norm(y, n2))
            ),
            "The normalised input is added: the shortcut carries x itself": [
                shifted + ff(norm(shifted, n2)),
                (m := norm(shifted, n2)) + ff(m),
            ],
            "The first norm is missing": y_raw + ff(norm(y_raw, n2)),
            "The second norm is missing": y + ff(y),
            "x comes back as it is": x,
            "The attention is missing": first_ff,
            "The feed-forward is missing": y,
            "Nothing is rotated: pass cos and sin on to the attention": (
                assembled(att=lambda h: att(h, (False, False, False)))
            ),
            "The values are rotated too: only queries and keys are": (
                assembled(att=lambda h: att(h, (True, True, True)))
            ),
            "It turns backwards, or cos and sin are exchanged": (
                assembled(att=lambda h: att(h, angles=-angles))
            ),
            "Neighbours are paired (interleaved); the layout here is half-split": (
                assembled(att=lambda h: att(h, rotate=rotate_interleaved))
            ),
            "The future is not hidden: the causal mask is missing": (
                assembled(att=lambda h: att(h, causal=False))
            ),
            "The feed-forward's gate is GELU: it is SiLU": [
                assembled(ff=lambda h: ff(h, F.gelu)),
                assembled(ff=lambda h: ff(h, lambda g: F.gelu(g, approximate="tanh"))),
            ],
            "Gate and value are exchanged: SiLU belongs on fc1's side": (
                assembled(ff=lambda h: (h @ w1.T * F.silu(h @ w2.T)) @ w3.T)
            ),
            "The norms are LayerNorms without shift: they are RMSNorms": (
                assembled(norm=lambda h, w: F.layer_norm(h, (24,), w))
            ),
            "The norms' eps is 1e-6, the value of Llama 1; Llama 2 has 1e-5": (
                assembled(norm=lambda h, w: norm(h, w, 1e-6))
            ),
        }

    judge("a block of Llama 2", got, assembled(), 1e-4, mistakes)  # float32 rounds by 1e-6
