"""Code written for the book keeps working when its import line changes."""

import json

import pytest
import torch
from conftest import DATA
from safetensors import safe_open

from helpers import gpt2, llama2, llama3


@pytest.fixture(scope="module")
def book():
    with safe_open(DATA / "book.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        configs = {name: json.loads(text) for name, text in file.metadata().items()}
    configs["llama"] |= {"rope_base": 500_000.0, "dtype": torch.float32}
    return configs, tensors


def weights(tensors, name):
    prefix = f"{name}/weights/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@pytest.mark.parametrize(
    ("name", "model_class"),
    [("gpt", gpt2.GPTModel), ("llama", llama3.Llama3Model), ("llama", llama3.Llama3ModelFast)],
)
def test_a_state_dict_of_the_book_loads_strictly_and_gives_its_logits(book, name, model_class):
    configs, tensors = book
    model = model_class(configs[name]).eval()
    result = model.load_state_dict(weights(tensors, name), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert not model.tied  # both matrices are kept
    with torch.no_grad():
        torch.testing.assert_close(model(tensors[f"{name}/ids"]), tensors[f"{name}/logits"],
                                   atol=1e-4, rtol=0)  # fmt: skip
    module = gpt2 if name == "gpt" else llama3
    new = module.generate_text_simple(model, tensors[f"{name}/ids"][:, :8], 12, 80)
    assert torch.equal(new, tensors[f"{name}/greedy"])


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_keys_and_shapes_are_the_books(book, name):
    configs, tensors = book
    model = (gpt2.GPTModel if name == "gpt" else llama3.Llama3Model)(configs[name])
    wanted = {k: v.shape for k, v in weights(tensors, name).items() if not k.endswith(".att.mask")}
    assert {k: v.shape for k, v in model.state_dict().items()} == wanted


def test_the_mask_of_the_book_is_accepted_only_where_it_belongs(book):
    configs, tensors = book
    state = weights(tensors, "gpt")
    model = gpt2.GPTModel(configs["gpt"])
    with pytest.raises(RuntimeError, match="final_norm.mask"):
        model.load_state_dict({**state, "final_norm.mask": torch.zeros(1)})


def test_same_seed_gives_the_same_random_gpt_as_the_book():
    """The order in which modules are built decides which random numbers they get."""
    cfg = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12,
           "drop_rate": 0.1, "qkv_bias": False}  # fmt: skip
    torch.manual_seed(123)
    model = gpt2.GPTModel(cfg).eval()
    out = gpt2.generate_text_simple(
        model=model, idx=torch.tensor([[15496, 11, 314, 716]]), max_new_tokens=6, context_size=1024
    )
    # printed in chapter 4 of the book
    assert out.tolist() == [[15496, 11, 314, 716, 27018, 24086, 47843, 30961, 42348, 7267]]


def test_parts_keep_the_books_constructors():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    mask = torch.triu(torch.ones(64, 64, dtype=torch.bool), diagonal=1)
    cos, sin = llama3.compute_rope_params(head_dim=8, theta_base=500_000, context_length=64)
    att = llama3.GroupedQueryAttention(d_in=32, d_out=32, num_heads=4, num_kv_groups=2, dtype=None)
    assert torch.equal(att(x, mask, cos, sin), att(x, mask[:6, :6], cos[:6], sin[:6]))
    assert torch.equal(att(x, mask, cos, sin), att(x, None, cos[:6], sin[:6]))
    heads = gpt2.MultiHeadAttention(
        32, 32, context_length=64, dropout=0.0, num_heads=2, qkv_bias=True
    )
    assert heads(x).shape == x.shape
    assert gpt2.LayerNorm(32)(x).shape == gpt2.GELU()(x).shape == x.shape
    assert gpt2.FeedForward({"emb_dim": 32})(x).shape == x.shape
    assert gpt2.FeedForward({"emb_dim": 32}).layers[0].out_features == 128
    cfg = {"vocab_size": 9, "context_length": 64, "emb_dim": 32, "n_heads": 4, "n_layers": 1,
           "hidden_dim": 48, "n_kv_groups": 2, "dtype": torch.float32}  # fmt: skip
    assert llama3.FeedForward(cfg)(x).shape == x.shape
    assert llama3.TransformerBlock(cfg)(x, mask, cos, sin).shape == x.shape
    gpt = {**cfg, "drop_rate": 0.0, "qkv_bias": False, "n_kv_groups": None}
    assert gpt2.TransformerBlock(gpt)(x).shape == x.shape
    assert llama2.RMSNorm(32, 1e-5)(x).shape == llama2.SiLU()(x).shape == x.shape
    assert llama2.compute_rope is llama3.apply_rope
    assert llama2.precompute_rope_params is llama3.compute_rope_params


