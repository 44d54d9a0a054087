"""Files in every layout, in both directions, and refusals by name before anything is written."""

import copy
import json
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import LINE, logits_of, ours, redraw, reference, token_ids
from safetensors.torch import load_file, save_file

from helpers import gpt2, llama3, smollm2
from helpers.checkpoints import load_model
from helpers.positions import permute, unpermute
from helpers.readers import MetaReader, SafetensorsReader
from helpers.weights import (
    DictReader,
    export_weights,
    load_weights,
    load_weights_into_llama,
    save_model,
)

CLOSE, FAR = 1e-4, 1e-2


def saved(name, folder, **kwargs):
    """A tiny checkpoint written by transformers, and the model that wrote it."""
    theirs = reference(name)
    theirs.save_pretrained(folder, **kwargs)
    return theirs


def logits(model, ids):
    with torch.no_grad():
        return model(ids)


# --- Hugging Face ----------


@pytest.mark.parametrize("name", LINE)
def test_a_folder_of_transformers_loads_and_goes_back(name, tmp_path):
    theirs, ids = saved(name, tmp_path / "theirs"), token_ids(name)
    model, tokenizer, chat_format, *_ = load_model(tmp_path / "theirs")
    assert tokenizer is None and chat_format is None
    assert (logits(model, ids) - logits_of(theirs, ids)).abs().max() < CLOSE
    assert model.tied == theirs.config.tie_word_embeddings
    save_model(model, tmp_path / "ours")
    back = getattr(transformers, type(theirs).__name__).from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert torch.equal(logits_of(back.eval(), ids), logits_of(theirs, ids))
    again = load_model(tmp_path / "ours").model
    assert again.cfg == model.cfg
    state = again.state_dict()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_sharded_files_give_the_same_model(tmp_path):
    saved("llama3_2", tmp_path / "one")
    theirs = saved("llama3_2", tmp_path / "many", max_shard_size="300KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_model(tmp_path / "one").model, load_model(tmp_path / "many").model
    ids = token_ids("llama3_2")
    assert torch.equal(logits(one, ids), logits(many, ids))
    assert (logits(many, ids) - logits_of(theirs, ids)).abs().max() < CLOSE


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("masks", [False, True])
def test_gpt2_loads_with_and_without_prefix_and_masks(prefix, masks, tmp_path):
    theirs, ids = saved("gpt2", tmp_path), token_ids("gpt2")
    state = {
        k.removeprefix("transformer."): v
        for k, v in load_file(tmp_path / "model.safetensors").items()
    }
    if masks:
        for n in range(3):
            state[f"h.{n}.attn.bias"] = torch.tril(torch.ones(1, 1, 64, 64))
            state[f"h.{n}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(
        {prefix + k: v.contiguous() for k, v in state.items()}, tmp_path / "model.safetensors"
    )
    model = load_model(tmp_path).model
    assert (logits(model, ids) - logits_of(theirs, ids)).abs().max() < CLOSE


def test_building_on_meta_and_loading_equals_building_normally(tmp_path):
    theirs = saved("smollm2", tmp_path)
    normal = llama3.Llama3Model({**ours(theirs).cfg})
    load_weights_into_llama(normal, {"n_layers": 3}, theirs.state_dict())
    loaded = load_model(tmp_path).model
    state = loaded.state_dict()
    assert state.keys() == normal.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in normal.state_dict().items())
    assert torch.equal(loaded.pos_emb.cos, normal.pos_emb.cos)
    assert all(p.requires_grad for p in loaded.parameters())


def test_loading_in_place_keeps_every_parameter_object():
    theirs = reference("llama3_2")
    model = ours(theirs)
    before = dict(model.named_parameters())
    load_weights(
        model, DictReader(redraw(theirs, seed=5).state_dict()), model.layouts["huggingface"]
    )
    assert all(p is before[name] for name, p in model.named_parameters())
    assert torch.equal(model.tok_emb.weight, theirs.model.embed_tokens.weight)


