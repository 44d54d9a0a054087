"""Sampling, stopping, batches, streams, the cache; and what is refused before the first token."""

import itertools

import pytest
import torch
from conftest import ours, reference, token_ids
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import helpers.generate
from helpers.generate import (
    generate,
    generate_batch,
    generate_text_simple,
    next_token,
    stream,
    stream_ids,
)
from helpers.kv_cache import KVCache
from helpers.tokenizers import GPT2Tokenizer


@pytest.fixture(scope="module")
def model():
    return ours(reference("llama3_2"))


def count_calls(model, monkeypatch):
    calls, forward = [], model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda ids, *a, **k: calls.append(tuple(ids.shape)) or forward(ids, *a, **k),
    )
    return calls


def test_n_tokens_are_one_prefill_and_n_minus_1_decode_calls(model, monkeypatch):
    calls = count_calls(model, monkeypatch)
    generate(model, token_ids("llama3_2")[:, :10], 7)
    assert calls == [(2, 10)] + [(2, 1)] * 6
    calls.clear()
    generate(model, token_ids("llama3_2")[:, :10], 3, use_cache=False)
    assert calls == [(2, 10), (2, 11), (2, 12)]


def test_cached_equals_uncached(model):
    ids = token_ids("llama3_2")[:, :30]
    assert torch.equal(generate(model, ids, 40), generate(model, ids, 40, use_cache=False))
    assert torch.equal(generate(model, ids, 40), generate_text_simple(model, ids, 40, 512))


def test_prefill_computes_the_head_for_one_position(model, monkeypatch):
    seen = []
    handle = model.out_head.register_forward_hook(
        lambda m, args, out: seen.append(tuple(out.shape))
    )
    generate(model, token_ids("llama3_2")[:, :30], 2)
    handle.remove()
    assert seen == [(2, 1, 257)] * 2


# --- sampling ----------


def frequencies(logits, n=20_000, **kwargs):
    generator = torch.Generator().manual_seed(0)
    draws = next_token(logits.expand(n, -1), generator=generator, **kwargs)
    return torch.bincount(draws, minlength=logits.shape[-1]) / n


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 1.0])
def test_draws_follow_the_distribution_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(3)) * 2
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    wanted = wanted.softmax(-1)[0]
    found = frequencies(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert (found[wanted == 0] == 0).all()
    assert (found - wanted).abs().max() < 0.015  # about four standard errors of 20,000 draws


def test_top_k_is_taken_in_each_row():
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0], [0.0, 0.0, 50.0, 40.0]]).repeat(500, 1)
    draws = next_token(logits, 2.0, top_k=2, generator=torch.Generator().manual_seed(0)).reshape(
        -1, 2
    )
    assert set(draws[:, 0].tolist()) == {0, 1} and set(draws[:, 1].tolist()) <= {2, 3}


