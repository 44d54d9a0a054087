"""Speed without another result: prepared models, and the decode step of constant shape."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from conftest import LINE, ours, reference, token_ids
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend

import helpers.fast
from helpers.attention import attend_plain
from helpers.fast import (
    CompiledDecoding,
    FastAttention,
    OneMatrix,
    attention_backend,
    fastest,
    multiply,
    pinned,
    prepare_for_decoding,
)
from helpers.generate import generate, generate_batch, stream_ids
from helpers.kv_cache import KVCache
from helpers.weights import save_model


@pytest.fixture
def pair():
    """A model as it is taught, and the same prepared."""
    model = ours(reference("llama3_2"))
    return model, prepare_for_decoding(copy.deepcopy(model))


def fused(model):
    return [m.together() is not None for m in model.modules() if isinstance(m, OneMatrix)]


def bytes_of(model):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@torch.no_grad()
def apart(model, other, ids=None):
    ids = token_ids("llama3_2") if ids is None else ids
    return (model(ids) - other(ids)).abs().max().item()


@pytest.mark.parametrize("name", LINE)
def test_a_prepared_model_gives_the_same_logits(name):
    model = ours(reference(name))
    ids = token_ids(name)
    prepared = prepare_for_decoding(copy.deepcopy(model))
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(ids)  # two float32 sums may be 1e-4 from each other
        assert (prepared(ids) - wanted).abs().max() < 1e-4
        cache = KVCache(prepared, 2, ids.shape[1])
        pieces = [prepared(piece, cache) for piece in (ids[:, :20], ids[:, 20:33])]
        pieces += [prepared(ids[:, at : at + 1], cache) for at in range(33, ids.shape[1])]
        assert (torch.cat(pieces, dim=1) - wanted).abs().max() < 1e-4
        one_row = KVCache(prepared, 1, ids.shape[1])
        pieces = [prepared(ids[:1, at : at + 1], one_row) for at in range(ids.shape[1])]
        assert (torch.cat(pieces, dim=1) - wanted[:1]).abs().max() < 1e-4


def test_greedy_tokens_are_the_same_alone_and_in_a_padded_batch(pair):
    model, prepared = pair
    ids = token_ids("llama3_2")
    assert torch.equal(generate(model, ids[:, :30], 60), generate(prepared, ids[:, :30], 60))
    prompts = [ids[0, :30].tolist(), ids[1, :7].tolist(), ids[1, :19].tolist()]
    wanted = generate_batch(model, prompts, 40)
    assert wanted == generate_batch(prepared, prompts, 40)
    for prompt, row in zip(prompts, wanted, strict=True):
        assert generate_batch(prepared, [prompt], 40) == [row]
        assert list(stream_ids(prepared, prompt, 40)) == row


def test_bfloat16_logits_are_as_near_to_float32_as_the_taught_ones(pair):
    exact = pair[0]
    model = copy.deepcopy(exact).bfloat16()
    prepared = prepare_for_decoding(copy.deepcopy(model))
    assert apart(prepared, exact) < 1.25 * apart(model, exact)
    ids = token_ids("llama3_2")[:1]
    with torch.no_grad():
        cache = KVCache(prepared, 1, ids.shape[1])
        steps = torch.cat([prepared(ids[:, i : i + 1], cache) for i in range(ids.shape[1])], 1)
        assert (steps - exact(ids)).abs().max() < 1.25 * apart(model, exact, ids)


def test_preparing_keeps_names_values_memory_and_class(pair):
    model, prepared = pair
    assert type(prepared) is type(model)
    before, after = model.state_dict(), prepared.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert bytes_of(prepared) == sum(p.nbytes for p in model.parameters())
    assert all(fused(prepared)) and len(fused(prepared)) == 2 * model.cfg.n_layers
    assert prepared.tied
    weights = [p.data_ptr() for p in prepared.parameters()]
    assert prepare_for_decoding(prepared) is prepared
    assert weights == [p.data_ptr() for p in prepared.parameters()]


def change(model, name, weight):
    linear = model.get_submodule(name)
    with torch.no_grad():
        if weight == "in place":
            linear.weight.mul_(1.5)
        elif weight == "data":
            linear.weight.data = linear.weight * 1.5
        elif weight == "parameter":
            linear.weight = nn.Parameter(linear.weight * 1.5)
        elif weight == "module":
            new = nn.Linear(linear.in_features, linear.out_features, bias=False)
            new.weight.copy_(linear.weight * 1.5)
            model.get_submodule(name.rsplit(".", 1)[0]).register_module(name.rsplit(".", 1)[1], new)
        else:
            state = {**model.state_dict(), name + ".weight": linear.weight * 1.5}
            model.load_state_dict(state, assign=weight == "assign")


@pytest.mark.parametrize("name", ["att.W_query", "att.W_key", "att.W_value", "ff.fc1", "ff.fc2"])
@pytest.mark.parametrize("how", ["in place", "data", "parameter", "module", "load", "assign"])
def test_a_changed_weight_changes_the_logits(pair, name, how):
    model, prepared = pair
    for each in pair:
        change(each, f"trf_blocks.1.{name}", how)
    assert apart(prepared, model) < 1e-4
    assert apart(prepare_for_decoding(prepared), model) < 1e-4 and all(fused(prepared))
    assert apart(prepared, ours(reference("llama3_2"))) > 1e-2


def test_an_adapter_around_a_matrix_is_used(pair):
    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    for each in pair:
        each.trf_blocks[0].att.W_query = Doubled(each.trf_blocks[0].att.W_query)
    model, prepared = pair
    assert apart(prepared, model) < 1e-4
    assert apart(prepare_for_decoding(prepared), model) < 1e-4


def test_hooks_on_a_named_matrix_are_called(pair):
    seen = []
    pair[1].trf_blocks[0].att.W_key.register_forward_hook(lambda *args: seen.append(1))
    assert apart(*pair) < 1e-4 and seen


def test_a_forward_of_ones_own_is_called(pair):
    for each in pair:
        linear = each.trf_blocks[0].att.W_key
        linear.forward = lambda x, linear=linear: 2 * nn.functional.linear(x, linear.weight)
    assert apart(*pair) < 1e-4


@pytest.mark.parametrize("how", ["module", "hook"])
def test_another_activation_is_used(pair, how):
    for each in pair:
        if how == "module":
            each.trf_blocks[0].ff.silu = nn.Tanh()
        else:
            each.trf_blocks[0].ff.silu.register_forward_hook(lambda m, args, out: 2 * out)
    assert apart(*pair) < 1e-4


def test_one_token_attends_with_the_given_function_and_a_wide_mask(pair):
    model, ids = pair[1], token_ids("llama3_2")[:1, :9]
    calls = []

    def attend(queries, *rest):
        calls.append(queries.shape[2])
        return attend_plain(queries, *rest)

    with torch.no_grad():
        wanted = pair[0](ids)[:, -1:]
        for give in (None, attend):
            for block in model.trf_blocks:
                block.att.attend = give or block.att.attend
            cache = KVCache(model, 1, 20)
            model(ids[:, :8], cache)
            calls.clear()
            wide = torch.zeros(1, 1, 1, 20, dtype=torch.bool)
            at = torch.tensor([8])
            assert (model.at(ids[:, 8:], at, wide, cache) - wanted).abs().max() < 1e-4
    assert calls == [1] * len(model.trf_blocks)


def test_autocast_computes_the_taught_way(pair):
    model, prepared = pair
    ids = token_ids("llama3_2")[:1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        caches = [KVCache(each, 1, 9) for each in pair]
        for piece in (ids[:, :8], ids[:, 8:9]):
            got, wanted = (
                each(piece, c) for each, c in zip((prepared, model), caches, strict=True)
            )
            assert got.dtype == wanted.dtype
            assert (got - wanted).abs().max() < 0.05 * wanted.abs().max()
        x, weight = torch.randn(1, 8).bfloat16(), torch.randn(4, 8)
        assert multiply(x, weight).dtype == torch.bfloat16


def test_copies_and_conversions_are_never_stale(pair):
    model, prepared = pair
    twin = copy.deepcopy(prepared)
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    thawed = torch.load(file, weights_only=False)
    for other in (twin, thawed):
        assert not any(fused(other)) and apart(other, model) < 1e-4
        assert bytes_of(other) == bytes_of(model)
    with torch.no_grad():
        prepared.trf_blocks[0].att.W_query.weight.zero_()
    assert apart(twin, model) < 1e-4 and apart(prepared, model) > 1e-2

    for convert in (lambda m: m.double(), lambda m: m.bfloat16().float(), lambda m: m.to("cpu")):
        converted = convert(prepare_for_decoding(copy.deepcopy(model)))
        wanted = convert(copy.deepcopy(model))
        assert apart(converted, wanted) < 1e-4
        assert all(m.one is None for m in converted.modules() if isinstance(m, OneMatrix))
        assert apart(prepare_for_decoding(converted), wanted) < 1e-4 and all(fused(converted))


def test_a_prepared_model_can_be_saved_and_trained(pair, tmp_path):
    from helpers.checkpoints import load_model

    model, prepared = pair
    save_model(prepared, tmp_path / "saved")
    assert apart(load_model(tmp_path / "saved", dtype="float32").model, model) < 1e-4
    ids = token_ids("llama3_2")
    for each in pair:
        each(ids).logsumexp(-1).mean().backward()
    for mine, theirs in zip(prepared.parameters(), model.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() < 1e-4 * theirs.grad.norm()
    torch.optim.SGD(prepared.parameters(), lr=0.1).step()
    assert apart(prepared, model) > 1e-2 and all(fused(prepared))
    taught = prepared(ids)  # with gradients the taught classes compute
    with torch.no_grad():
        assert (prepared(ids) - taught).abs().max() < 1e-4


def test_keys_and_values_are_not_repeated_and_one_row_is_a_matrix_vector_product(pair, monkeypatch):
    calls = []
    attend, mv = nn.functional.scaled_dot_product_attention, torch.mv
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention",
        lambda q, k, v, **kw: calls.append((q.shape[1], k.shape[1])) or attend(q, k, v, **kw),
    )  # fmt: skip
    monkeypatch.setattr(torch, "mv", lambda w, x: calls.append("mv") or mv(w, x))
    model = pair[1]
    cache = KVCache(model, 1, 9)
    with torch.no_grad():
        model(token_ids("llama3_2")[:1, :8], cache, last_only=True)
        calls.clear()
        model(token_ids("llama3_2")[:1, 8:9], cache)
    G = model.cfg.n_kv_groups
    assert calls == ["mv", (G, G), "mv", "mv", "mv"] * model.cfg.n_layers + ["mv"]


def test_generate_fast_is_one_prefill_and_n_minus_1_decode_calls(pair, monkeypatch):
    model, wanted = pair[0], generate(pair[1], token_ids("llama3_2")[:, :10], 7)
    calls, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *a, **k: calls.append(tuple(ids.shape)) or forward(ids, *a, **k))  # fmt: skip
    shapes = []
    model.out_head.register_forward_hook(lambda m, a, out: shapes.append(tuple(out.shape)))
    assert torch.equal(generate(model, token_ids("llama3_2")[:, :10], 7, fast=True), wanted)
    assert calls == [(2, 10)] + [(2, 1)] * 6
    assert shapes == [(2, 1, 257)] * 7
    assert all(isinstance(block.att, FastAttention) for block in model.trf_blocks)


# --- the compiled step; its graph is checked, not its speed, so no C++ compiler is needed ----------


@pytest.fixture
def compiled(pair):
    torch._dynamo.reset()
    counters.clear()
    return CompiledDecoding(pair[1], whole=True, backend="eager")


@torch.no_grad()
def decode(run, ids, cache, start=20, padding=None):
    pieces = [run(ids[:, :start], cache, padding=padding, last_only=True)]
    for at in range(start, ids.shape[1]):
        pieces.append(run(ids[:, at : at + 1], cache, padding=padding, last_only=True))
    return torch.cat(pieces, dim=1)


def test_the_compiled_step_is_right_and_compiled_once_for_64_tokens(pair, compiled):
    model, ids = pair[0], token_ids("llama3_2")
    got = decode(compiled, ids, compiled.cache(2, 96))
    with torch.no_grad():
        assert (got - model(ids)[:, 19:]).abs().max() < 1e-4
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    again = decode(compiled, ids, compiled.cache(2, 80), start=7)
    with torch.no_grad():
        assert (again - model(ids)[:, 6:]).abs().max() < 1e-4
    assert counters["stats"]["unique_graphs"] == 1
    assert len(compiled.lent) == 1


def test_the_compiled_step_knows_padding(pair, compiled):
    model, ids = pair[0], token_ids("llama3_2")
    padding = torch.tensor([0, 9])
    with torch.no_grad():
        wanted = decode(model, ids, KVCache(model, 2, ids.shape[1]), padding=padding)
    got = decode(compiled, ids, compiled.cache(2, ids.shape[1]), padding=padding)
    assert (got - wanted).abs().max() < 1e-4


def test_a_gpu_gets_the_compiled_step_and_keeps_it(pair, compiled, monkeypatch):
    model, ids = pair[1], token_ids("llama3_2")[:, :10]
    wanted = generate(model, ids, 20)
    monkeypatch.setattr(helpers.fast, "CompiledDecoding", lambda model: compiled)
    monkeypatch.setattr(helpers.fast, "on_cuda", lambda model: True)
    assert torch.equal(generate(model, ids, 20, fast=True), wanted)
    assert torch.equal(generate(model, ids, 20, fast=True), wanted)
    assert counters["stats"]["unique_graphs"] == 1
    assert fastest(model)[0] is compiled
    twin = copy.deepcopy(model)
    assert twin.__dict__["compiled"] is None  # a copy compiles anew, with weights of its own
    assert pickle.loads(pickle.dumps(model)).__dict__["compiled"] is None


def test_an_adapter_around_a_matrix_is_used_by_the_compiled_step_too(pair, compiled):
    ids = token_ids("llama3_2")
    decode(compiled, ids, compiled.cache(2, 96))
    for each in pair:
        hook = nn.Sequential(each.trf_blocks[0].att.W_key, nn.Tanh())
        each.trf_blocks[0].att.W_key = hook
    assert not isinstance(prepare_for_decoding(pair[1]).trf_blocks[0].att.one, torch.Tensor)
    got = decode(compiled, ids, compiled.cache(2, 96))
    with torch.no_grad():
        assert (got - pair[0](ids)[:, 19:]).abs().max() < 1e-4


def test_two_texts_at_once_have_caches_of_their_own(pair, compiled, monkeypatch):
    monkeypatch.setattr(helpers.fast, "CompiledDecoding", lambda model: compiled)
    monkeypatch.setattr(helpers.fast, "on_cuda", lambda model: True)
    prompts = [row[:9].tolist() for row in token_ids("llama3_2")]
    wanted = [list(stream_ids(pair[0], prompt, 12)) for prompt in prompts]
    texts = [stream_ids(pair[1], prompt, 12, fast=True) for prompt in prompts]
    assert [list(row) for row in zip(*zip(*texts, strict=True), strict=True)] == wanted
    del texts
    assert list(stream_ids(pair[1], prompts[0], 12, fast=True)) == wanted[0]
    assert len(compiled.lent) == 2  # given back, and used again


def test_more_sizes_than_the_compiler_keeps_are_right_and_old_caches_go(pair, compiled):
    limit = torch._dynamo.config.patch(recompile_limit=2)
    ids = token_ids("llama3_2")[:1, :12]
    with torch.no_grad():
        wanted = pair[0](ids)[:, 9:]
    for rows in range(1, 7):
        with limit:
            got = decode(compiled, ids.repeat(rows, 1), compiled.cache(rows, 20), start=10)
        assert (got - wanted).abs().max() < 1e-4
    assert len(compiled.lent) == helpers.fast.KEPT_CACHES


@pytest.mark.parametrize("whole", [True, False])
def test_what_changes_between_two_texts_is_seen(pair, whole):
    torch._dynamo.reset()
    model, prepared = pair
    run = CompiledDecoding(prepared, whole=whole, backend="eager")
    ids = token_ids("llama3_2")[:, :24]
    decode(run, ids, run.cache(2, 24))
    for change_it in (
        lambda each: change(each, "trf_blocks.1.att.W_query", "data"),
        lambda each: each.trf_blocks.__setitem__(0, copy.deepcopy(each.trf_blocks[1])),
        lambda each: setattr(each, "final_norm", nn.Identity()),
    ):
        for each in pair:
            change_it(each)
        with torch.no_grad():
            wanted = model(ids)[:, 19:]
        off = (decode(run, ids, run.cache(2, 24)) - wanted).abs().max()
        assert off < 1e-5 * wanted.abs().max(), (off, wanted.abs().max())


def test_another_compilation_of_a_prepared_model_is_never_stale(pair):
    torch._dynamo.reset()
    model, prepared = pair
    compiled = torch.compile(prepared, fullgraph=True, backend="eager")
    assert apart(compiled, model) < 1e-4
    for each in pair:
        change(each, "trf_blocks.1.att.W_query", "data")
    assert apart(compiled, model) < 1e-4


def test_a_used_cache_comes_back_empty_of_nan(pair, compiled):
    cache = compiled.cache(2, 96)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    del cache, tensor
    got = decode(compiled, token_ids("llama3_2")[:, :24], compiled.cache(2, 96))
    assert len(compiled.lent) == 1 and got.isfinite().all()


def test_what_is_made_in_inference_mode_works_outside(pair, compiled):
    model, ids = copy.deepcopy(pair[0]), token_ids("llama3_2")[:, :24]
    with torch.inference_mode():
        prepare_for_decoding(model)
        decode(compiled, ids, compiled.cache(2, 96))
    assert not any(p.is_inference() for p in model.parameters())
    model(ids).mean().backward()
    got = decode(compiled, ids, compiled.cache(2, 96))
    with torch.no_grad():
        assert (got - pair[0](ids)[:, 19:]).abs().max() < 1e-4


def test_a_moved_model_is_compiled_anew(pair, monkeypatch):
    model = prepare_for_decoding(pair[1], compiled=True)
    old = model.compiled
    assert prepare_for_decoding(model, compiled=True).compiled is old
    old.device = torch.device("cuda")  # as if the model had come from there
    assert fastest(model)[0] is model
    assert prepare_for_decoding(model, compiled=True).compiled is not old


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_batch_in_half_precision_compiles_as_one_graph(pair, dtype):
    torch._dynamo.reset()
    run = CompiledDecoding(pair[1].to(dtype), whole=True, backend="eager")
    prepare_for_decoding(pair[1])
    ids = token_ids("llama3_2")[:1, :22].repeat(9, 1)
    assert decode(run, ids, run.cache(9, 22)).isfinite().all()


def test_a_cpu_compiles_only_when_asked(pair):
    model = pair[1]
    assert fastest(model)[0] is model
    prepare_for_decoding(model, compiled=True)
    assert fastest(model)[0] is model.compiled and model.compiled.stepping is not model


def test_blocks_compiled_one_by_one_are_right_too(pair):
    torch._dynamo.reset()
    counters.clear()
    model, ids = pair[0], token_ids("llama3_2")
    run = CompiledDecoding(pair[1], whole=False, backend="eager")
    got = decode(run, ids, run.cache(2, 96))
    with torch.no_grad():
        assert (got - model(ids)[:, 19:]).abs().max() < 1e-4
    assert counters["stats"]["unique_graphs"] == 1  # all blocks share it


# --- which kernel attends ----------


@pytest.mark.parametrize(
    "device, dtype, capability, wanted",
    [
        ("cuda", torch.bfloat16, (9, 0), "FLASH_ATTENTION"),
        ("cuda", torch.float16, (8, 0), "FLASH_ATTENTION"),
        ("cuda", torch.float32, (9, 0), "EFFICIENT_ATTENTION"),
        ("cuda", torch.float16, (7, 5), "EFFICIENT_ATTENTION"),
        ("cpu", torch.float32, None, "FLASH_ATTENTION"),
        ("mps", torch.float16, None, "MATH"),
    ],
)
def test_flash_is_chosen_where_it_can_run(device, dtype, capability, wanted):
    assert attention_backend(device, dtype, capability).name == wanted


def test_the_pinned_kernel_runs_and_gives_the_same(pair):
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "math")):
        model = copy.deepcopy(pair[0])
        for block in model.trf_blocks:
            block.att.attend = pinned(backend)
        with torch.no_grad(), torch.profiler.profile() as profile:
            model(token_ids("llama3_2"))
        ran = {e.name for e in profile.events() if "_scaled_dot_product" in e.name}
        assert len(ran) == 1 and name in ran.pop()
        assert apart(model, pair[0]) < 1e-4


def test_matrices_already_side_by_side_are_not_copied(pair):
    model = pair[1]
    with torch.device("meta"):
        twin = type(model)(model.cfg)
    twin.load_state_dict(model.state_dict(), assign=True)
    weights = [p.data_ptr() for p in model.parameters()]
    assert [p.data_ptr() for p in prepare_for_decoding(twin).parameters()] == weights
    assert all(fused(twin)) and apart(twin, pair[0]) < 1e-4


@pytest.mark.parametrize("rows", [2, 8, 40])
def test_many_bfloat16_rows_are_multiplied_in_float32_where_the_cpu_has_no_instruction(
    monkeypatch, rows
):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (rows, 96))
    wanted = (x.double() @ weight.double().T).bfloat16()
    for supported in (lambda: True, lambda: False, None):  # None: PyTorch does not say
        ops = SimpleNamespace(**{"_is_mkldnn_bf16_supported": supported} if supported else {})
        monkeypatch.setattr(torch.ops, "mkldnn", ops)
        with torch.no_grad():
            got = multiply(x, weight)
        assert got.dtype == torch.bfloat16
        assert ((got - wanted).abs() <= 0.01 * wanted.abs() + 0.05).all()