def test_a_loaded_model_can_be_trained_without_touching_the_file(tmp_path):
    saved("smollm2", tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model, ids = load_model(tmp_path).model, token_ids("smollm2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(ids).square().mean().backward()
    optimizer.step()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not torch.equal(model.tok_emb.weight, load_model(tmp_path).model.tok_emb.weight)


@pytest.mark.parametrize(
    ("asked", "tolerance"), [("bfloat16", 0.02), ("float16", 0.003), ("float32", 0)]
)
def test_the_dtype_asked_for_is_the_dtype_given(asked, tolerance, tmp_path):
    theirs = saved("llama3_2", tmp_path)
    model = load_model(tmp_path, dtype=asked).model
    assert {p.dtype for p in model.parameters()} == {getattr(torch, asked)}
    assert model.cfg.dtype == getattr(torch, asked) and model.pos_emb.cos.dtype == torch.float32
    assert (
        model.tok_emb.weight.float() - theirs.model.embed_tokens.weight
    ).abs().max() <= tolerance


# --- Meta's original files ----------


def write_meta(model, folder, shards=1, vocabulary_axis=1, permuted=True, **params):
    """What Meta publishes: consolidated.NN.pth with slices of every matrix, and params.json."""
    layout = model.layouts["meta"]
    state = export_weights(model, layout)
    if not permuted:  # a file that already has Hugging Face's rows
        for n in range(model.cfg.n_layers):
            for ours_name, name in (("W_query", "wq"), ("W_key", "wk")):
                state[f"layers.{n}.attention.{name}.weight"] = (
                    model.trf_blocks[n].att.get_submodule(ours_name).weight
                )
    if model.tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    state["rope.freqs"] = torch.ones(4)
    folder.mkdir()
    rows = ("wq", "wk", "wv", "w1", "w3", "output")
    for i in range(shards):
        part = {}
        for name, tensor in state.items():
            kind = name.split(".")[-2]
            axis = 0 if kind in rows else vocabulary_axis if kind == "tok_embeddings" else 1
            whole = tensor.dim() == 1
            part[name] = (
                tensor.detach().clone() if whole else tensor.detach().chunk(shards, axis)[i].clone()
            )
        torch.save(part, folder / f"consolidated.{i:02d}.pth")
    cfg = model.cfg
    raw = {
        "dim": cfg.emb_dim,
        "n_layers": cfg.n_layers,
        "n_heads": cfg.n_heads,
        "vocab_size": -1,
        "norm_eps": cfg.norm_eps,
        "multiple_of": 32,
        **params,
    }
    if cfg.n_kv_groups and cfg.n_kv_groups != cfg.n_heads:
        raw["n_kv_heads"] = cfg.n_kv_groups
    (folder / "params.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("shards", "vocabulary_axis"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("name", ["llama2_7b", "llama3_8b"])
def test_metas_layout_gives_the_logits_of_its_hugging_face_twin(
    name, shards, vocabulary_axis, tmp_path
):
    theirs, ids = reference(name), token_ids(name)[:, :63]
    extra = {"rope_theta": 500_000.0} if name == "llama3_8b" else {}
    model = ours(theirs, vocab_size=257)
    if shards == 2 and vocabulary_axis == 0:
        theirs = reference(name, vocab_size=258)
        model = ours(theirs)
    write_meta(model, tmp_path / "meta", shards, vocabulary_axis, **extra)
    loaded = load_model(tmp_path / "meta").model
    assert (logits(loaded, ids) - logits_of(theirs, ids)).abs().max() < CLOSE
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_tied_matrices_of_a_pth_may_share_their_numbers(tmp_path):
    """So they do in Meta's files of Llama 3.2 1B and 3B, which hold the matrix once."""
    theirs = reference("llama3_8b", tie_word_embeddings=True)
    ids = token_ids("llama3_8b")[:, :63]
    write_meta(ours(theirs), tmp_path / "meta", rope_theta=500_000.0)
    file = tmp_path / "meta" / "consolidated.00.pth"
    state, size = torch.load(file, weights_only=True), file.stat().st_size
    state["output.weight"] = state["tok_embeddings.weight"]
    torch.save(state, file)
    assert file.stat().st_size < size - state["output.weight"].nbytes // 2
    loaded = load_model(tmp_path / "meta").model
    assert (logits(loaded, ids) - logits_of(theirs, ids)).abs().max() < CLOSE


def test_without_the_permutation_metas_rows_are_wrong(tmp_path):
    theirs, ids = reference("llama2_7b"), token_ids("llama2_7b")
    write_meta(ours(theirs), tmp_path / "meta", permuted=False)
    wrong = logits(load_model(tmp_path / "meta").model, ids) - logits_of(theirs, ids)
    assert wrong[:, 0].abs().max() < CLOSE  # position 0 is not rotated: the first token cannot tell
    assert wrong[:, 20:].abs().max() > FAR


def test_permute_and_its_inverse():
    rows = torch.arange(16)[:, None].repeat(1, 3)
    assert permute(rows, 2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    for heads in (1, 2, 4):
        assert torch.equal(unpermute(permute(rows, heads), heads), rows)
        assert torch.equal(permute(unpermute(rows, heads), heads), rows)


def test_a_dictionary_in_metas_names_is_permuted_too():
    theirs, ids = reference("llama2_7b"), token_ids("llama2_7b")
    model = ours(theirs)
    state = {k: v.clone() for k, v in export_weights(model, model.layouts["meta"]).items()}
    copies = {k: v.clone() for k, v in state.items()}
    fresh = llama3.Llama3Model({**model.cfg}).eval()
    load_weights_into_llama(fresh, model.cfg, state)
    assert (logits(fresh, ids) - logits_of(theirs, ids)).abs().max() < CLOSE
    assert all(
        torch.equal(state[k], copies[k]) for k in state
    )  # the caller's tensors are as they were


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"use_scaled_rope": True, "rope_theta": 500_000.0}, "does not give the factor"),
        ({"dim": None}, "lack"),
    ],
)
def test_metas_params_are_not_guessed(params, message, tmp_path):
    write_meta(ours(reference("llama3_8b")), tmp_path / "meta", **params)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "meta")