def test_temperature_0_is_greedy_and_a_seed_repeats(model):
    ids = token_ids("llama3_2")[:, :10]
    greedy = generate(model, ids, 12)
    assert torch.equal(greedy, generate(model, ids, 12, temperature=0.0, top_k=5, top_p=0.5))
    assert torch.equal(greedy, generate(model, ids, 12, temperature=5.0, top_k=1))
    hot = [generate(model, ids, 12, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(hot[0], hot[1]) and not torch.equal(hot[0], hot[2])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    generate(model, ids, 3, temperature=1.0, seed=4)
    assert torch.equal(
        torch.get_rng_state(), state
    )  # a seed of its own leaves the caller's numbers alone


def test_top_k_above_the_vocabulary_keeps_every_token(model):
    ids = token_ids("llama3_2")[:, :10]
    kept = generate(model, ids, 8, temperature=3.0, top_k=10**6, seed=1)
    assert torch.equal(kept, generate(model, ids, 8, temperature=3.0, seed=1))


# --- stopping ----------


def first_tokens(model, prompt, n=30):
    return generate_batch(model, [prompt], n)[0]


def test_the_first_of_several_stop_tokens_ends_a_row(model, monkeypatch):
    prompt = token_ids("llama3_2")[0, :10].tolist()
    plain = first_tokens(model, prompt)
    stops = {plain[20], plain[9], 256}
    end = min(plain.index(s) for s in stops if s in plain)
    calls = count_calls(model, monkeypatch)
    assert generate_batch(model, [prompt], 30, eos_id=stops) == [plain[:end]]
    assert len(calls) == end + 1  # on a CPU nothing is computed beyond the stop token
    assert generate_batch(model, [prompt], 30, eos_id=plain[0]) == [[]]
    out = generate(model, torch.tensor([prompt]), 30, eos_id=list(stops))
    assert out[0].tolist() == prompt + plain[:end]


def test_rows_finish_on_their_own(model):
    prompts = [row.tolist() for row in token_ids("llama3_2", batch=4)[:, :12]]
    alone = [first_tokens(model, p) for p in prompts]
    stops = {alone[0][3], alone[2][17]}

    def cut(row):
        return list(itertools.takewhile(lambda t: t not in stops, row))

    together = generate_batch(model, prompts, 30, eos_id=stops)
    assert together == [cut(row) for row in alone]
    assert len({len(row) for row in together}) > 1
    out = generate(model, torch.tensor(prompts), 30, eos_id=stops)
    longest = max(map(len, together))
    for row, new, whole in zip(out.tolist(), together, alone, strict=True):
        filled = new + [whole[len(new)]] * (longest - len(new)) if len(new) < longest else new
        assert row[12:] == filled


def test_the_stop_test_on_a_gpu_is_rare_and_its_surplus_is_cut(model, monkeypatch):
    """The same code path with the interval of a GPU."""
    prompts = [row.tolist() for row in token_ids("llama3_2", batch=2)[:, :12]]
    alone = [first_tokens(model, p) for p in prompts]
    stops = {alone[0][3], alone[1][3]}
    wanted = generate_batch(model, prompts, 30, eos_id=stops)
    looks = []

    class Device:
        type = "cuda"

    collect = helpers.generate._collect
    monkeypatch.setattr(
        helpers.generate, "_stop_tensor", lambda ids, device: torch.tensor(sorted(ids))
    )
    real_zeros, real_empty = torch.zeros, torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: real_zeros(*a, **k))
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **k: real_empty(*a, **k))

    def steps():
        for pair in zip(*alone, strict=True):
            looks.append(1)
            yield torch.tensor(pair)

    tokens, lengths = collect(steps(), 2, stops, Device())
    assert len(looks) == 8
    assert [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)] == wanted


# --- streams ----------


def test_a_stream_is_the_same_text_in_pieces():
    tokenizer = GPT2Tokenizer()
    theirs = reference("gpt2", vocab_size=50_257)
    model = ours(theirs)
    prompt = tokenizer.encode("Hello")
    ids = list(stream_ids(model, prompt, 30))
    assert ids == generate_batch(model, [prompt], 30)[0]
    pieces = list(stream(model, tokenizer, prompt, 30))
    assert len(pieces) > 5 and "".join(pieces) == tokenizer.decode(prompt + ids)[len("Hello") :]
    stop = ids[7]
    assert list(stream_ids(model, prompt, 30, eos_id=stop)) == ids[: ids.index(stop)]
    one = stream(model, tokenizer, prompt, 30)
    next(one)
    one.close()  # a reader who has seen enough


