"""The benchmark proves before it times, counts what it says it counts, and keeps its results."""

import gc
import json

import pytest
import torch
from conftest import ours, reference, token_ids

from helpers import benchmark
from helpers.benchmark import (
    SHAPES,
    VARIANTS,
    Way,
    attention_that_ran,
    build,
    cache_bytes_per_token,
    few,
    load,
    main,
    measure_bandwidth,
    prove,
    random_model,
    row_of,
    save,
    table,
    time_once,
    twin,
    weight_bytes_per_token,
)
from helpers.kv_cache import KVCache

CPU = torch.device("cpu")
EAGER_ONLY = [name for name, v in VARIANTS.items() if v.on_cpu and not v.compiled]


@pytest.fixture
def model():
    return ours(reference("llama3_2"))


@pytest.fixture(scope="module")
def result():
    model = ours(reference("llama3_2"))
    ids = token_ids("llama3_2")[:1, :16]
    names = [*EAGER_ONLY, "compiled, flash"]
    return benchmark.benchmark(model, ids, new=20, variants=names, rounds=3, name="tiny")


def test_a_way_is_one_prefill_and_n_minus_1_decode_calls():
    calls = []

    def run(ids, cache, last_only):
        calls.append(tuple(ids.shape))
        return torch.zeros(len(ids), 1, 5)

    list(Way(run, lambda *shape: calls.append(shape) or "cache").tokens(torch.ones(2, 9), 4))
    assert calls == [(2, 13), (2, 9), (2, 1), (2, 1), (2, 1)]
    calls.clear()
    list(Way(run).tokens(torch.ones(1, 9).long(), 3))
    assert calls == [(1, 9), (1, 10), (1, 11)]


def test_prompt_tokens_and_the_first_token_are_not_counted_as_decoded(monkeypatch):
    clock = iter([0.0, 7.0, 10.0])
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    way = Way(lambda ids, cache, last_only: torch.zeros(1, 1, 5), lambda *shape: 1)
    times = time_once(way, torch.ones(1, 14).long(), 7, CPU)
    assert times == (7.0, 3.0)
    row = row_of([times] * 3, 14, 7, bytes_per_token=10, bandwidth=80)
    assert row["prefill_tokens_per_second"] == 2
    assert row["tokens_per_second"] == 2  # six decoded tokens in three seconds
    assert row["share_of_limit"] == 0.25


def test_bytes_per_token_are_those_of_the_tensors_that_a_step_reads(model):
    assert model.tied
    read = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert weight_bytes_per_token(model) == sum(read.values())
    untied = type(model)({**model.cfg, "tie_embeddings": False})
    table_bytes = untied.tok_emb.weight.nbytes
    assert (
        weight_bytes_per_token(untied) == sum(p.nbytes for p in untied.parameters()) - table_bytes
    )
    cache = KVCache(model, 1, 77)
    assert cache_bytes_per_token(model, 77) == cache.cache_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EAGER_ONLY)