def test_a_pth_that_carries_code_is_refused_and_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    write_meta(ours(reference("llama2_7b")), tmp_path / "meta")
    torch.save({"layers.0.attention.wq.weight": Evil()}, tmp_path / "meta" / "consolidated.00.pth")
    with pytest.raises(ValueError, match=r"consolidated.00.pth is no plain .pth of tensors"):
        load_model(tmp_path / "meta")
    assert not (tmp_path / "owned").exists()


# --- GGUF ----------


def write_gguf(model, path, rope_freqs=None, quantised=False):
    cfg = model.cfg
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(cfg.context_length)
    writer.add_embedding_length(cfg.emb_dim)
    writer.add_block_count(cfg.n_layers)
    writer.add_feed_forward_length(cfg.hidden_dim)
    writer.add_head_count(cfg.n_heads)
    writer.add_head_count_kv(cfg.n_kv_groups)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_freq_base(cfg.rope_base)
    for name, tensor in export_weights(model, model.layouts["gguf"]).items():
        values = tensor.numpy()
        if quantised and tensor.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama3_8b", "smollm2"])
def test_gguf_gives_the_logits_of_its_hugging_face_twin(name, tmp_path):
    theirs, ids = reference(name), token_ids(name)
    write_gguf(ours(theirs), tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf").model
    assert loaded.tied == theirs.config.tie_word_embeddings
    assert (logits(loaded, ids) - logits_of(theirs, ids)).abs().max() < CLOSE


def test_quantised_gguf_is_near_its_twin(tmp_path):
    theirs = reference("llama3_8b")
    write_gguf(ours(theirs), tmp_path / "tiny.gguf", quantised=True)
    loaded = load_model(tmp_path / "tiny.gguf").model
    difference = (loaded.tok_emb.weight - theirs.model.embed_tokens.weight).abs().max()
    assert 0 < difference < 0.01  # 8 bits of values up to about 0.8


def test_gguf_of_llama_32_brings_its_rescaling(tmp_path):
    cfg = {
        "vocab_size": 64,
        "context_length": 64,
        "emb_dim": 128,
        "n_heads": 2,
        "n_layers": 1,
        "hidden_dim": 64,
        "n_kv_groups": 1,
        "rope_freq": dict(llama3.LLAMA32_CONFIG_1B.rope_freq),
    }
    model = llama3.Llama3Model(cfg).eval()
    plain = 1 / 500_000 ** (torch.arange(0, 64, 2) / 64)
    turn = torch.atan2(
        model.pos_emb.sin[1, :32], model.pos_emb.cos[1, :32]
    )  # radians per token, all below pi
    write_gguf(model, tmp_path / "tiny.gguf", (plain / turn).numpy().astype(np.float32))
    loaded = load_model(tmp_path / "tiny.gguf").model
    assert loaded.cfg.rope_freq == model.cfg.rope_freq
    assert torch.equal(loaded.pos_emb.cos, model.pos_emb.cos)
    write_gguf(model, tmp_path / "other.gguf", np.linspace(1, 5, 32, dtype=np.float32))
    with pytest.raises(ValueError, match="rope_freqs.weight is not Llama 3.1's rescaling"):
        load_model(tmp_path / "other.gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ValueError, match="x.gguf is damaged or no GGUF file"):
        load_model(tmp_path / "x.gguf")


# --- refusals, before anything is overwritten ----------


def spoiled(state, how):
    state = dict(state)
    if how == "missing":
        del state["model.layers.1.mlp.up_proj.weight"]
    elif how == "unexpected":
        state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    elif how == "shape":
        state["model.layers.2.self_attn.k_proj.weight"] = torch.ones(3, 72)
    return state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("unexpected", r"unexpected: model\.layers\.0\.self_attn\.q_norm\.weight"),
        (
            "shape",
            r"wrong shape: model\.layers\.2\.self_attn\.k_proj\.weight is \(3, 72\).*needs \(24, 72\)",
        ),
    ],
)
def test_a_tensor_too_few_too_many_or_wrong_is_refused_by_name(how, message, tmp_path):
    theirs = saved("smollm2", tmp_path)
    model = ours(theirs)
    before = copy.deepcopy(model.state_dict())
    state = {k: v for k, v in redraw(theirs, seed=9).state_dict().items() if k != "lm_head.weight"}
    with pytest.raises(ValueError, match=message):
        load_weights_into_llama(model, model.cfg, spoiled(state, how))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    save_file(spoiled(state, how), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_many_problems_are_listed_together(tmp_path):
    model = ours(reference("smollm2"))
    with pytest.raises(ValueError, match=r"(?s)missing: model.embed_tokens.weight.*and 17 more"):
        load_weights_into_llama(model, model.cfg, {})


@pytest.mark.parametrize("name", LINE)
def test_every_tensor_is_used_exactly_once(name):
    """Leave out any one tensor and it is missed; rename any one and it is unexpected as well."""
    theirs = reference(name)
    model = ours(theirs)
    layout = model.layouts["huggingface"]
    state = export_weights(model, layout)
    assert sorted(state) == sorted({layout.find(k).name for k, _ in model.named_parameters()})
    for key in state:
        rest = {k: v for k, v in state.items() if k != key}
        with pytest.raises(
            ValueError, match=f"missing: {key}\n|missing: {key}$|has no {key}|missing: {key} *"
        ):
            if key == "lm_head.weight":
                load_weights(model, DictReader(rest), layout)
            else:
                load_weights(model, DictReader({**rest, key + "x": state[key]}), layout)


def test_the_head_by_config_and_by_file():
    theirs = reference("llama3_8b")  # untied
    state, cfg = theirs.state_dict(), {**ours(theirs).cfg}
    headless = {k: v for k, v in state.items() if k != "lm_head.weight"}

    def load(tie, tensors):
        model = llama3.Llama3Model({**cfg, "tie_embeddings": tie})
        load_weights_into_llama(model, cfg, tensors)
        return model

    assert not load(None, state).tied and load(None, headless).tied
    assert not load(False, state).tied and load(True, headless).tied
    assert load(True, {**state, "lm_head.weight": state["model.embed_tokens.weight"]}).tied
    with pytest.raises(ValueError, match="no lm_head.weight, but tie_embeddings=False"):
        load(False, headless)
    with pytest.raises(
        ValueError, match="lm_head.weight differs from its model.embed_tokens.weight"
    ):
        load(True, state)


def test_damaged_files_are_refused_by_name(tmp_path):
    saved("smollm2", tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damage in (whole[:1000], whole[: len(whole) // 2], b"", b"<html>not found</html>"):
        (tmp_path / "model.safetensors").write_bytes(damage)
        with pytest.raises(ValueError, match="model.safetensors is damaged or no safetensors file"):
            load_model(tmp_path)


def test_an_index_is_not_trusted(tmp_path):
    saved("llama3_2", tmp_path, max_shard_size="300KB")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    name, shard = next(iter(good["weight_map"].items()))

    def refused(weight_map, error, message):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(error, match=message):
            load_model(tmp_path)

    refused(
        {**good["weight_map"], name: "../other.safetensors"},
        ValueError,
        "not a file of its own folder",
    )
    refused(
        {**good["weight_map"], name: "lost.safetensors"},
        FileNotFoundError,
        "lost.safetensors, which is missing",
    )
    other = next(s for s in good["weight_map"].values() if s != shard)
    refused({**good["weight_map"], name: other}, ValueError, "it is not")
    refused("nonsense", ValueError, "no index of a sharded checkpoint")


# --- saving ----------


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    model = ours(reference("smollm2"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="full exists"):
        save_model(model, tmp_path / "full")
    import helpers.weights

    def crash(*args, **kwargs):
        (args[1]).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(helpers.weights, "save_file", crash)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize("name", ["gpt2", "llama3_8b", "llama3_2"])
def test_a_model_built_here_goes_to_transformers(name, tmp_path):
    """Not only what came from there: random weights, a plain dict, bfloat16."""
    cfg = {**ours(reference(name)).cfg, "dtype": torch.bfloat16}
    model = redraw((gpt2.GPTModel if name == "gpt2" else llama3.Llama3Model)(cfg))
    save_model(model, tmp_path / "saved")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = token_ids(name)
    assert (logits(model.float(), ids) - logits_of(theirs, ids)).abs().max() < CLOSE


# --- memory ----------

MEASURE = """
import sys, torch
from pathlib import Path
from helpers.checkpoints import load_model
import safetensors.torch, gguf
def memory(line):
    status = Path("/proc/self/status").read_text()
    return int(next(l for l in status.splitlines() if l.startswith(line)).split()[1]) * 1024
load_model(sys.argv[2], dtype=sys.argv[3])  # imports and buffers that stay
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (ru_maxrss would keep the parent's)
before = memory("VmRSS")
model = load_model(sys.argv[1], dtype=sys.argv[3]).model
total = sum(p.sum() for p in model.parameters())  # every page is touched
print(memory("VmHWM") - before)
"""


def growth(folder, tiny, dtype="float32"):
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(tiny), dtype],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 200 MB with rather even tensors, as files of every kind, and a tiny one."""
    folder = tmp_path_factory.mktemp("large")
    saved("smollm2", folder / "tiny")
    cfg = {
        **smollm2.SMOLLM2_CONFIG_135M,
        "n_layers": 14,
        "vocab_size": 4_096,
        "n_kv_groups": 9,
        "dtype": torch.float32,
        "rope_base": 10_000.0,
        "context_length": 2048,
    }
    model = smollm2.SmolLM2Model(cfg)
    save_model(model, folder / "one")
    write_meta(model, folder / "meta")
    write_meta(model, folder / "shards", shards=2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "one")
    theirs.save_pretrained(folder / "many", max_shard_size="60MB")
    return folder


@pytest.mark.parametrize("kind", ["one", "many", "meta", "shards"])
def test_peak_memory_of_loading_is_the_files_size(kind, large):
    size = sum(
        p.stat().st_size for p in (large / kind).iterdir() if p.suffix in (".pth", ".safetensors")
    )
    assert size > 150e6
    assert growth(large / kind, large / "tiny") < 1.1 * size


@pytest.mark.parametrize("kind", ["one", "many", "meta", "shards"])
def test_peak_memory_of_a_conversion_is_the_models_size(kind, large):
    size = sum(
        p.stat().st_size for p in (large / kind).iterdir() if p.suffix in (".pth", ".safetensors")
    )
    # half the bytes, and one tensor in flight
    assert growth(large / kind, large / "tiny", "bfloat16") < 0.7 * size


def test_readers_say_what_a_folder_lacks(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no model.safetensors"):
        SafetensorsReader(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no consolidated.00.pth"):
        MetaReader(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither config.json"):
        load_model(tmp_path)


# --- what a careful reader found ----------


def test_a_second_file_does_not_overwrite_a_tied_embedding():
    theirs = reference("llama3_8b")  # it has a head of its own
    state, cfg = theirs.state_dict(), {**ours(theirs).cfg, "tie_embeddings": None}
    model = llama3.Llama3Model(cfg)
    load_weights_into_llama(model, cfg, {k: v for k, v in state.items() if k != "lm_head.weight"})
    assert model.tied and model.cfg.tie_embeddings
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        load_weights_into_llama(model, cfg, state)
    assert torch.equal(model.tok_emb.weight, theirs.model.embed_tokens.weight)


@pytest.mark.parametrize("name", ["gpt2", "llama3_2"])
def test_a_dictionary_is_copied_also_into_an_empty_model(name):
    theirs = reference(name)
    state = {k: v.clone() for k, v in theirs.state_dict().items()}
    copies = {k: v.clone() for k, v in state.items()}
    filled = ours(theirs)
    with torch.device("meta"):
        model = type(filled)(filled.cfg)
    load_weights(model, DictReader(state), model.layouts["huggingface"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    assert all(torch.equal(state[k], copies[k]) for k in state)


def test_numbers_that_are_no_floats_are_refused(tmp_path):
    saved("smollm2", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**state, name: state[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"no floating-point numbers: {name}"):
        load_model(tmp_path)


def test_a_gpt2_without_qkv_biases_can_be_saved_and_loaded(tmp_path):
    model = ours(reference("gpt2"))
    plain = redraw(gpt2.GPTModel({**model.cfg, "qkv_bias": False}))
    save_model(plain, tmp_path / "saved")
    again = load_model(tmp_path / "saved").model
    assert again.cfg.qkv_bias and not again.trf_blocks[0].att.W_key.bias.any()
    ids = token_ids("gpt2")
    assert torch.allclose(logits(again, ids), logits(plain, ids), atol=1e-5)


def test_a_model_that_is_no_longer_its_config_is_not_saved(tmp_path):
    model = ours(reference("gpt2"))
    model.out_head = torch.nn.Linear(48, 2, bias=False)
    with pytest.raises(ValueError, match=r"out_head.weight \(2, 48\) is not what"):
        save_model(model, tmp_path / "saved")
    model = ours(reference("smollm2"))
    model.trf_blocks[0].ff.fc1 = torch.nn.Sequential(model.trf_blocks[0].ff.fc1)
    with pytest.raises(ValueError, match=r"fc1.0.weight"):
        save_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_stop_tokens_and_templates_travel_with_the_model(tmp_path, llama3_tokenizer_file):
    model = ours(reference("llama3_2"))
    save_model(model, tmp_path / "bare")
    raw = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert raw["eos_token_id"] is None and raw["bos_token_id"] is None  # not transformers' 1 and 2
    tokenizer = llama3.Llama3Tokenizer(llama3_tokenizer_file)
    save_model(model, tmp_path / "chat", tokenizer)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "chat")
    assert theirs.bos_token_id == 128_000 and theirs.eos_token_id == [128_001, 128_008, 128_009]
    assert (
        transformers.GenerationConfig.from_pretrained(tmp_path / "chat").eos_token_id
        == theirs.eos_token_id
    )
    save_model(ours(reference("gpt2")), tmp_path / "gpt2", gpt2.GPT2Tokenizer())
    assert load_model(tmp_path / "gpt2").tokenizer.encode("Hello") == [15_496]


def test_a_twin_on_the_same_weights_is_saved_once(tmp_path):
    model = ours(reference("smollm2"))
    with torch.device("meta"):
        twin = llama3.Llama3ModelFast({**model.cfg, "tie_embeddings": None})
    twin.load_state_dict(model.state_dict(), assign=True)
    save_model(twin, tmp_path / "twin")
    assert "lm_head.weight" not in load_file(tmp_path / "twin" / "model.safetensors")