# --- refusals ----------


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([], {}, "a prompt is empty"),
        ([[1, 2], []], {}, "a prompt is empty"),
        ([[1, 257]], {}, r"token 257 is outside the vocabulary of 0 to 256"),
        ([[1, -1]], {}, r"token -1 is outside"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1 must be at least 0"),
        ([[1] * 500], {"max_new_tokens": 13}, "500 prompt tokens and max_new_tokens=13 exceed the context of 512: "
                                              "at most 12 new tokens fit"),
        ([[1]], {"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"top_k": 0}, "top_k=0 must be a whole number of at least 1"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ([[1]], {"top_p": 1.1}, "top_p=1.1"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_before_anything_is_computed(
    prompts, arguments, message, model, monkeypatch
):
    calls = count_calls(model, monkeypatch)
    with pytest.raises(ValueError, match=message):
        generate_batch(model, prompts, **{"max_new_tokens": 5, **arguments})
    with pytest.raises(ValueError, match=message):
        stream_ids(model, prompts[-1] if prompts else [], **{"max_new_tokens": 5, **arguments})
    if prompts and all(len(p) == len(prompts[0]) for p in prompts):
        with pytest.raises(ValueError, match=message):
            generate(model, torch.tensor(prompts), **{"max_new_tokens": 5, **arguments})
    assert calls == []


def test_no_new_tokens_is_no_work(model, monkeypatch):
    calls = count_calls(model, monkeypatch)
    ids = token_ids("llama3_2")[:, :10]
    assert torch.equal(generate(model, ids, 0), ids)
    assert generate_batch(model, ids.tolist(), 0) == [[], []]
    assert list(stream_ids(model, ids[0].tolist(), 0)) == [] and calls == []


def test_the_last_token_that_fits_is_generated(model):
    prompt = token_ids("llama3_2")[0, :10].tolist()
    assert len(generate_batch(model, [prompt], 502)[0]) == 502


def test_generating_leaves_the_model_as_it_was(model):
    model.train()
    model.trf_blocks[1].eval()
    generate(model, token_ids("llama3_2")[:, :5], 2)
    assert model.training and model.trf_blocks[0].training and not model.trf_blocks[1].training
    model.eval()
    assert not any(p.grad is not None for p in model.parameters())


def test_dropout_is_off_while_generating():
    model = ours(reference("gpt2"), drop_rate=0.5).train()
    ids = token_ids("gpt2")[:, :10]
    assert torch.equal(generate(model, ids, 8), generate(model, ids, 8))


# --- the cache ----------


def test_the_cache_is_made_once_and_counts_itself(model):
    cache, cfg = KVCache(model, 3, 100), model.cfg
    head = cfg.emb_dim // cfg.n_heads
    assert cache.cache_bytes == 2 * cfg.n_layers * 3 * cfg.n_kv_groups * 100 * head * 4
    addresses = [keys.data_ptr() for keys in cache.keys]
    ids = token_ids("llama3_2", batch=3)
    with torch.no_grad():
        wanted = model(ids[:, :20], cache)
        assert cache.position == 20
        cache.reset()
        assert torch.equal(
            model(ids[:, :20], cache), wanted
        )  # a second prompt does not see the first
    assert addresses == [keys.data_ptr() for keys in cache.keys]


def test_what_does_not_fit_into_the_cache_is_refused_and_changes_nothing(model):
    cache, ids = KVCache(model, 2, 12), token_ids("llama3_2")
    with torch.no_grad():
        model(ids[:, :10], cache)
        with pytest.raises(ValueError, match="room for 12 tokens; it holds 10 and got 3 more"):
            model(ids[:, 10:13], cache)
        assert cache.position == 10
        with pytest.raises(ValueError, match="made for 2 rows, not 1"):
            model(ids[:1, 10:11], cache)
        out = model(ids[:, 10:12], cache)
        torch.testing.assert_close(out, model(ids[:, :12])[:, 10:], atol=1e-4, rtol=0)


def test_a_cache_in_bfloat16_has_the_models_dtype(model):
    import copy

    half = copy.deepcopy(model).to(torch.bfloat16)
    assert KVCache(half, 1, 8).keys[0].dtype == torch.bfloat16


def test_a_cache_is_freed_as_soon_as_nobody_needs_it(model):
    import gc
    import weakref

    gc.disable()
    try:
        cache = KVCache(model, 1, 16)
        with torch.no_grad():
            model(token_ids("llama3_2")[:1, :8], cache)
        kept = weakref.ref(cache.keys[0])
        del cache
        assert kept() is None  # no reference cycle waits for the garbage collector
    finally:
        gc.enable()


def test_lora_of_the_book_works():
    class WithLoRA(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear, self.a = (
                linear,
                torch.nn.Linear(linear.in_features, linear.out_features, bias=False),
            )

        def forward(self, x):
            return self.linear(x) + self.a(x)

    def wrap(module):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, WithLoRA(child))
            else:
                wrap(child)

    wrapped = ours(reference("llama3_8b"))
    wrap(wrapped)
    wrapped.to(torch.float32)
    ids = token_ids("llama3_8b")[:, :8]
    assert torch.equal(generate(wrapped, ids, 5), generate(wrapped, ids, 5, use_cache=False))


def test_stop_tokens_of_any_kind_of_integer_and_extreme_temperatures(model):
    import numpy as np

    prompt = token_ids("llama3_2")[0, :10].tolist()
    plain = first_tokens(model, prompt)
    for stop in (np.int64(plain[4]), torch.tensor(plain[4]), {np.int64(plain[4])}, [plain[4]]):
        assert generate_batch(model, [prompt], 30, eos_id=stop) == [plain[: plain.index(plain[4])]]
    cold = generate_batch(model, [prompt], 10, temperature=1e-40, seed=0)
    assert cold == [plain[:10]]
    with pytest.raises(ValueError, match=r"two axes, \(B, T\)"):
        generate(model, torch.tensor(prompt), 3)


def test_dropout_of_a_single_part_is_off_too():
    gpt = ours(reference("gpt2"), drop_rate=0.5).eval()
    gpt.trf_blocks[0].train()
    ids = token_ids("gpt2")[:, :10]
    assert torch.equal(generate(gpt, ids, 8), generate(gpt, ids, 8))
    assert gpt.trf_blocks[0].training and not gpt.training