def test_loaders_of_the_book_accept_its_dictionaries(book):
    configs, tensors = book
    source = gpt2.GPTModel(configs["gpt"])
    source.load_state_dict(weights(tensors, "gpt"))
    blocks = []
    for block in source.trf_blocks:
        att, ff = block.att, block.ff.layers
        blocks.append({
            "attn": {
                "c_attn": {
                    "w": torch.cat([att.W_query.weight, att.W_key.weight, att.W_value.weight]).T,
                    "b": torch.cat([att.W_query.bias, att.W_key.bias, att.W_value.bias]),
                },
                "c_proj": {"w": att.out_proj.weight.T, "b": att.out_proj.bias},
            },
            "mlp": {
                "c_fc": {"w": ff[0].weight.T, "b": ff[0].bias},
                "c_proj": {"w": ff[2].weight.T, "b": ff[2].bias},
            },
            "ln_1": {"g": block.norm1.scale, "b": block.norm1.shift},
            "ln_2": {"g": block.norm2.scale, "b": block.norm2.shift},
        })  # fmt: skip
    params = {"wte": source.tok_emb.weight, "wpe": source.pos_emb.weight, "blocks": blocks,
              "g": source.final_norm.scale, "b": source.final_norm.shift}  # fmt: skip
    as_arrays = torch.utils._pytree.tree_map(lambda t: t.detach().numpy(), params)
    model = gpt2.GPTModel(configs["gpt"]).eval()
    gpt2.load_weights_into_gpt(model, as_arrays)
    assert model.tied  # the dictionary has no head
    state = model.state_dict()
    for key, value in source.state_dict().items():
        if key != "out_head.weight":
            assert torch.equal(state[key], value), key


def test_assign_keeps_the_parameter_object_and_its_dtype():
    for device in ("cpu", "meta"):
        left = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16, device=device))
        values = torch.arange(6.0).reshape(2, 3)
        right = values.clone()
        assert llama3.assign(left, right, "w") is left
        right += 1  # the caller's tensor stays the caller's
        assert left.dtype == torch.bfloat16 and torch.equal(left.float(), values)
    with pytest.raises(ValueError, match=r"'model.norm.weight'.*\(2, 3\).*\(3, 2\)"):
        llama3.assign(left, torch.zeros(3, 2), "model.norm.weight")


def test_streaming_of_the_book_yields_the_greedy_tokens(book):
    configs, tensors = book
    model = llama3.Llama3Model(configs["llama"]).eval()
    model.load_state_dict(weights(tensors, "llama"))
    ids, wanted = tensors["llama/ids"][:1, :8], tensors["llama/greedy"][:1, 8:]
    steps = list(llama3.generate_text_simple_stream(model, ids, 12))
    assert [step.shape for step in steps] == [(1, 1)] * 12
    assert torch.equal(torch.cat(steps, dim=1), wanted)
    stop = wanted[0, 5].item()
    steps = list(llama3.generate_text_simple_stream(model, ids, 12, eos_token_id=stop))
    assert len(steps) == wanted[0].tolist().index(stop)


def test_generate_of_the_book_crops_to_context_size_and_stops_before_the_stop_token(book):
    configs, tensors = book
    model = gpt2.GPTModel(configs["gpt"]).eval()
    model.load_state_dict(weights(tensors, "gpt"))
    ids = tensors["gpt/ids"][:1]
    out = gpt2.generate(
        model=model, idx=ids, max_new_tokens=20, context_size=96, top_k=5
    )  # 80 + 20 > 96
    assert out.shape == (1, 100)
    eos = out[0, 90].item()
    first = out[0, 80:].tolist().index(eos)
    stopped = gpt2.generate(model, ids, 20, 96, eos_id=eos)
    assert torch.equal(stopped, out[:, : 80 + first])
    hot = gpt2.generate(model, ids, 5, 96, temperature=1.4, top_k=25)
    assert hot.shape == (1, 85)


def test_the_head_can_be_replaced_for_another_task(book):
    """Chapter 6 gives the model a head with two outputs."""
    configs, tensors = book
    model = gpt2.GPTModel({**configs["gpt"], "tie_embeddings": True})
    model.out_head = torch.nn.Linear(32, 2)
    model.to(torch.float64)
    assert model(tensors["gpt/ids"]).shape == (2, 80, 2)
    assert not model.tied