def test_variants_are_proved_and_share_one_copy_of_the_weights(model, name, dtype):
    model = benchmark.prepare_for_decoding(model.to(dtype))
    way = build(model, VARIANTS[name])
    kept = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in way.run.parameters()} == kept
    assert prove(way, twin(model), token_ids("llama3_2")[:1, :40], 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_variant_is_not_proved_and_not_timed(model, dtype, monkeypatch):
    model, right = model.to(dtype), benchmark.build

    def off_by_one(model, variant):
        way = right(model, variant)

        def run(ids, cache, last_only):
            if ids.shape[1] == 1:
                cache.position -= 1
            return model(ids, cache, last_only=last_only)

        return Way(run, way.new_cache) if variant == VARIANTS["cache"] else way

    monkeypatch.setattr(benchmark, "build", off_by_one)
    ids = token_ids("llama3_2")[:1, :40]
    result = benchmark.benchmark(model, ids, new=16, variants=["cache", "fast"], rounds=1)
    assert "wrong" in result["rows"]["cache"]["note"]
    assert "tokens_per_second" not in result["rows"]["cache"]
    assert result["rows"]["fast"]["tokens_per_second"] > 0


def test_ways_take_turns(model):
    order = []
    ways = {
        name: Way(lambda *a, n=name, **k: order.append(n) or torch.zeros(1, 1, 5)) for name in "ab"
    }
    benchmark.measure(ways, torch.ones(1, 3).long(), 2, 2, CPU)
    assert order == list("aabbaabb")
    assert few(Way(None), 64, CPU) == 8 and few(Way(None, KVCache), 64, CPU) == 64
    assert few(Way(None), 64, torch.device("cuda")) == 64


def test_a_row_says_what_ran_and_how_near_the_limit(result):
    rows = result["rows"]
    assert rows["eager"]["attention"] == "matrix products"
    assert rows["flash"]["attention"] == rows["fast"]["attention"] == "flash"
    assert "GPU only" in rows["compiled, flash"]["note"]
    for name in EAGER_ONLY:
        row = rows[name]
        assert row["proof"] == (
            "20 greedy tokens as eager" if VARIANTS[name].cache else "8 greedy tokens as eager"
        )
        assert row["slowest"] <= row["tokens_per_second"] <= row["fastest"]
        limit = result["bandwidth_bytes_per_second"] / row["bytes_per_token"]
        assert row["share_of_limit"] == pytest.approx(row["tokens_per_second"] / limit)
        assert row["new_tokens"] == (20 if VARIANTS[name].cache else 8)
        assert row["peak_bytes"] is None or row["peak_bytes"] > result["weight_bytes"]
    assert rows["cache"]["cache_bytes"] > rows["eager"]["cache_bytes"] == 0
    assert result["machine"]["torch"] == torch.__version__


def test_a_result_comes_back_from_json_as_a_table(result, tmp_path):
    save(result, tmp_path / "r.json")
    assert load(tmp_path / "r.json") == json.loads(json.dumps(result))
    text = table(load(tmp_path / "r.json"))
    assert all(f"| {name} " in text for name in result["rows"])
    assert (
        "of weights read per token (all weights: " in text
        and "8 new tokens" in text
        and "GPU only" in text
    )


def test_without_a_compiler_the_row_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(benchmark.shutil, "which", lambda name: None)
    assert "no C++ compiler" in VARIANTS["compiled"].reason_against(CPU)
    assert VARIANTS["compiled"].reason_against(torch.device("cuda")) is None
    assert VARIANTS["compiled"].reason_against(torch.device("mps")) == benchmark.NO_COMPILING
    assert VARIANTS["fast"].reason_against(torch.device("mps")) is None


def test_out_of_memory_is_a_note_and_the_others_are_still_timed(model, monkeypatch):
    def full(way, *rest):
        if way.new_cache is None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nmore")
        return "proved"

    monkeypatch.setattr(benchmark, "prove", full)
    rows = benchmark.benchmark(model, token_ids("llama3_2")[:1, :8], 4, ["eager", "cache"], 1)[
        "rows"
    ]
    assert rows["eager"]["note"] == "out of memory: CUDA out of memory."
    assert rows["cache"]["tokens_per_second"] > 0


def test_out_of_memory_in_a_timed_round_and_a_failed_compilation_are_notes(model, monkeypatch):
    right, timed, calls = benchmark.build, benchmark.time_once, []

    def no_kernel(model, variant):
        if variant.flash:
            raise RuntimeError("No available kernel.\nmore")
        return right(model, variant)

    def full(way, *rest):
        calls.append(way)
        if way.new_cache is None and calls.count(way) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return timed(way, *rest)

    monkeypatch.setattr(benchmark, "build", no_kernel)
    monkeypatch.setattr(benchmark, "time_once", full)
    ids = token_ids("llama3_2")[:1, :8]
    rows = benchmark.benchmark(model, ids, 4, ["eager", "flash", "cache"], 3)["rows"]
    assert rows["eager"] == {"note": "out of memory: CUDA out of memory."}
    assert rows["flash"]["note"] == "did not run: No available kernel."
    assert rows["cache"]["tokens_per_second"] > 0


def test_warm_up_proof_and_rounds_have_caches_of_one_size(model, monkeypatch):
    right, sizes = benchmark.build, []

    def watched(model, variant):
        way = right(model, variant)
        return Way(way.run, lambda *shape: sizes.append(shape) or way.new_cache(*shape))

    monkeypatch.setattr(benchmark, "build", watched)
    result = benchmark.benchmark(model, token_ids("llama3_2")[:1, :1], 4, ["fast"], 2)
    assert set(sizes) == {(1, 9)}
    assert result["rows"]["fast"]["cache_bytes"] == cache_bytes_per_token(model, 9)
    half = model.bfloat16()
    assert prove(build(half, VARIANTS["fast"]), twin(half), token_ids("llama3_2")[:1, :1], 8)


def test_prefill_and_decoding_may_attend_with_different_kernels(model):
    prefill = build(model, VARIANTS["cache, flash"]).run
    cached = build(model, VARIANTS["cache"])

    def run(ids, *rest, **settings):
        return (prefill if ids.shape[1] > 1 else cached.run)(ids, *rest, **settings)

    ids = token_ids("llama3_2")[:1, :8]
    assert attention_that_ran(Way(run, cached.new_cache), ids) == "flash / matrix products"


def test_bandwidth_is_measured_with_what_is_free(monkeypatch):
    monkeypatch.setattr(benchmark, "free_bytes", lambda device: 2**22)
    sizes, ones = [], torch.ones
    monkeypatch.setattr(torch, "ones", lambda n, **kw: sizes.append(n) or ones(n, **kw))
    assert measure_bandwidth("cpu", rounds=3) > 0
    assert sizes[0] * 4 == 2**20


def test_bandwidth_is_a_plausible_number_of_bytes_per_second():
    assert 1e8 < measure_bandwidth("cpu", buffer_bytes=2**24, rounds=3) < 1e13


def test_a_shape_is_built_with_random_weights_and_runs_from_the_terminal(
    monkeypatch, capsys, tmp_path
):
    model_class, cfg = SHAPES["smollm2-135m"]
    small = benchmark.replace(cfg, n_layers=2, vocab_size=500)
    monkeypatch.setitem(SHAPES, "smollm2-135m", (model_class, small))
    model = random_model("smollm2-135m", dtype=torch.float32)
    assert model.tied and model(torch.ones(1, 70).long()).std() > 0.1
    monkeypatch.setattr(benchmark, "measure_bandwidth", lambda device: 1e9)
    command = "--shape smollm2-135m --device cpu --dtype float32 --variants cache fast --prompt 8 --new 6 --rounds 1"
    assert main([*command.split(), "--out", str(tmp_path / "r.json")]) == 0
    assert "| fast " in capsys.readouterr().out
    assert load(tmp_path / "r.json")["rows"]["fast"]["proof"] == "8 greedy tokens as eager"
    assert main(["--model", "no-such-model"]) == 2
    assert "error: " in capsys.readouterr().err


def test_memory_does_not_grow_over_512_tokens():
    def living():
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    others = living()  # what earlier tests left, a compiler's tensors without storage among it
    known = {id(o) for o in others}
    model = ours(reference("llama3_2", max_position_embeddings=640))
    way = build(model, VARIANTS["fast"])
    held = []
    for number, _ in enumerate(way.tokens(token_ids("llama3_2")[:1, :8], 600), 1):
        if number in (80, 80 + 512):
            tensors = [o for o in living() if id(o) not in known]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
            held.append((len(tensors), sum(s.nbytes() for s in storages.values())))
    assert held[1][0] <= held[0][0] + 2 and held[1][1] <= held[0][1] + 2**10
