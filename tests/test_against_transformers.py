"""Every family against transformers, with weights at which a mistake shows, and a wrong twin of every part."""

from dataclasses import replace

import pytest
import torch
from conftest import LINE, logits_of, ours, redraw, reference, token_ids
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers.attention import GroupedQueryAttention, attend_plain, attend_sdpa
from helpers.feed_forward import FeedForward
from helpers.generate import generate, generate_batch
from helpers.kv_cache import KVCache
from helpers.llama3 import LLAMA31_CONFIG_8B, LLAMA32_CONFIG_1B, LLAMA32_CONFIG_3B, Llama3Model
from helpers.norms import RMSNorm
from helpers.positions import RoPE, rescale

CLOSE, FAR = 1e-4, 1e-2


def distance(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("attend", [attend_plain, attend_sdpa])
@pytest.mark.parametrize("name", LINE)
def test_logits_equal_transformers(name, attend):
    theirs, ids = reference(name), token_ids(name)
    model = ours(theirs)
    for block in model.trf_blocks:
        block.att.attend = attend
    with torch.no_grad():
        assert distance(model(ids), logits_of(theirs, ids)) < CLOSE


@pytest.mark.parametrize("attend", [attend_plain, attend_sdpa])
@pytest.mark.parametrize("pieces", [(60, 1, 1, 1, 1), (1,) * 64, (7, 50, 7), (64,)], ids=str)
@pytest.mark.parametrize("name", LINE)
def test_cached_logits_equal_transformers(name, pieces, attend):
    theirs, ids = reference(name), token_ids(name)[:, :64]
    model = ours(theirs)
    for block in model.trf_blocks:
        block.att.attend = attend
    cache, out, start = KVCache(model, len(ids), 64), [], 0
    with torch.no_grad():
        for length in pieces:
            out.append(model(ids[:, start : start + length], cache))
            start += length
            assert cache.position == start
    assert distance(torch.cat(out, dim=1), logits_of(theirs, ids)) < CLOSE


@pytest.mark.parametrize("name", ["gpt2", "llama3_2", "smollm2"])
def test_greedy_tokens_equal_transformers(name):
    theirs, ids = reference(name), token_ids(name)[:, :20]
    model = ours(theirs)
    with torch.no_grad():
        wanted = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert torch.equal(generate(model, ids, 40), wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama2_7b", "llama3_2"])
def test_rows_of_different_lengths_equal_each_row_alone(name):
    theirs, ids = reference(name), token_ids(name, batch=3)
    model = ours(theirs)
    prompts = [ids[0, :5].tolist(), ids[1, :30].tolist(), ids[2, :17].tolist()]
    together = generate_batch(model, prompts, 20)
    assert together == [generate_batch(model, [prompt], 20)[0] for prompt in prompts]
    assert together == generate_batch(model, prompts, 20, use_cache=False)
    padding = torch.tensor([12, 0])
    padded = torch.stack([torch.cat([torch.zeros(12, dtype=torch.long), ids[0, :20]]), ids[1, :32]])
    with torch.no_grad():
        out = model(padded, padding=padding)
        assert distance(out[0, 12:], model(ids[:1, :20])[0]) < CLOSE
        assert distance(out[0, 12:], logits_of(theirs, ids[:1, :20])[0]) < CLOSE
        assert distance(model(padded)[0, 12:], out[0, 12:]) > FAR  # not hidden, not moved
        assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    "cfg", [LLAMA31_CONFIG_8B, LLAMA32_CONFIG_1B, LLAMA32_CONFIG_3B], ids=["8B", "1B", "3B"]
)
def test_rescaled_speeds_of_the_real_sizes_equal_transformers(cfg):
    freq = dict(cfg.rope_freq)
    freq["original_max_position_embeddings"] = freq.pop("original_context_length")
    config = LlamaConfig(
        hidden_size=cfg.emb_dim,
        num_attention_heads=cfg.n_heads,
        rope_parameters={"rope_type": "llama3", "rope_theta": cfg.rope_base, **freq},
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    exponents = torch.arange(0, cfg.emb_dim // cfg.n_heads, 2) / (cfg.emb_dim // cfg.n_heads)
    plain = 1 / cfg.rope_base**exponents
    assert attention_factor == 1.0
    assert distance(rescale(plain, cfg.rope_freq) / theirs, torch.ones(())) < 1e-5
    assert distance(plain / theirs, torch.ones(())) > FAR


# --- wrong twins: each differs from transformers where the right part does not ----------


def interleaved_rope(x, cos, sin):
    E = x.shape[-1]
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[..., : E // 2], sin[..., : E // 2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class WrongAttention(GroupedQueryAttention):
    rope = staticmethod(interleaved_rope)

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        B, T, _ = x.shape
        queries, keys, values = (
            w(x).view(B, T, -1, self.head_dim).transpose(1, 2)
            for w in (self.W_query, self.W_key, self.W_value)
        )
        queries, keys, values = self.rotated(queries, keys, values, cos, sin)
        return self.out_proj(
            self.attend(queries, keys, values, mask).transpose(1, 2).reshape(B, T, -1)
        )


class InterleavedLayout(WrongAttention):
    def rotated(self, q, k, v, cos, sin):
        return interleaved_rope(q, cos, sin), interleaved_rope(k, cos, sin), v


class ValuesRotatedToo(WrongAttention):
    def rotated(self, q, k, v, cos, sin):
        from helpers.positions import apply_rope

        return tuple(apply_rope(x, cos, sin) for x in (q, k, v))


class NotRotated(WrongAttention):
    def rotated(self, q, k, v, cos, sin):
        return q, k, v


class GateAndValueSwapped(FeedForward):
    def forward(self, x):
        return self.fc3(self.silu(self.fc2(x)) * self.fc1(x))


class GELUGate(FeedForward):
    def forward(self, x):
        return self.fc3(nn.functional.gelu(self.fc1(x)) * self.fc2(x))


class MeanSubtracted(RMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(dim=-1, keepdim=True))


class WeightForgotten(RMSNorm):
    def forward(self, x):
        return super().forward(x) / self.weight


class NoRescaling(RoPE):
    def __init__(self, head_dim, theta_base, context_length, freq_config=None):
        super().__init__(head_dim, theta_base, context_length)


class Factor8(RoPE):
    def __init__(self, head_dim, theta_base, context_length, freq_config=None):
        super().__init__(head_dim, theta_base, context_length, {**freq_config, "factor": 8.0})


class EverythingRescaled(RoPE):
    def __init__(self, head_dim, theta_base, context_length, freq_config=None):
        super().__init__(head_dim, theta_base, context_length)
        positions = torch.arange(context_length)[:, None] / freq_config["factor"]
        angles = positions / theta_base ** (torch.arange(0, head_dim, 2) / head_dim)
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


class OtherBase(RoPE):
    def __init__(self, head_dim, theta_base, context_length, freq_config=None):
        super().__init__(head_dim, 10_000.0, context_length, freq_config)


def repeat_not_interleaved(queries, keys, values, mask=None, dropout=0.0):
    n = queries.shape[1] // keys.shape[1]
    return attend_plain(queries, keys.repeat(1, n, 1, 1), values.repeat(1, n, 1, 1), mask)


def no_mask(queries, keys, values, mask=None, dropout=0.0):
    return attend_plain(
        queries, keys, values, torch.zeros(queries.shape[2], keys.shape[2], dtype=torch.bool)
    )


def not_scaled(queries, keys, values, mask=None, dropout=0.0):
    return attend_plain(queries * queries.shape[-1] ** 0.5, keys, values, mask)


def mask_off_by_one(queries, keys, values, mask=None, dropout=0.0):
    hidden = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).triu(2)
    return attend_plain(queries, keys, values, hidden)


WRONG = [
    dict(attention=InterleavedLayout),
    dict(attention=ValuesRotatedToo),
    dict(attention=NotRotated),
    dict(feed_forward=GateAndValueSwapped),
    dict(feed_forward=GELUGate),
    dict(norm=MeanSubtracted),
    dict(norm=WeightForgotten),
    dict(positions=NoRescaling),
    dict(positions=Factor8),
    dict(positions=EverythingRescaled),
    dict(positions=OtherBase),
    dict(attend=repeat_not_interleaved),
    dict(attend=no_mask),
    dict(attend=not_scaled),
    dict(attend=mask_off_by_one),
]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: next(iter(change.values())).__name__)
def test_wrong_twin_is_far_from_transformers(change):
    theirs, ids = reference("llama3_2"), token_ids("llama3_2")

    class Wrong(Llama3Model):
        parts = replace(Llama3Model.parts, **change)

    with torch.no_grad():
        assert distance(ours(theirs, Wrong)(ids), logits_of(theirs, ids)) > FAR
        assert distance(ours(theirs)(ids), logits_of(theirs, ids)) < CLOSE


def test_wrong_eps_is_far_from_transformers():
    """Small embeddings, so that eps counts: the mean square of the first norm's input is about 1e-4."""
    theirs, ids = reference("llama2_7b"), token_ids("llama2_7b")
    with torch.no_grad():
        theirs.model.embed_tokens.weight.mul_(0.05)
        wanted = logits_of(theirs, ids)
        assert distance(ours(theirs)(ids), wanted) < CLOSE
        assert distance(ours(theirs, norm_eps=1e-6)(ids), wanted) > FAR


def test_top_left_mask_is_wrong_with_a_cache():
    theirs, ids = reference("llama3_8b"), token_ids("llama3_8b")
    model = ours(theirs)

    def top_left(queries, keys, values, mask=None, dropout=0.0):
        return nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )

    def in_two_pieces(attend):
        for block in model.trf_blocks:
            block.att.attend = attend
        cache = KVCache(model, 2, 64)
        with torch.no_grad():
            return torch.cat([model(ids[:, :40], cache), model(ids[:, 40:64], cache)], dim=1)

    wanted = logits_of(theirs, ids)[:, :64]
    assert distance(in_two_pieces(attend_sdpa), wanted) < CLOSE
    assert distance(in_two_pieces(top_left), wanted) > FAR


@pytest.mark.parametrize("twin", ["biases", "tanh", "positions"])
def test_wrong_twin_of_gpt2_is_far_from_transformers(twin):
    theirs, ids = reference("gpt2"), token_ids("gpt2")
    model, wanted = ours(theirs), logits_of(theirs, ids)
    with torch.no_grad():
        assert distance(model(ids), wanted) < CLOSE
        if twin == "biases":
            model.trf_blocks[0].att.W_query.bias.zero_()
        elif twin == "positions":
            model.pos_emb.weight.copy_(model.pos_emb.weight.roll(1, 0))
        else:
            for block in model.trf_blocks:
                block.ff.layers[1] = nn.ReLU()
        assert distance(model(ids), wanted) > FAR


def test_models_in_bfloat16_stay_near_their_float32_twin():
    theirs, ids = reference("llama3_2"), token_ids("llama3_2")
    model = ours(theirs).to(torch.bfloat16)
    assert model.pos_emb.cos.dtype == model.pos_emb.sin.dtype == torch.float32
    with torch.no_grad():
        out, wanted = model(ids), logits_of(theirs, ids)
    assert out.dtype == torch.bfloat16
    # theirs in bfloat16 is the yardstick: rounding of the same weights, another order of casts
    with torch.no_grad():
        theirs_rounded = logits_of(redraw(theirs).to(torch.bfloat16), ids).float()
    assert (out.float() - wanted).abs().mean() < 1.5 * (theirs_rounded - wanted).abs().mean()
