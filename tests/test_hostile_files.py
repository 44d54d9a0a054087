"""Files that lie: refused by name in bounded time and memory, nothing executed, nothing written.

Every file is made here. A case takes the good files of one kind, spoils them, and says which words
the refusal must have. The fuzz runs at the end change headers at random: a refusal or a model with
weights out of the file is the only outcome.
"""

import io
import json
import os
import pickle
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import redraw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import load_model, tokenizer_of
from helpers.hub import SMALL_FILES
from helpers.llama3 import Llama3Model
from helpers.tokenizers import DATA, JSONTokenizer, Llama2Tokenizer, Llama3Tokenizer
from helpers.weights import export_weights, save_model

CFG = {"vocab_size": 40, "context_length": 32, "emb_dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24,
       "n_kv_groups": 1, "rope_base": 10_000.0, "tie_embeddings": False}  # fmt: skip
EMB, NORM = "model.embed_tokens.weight", "model.norm.weight"
SECONDS, MEMORY = 5, 300e6
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
OWNED = Path("owned-by-a-model-file")


# --- good files, and the means to spoil them ----------


def safetensors(entries, data, metadata=None, length=None, padding=b""):
    """A safetensors file from a header (a dict, or raw bytes) and the bytes of all tensors."""
    raw = (
        entries
        if isinstance(entries, bytes)
        else json.dumps(metadata | entries if metadata else entries).encode()
    )
    raw += padding
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def parts(file):
    """(header as a dict, bytes of the tensors) of a good file."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, file[8 + length :]


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def number(value):
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    )


GGUF_FIELDS = {
    "general.architecture": struct.pack("<I", 8) + text("llama"),
    "llama.context_length": number(32),
    "llama.embedding_length": number(16),
    "llama.block_count": number(2),
    "llama.feed_forward_length": number(24),
    "llama.attention.head_count": number(2),
    "llama.attention.head_count_kv": number(1),
    "llama.attention.layer_norm_rms_epsilon": number(1e-5),
    "llama.rope.freq_base": number(10_000.0),
}


def gguf(
    tensors,
    fields=(),
    start=b"GGUF",
    version=3,
    n_tensors=None,
    n_fields=None,
    extra=b"",
    infos=(),
    alignment=32,
    **more,
):
    """A GGUF file; `fields` change the good ones (None takes one away), `infos` tensors' entries."""
    fields = {k: v for k, v in {**GGUF_FIELDS, **dict(fields)}.items() if v is not None}
    header, data, infos = b"", b"", dict(infos)
    for key, value in fields.items():
        header += text(key) + value
    header += extra
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        data += bytes(-len(data) % alignment)
        entry = {"axes": tuple(tensor.shape[::-1]), "kind": 0, "offset": len(data)} | infos.get(
            name, {}
        )
        header += text(entry.get("name", name)) + struct.pack(
            "<I", entry.get("n_axes", len(entry["axes"]))
        )
        header += struct.pack(f"<{len(entry['axes'])}Q", *entry["axes"])
        header += struct.pack("<IQ", entry["kind"], entry["offset"])
        data += raw
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(fields) if n_fields is None else n_fields,
    )
    header = start + struct.pack("<IQQ", version, *counts) + header
    return header + bytes(-len(header) % alignment) + data


def pth(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


class Evil:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (str(OWNED),)


@pytest.fixture(scope="module")
def model():
    return redraw(Llama3Model(CFG)).eval()


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    """kind -> {file name: bytes}: one file, two shards, Meta's, GGUF."""
    folder = tmp_path_factory.mktemp("good")
    save_model(model, folder / "one")
    one = {p.name: p.read_bytes() for p in (folder / "one").iterdir()}
    header, data = parts(one[ONE])
    shards, weight_map = {}, {}
    for n, names in enumerate((sorted(header)[:9], sorted(header)[9:]), 1):
        entries, piece = {}, b""
        for name in names:
            begin, end = header[name]["data_offsets"]
            entries[name] = {**header[name], "data_offsets": [len(piece), len(piece) + end - begin]}
            piece += data[begin:end]
            weight_map[name] = f"model-{n}.safetensors"
        shards[f"model-{n}.safetensors"] = safetensors(entries, piece)
    index = {
        "config.json": one["config.json"],
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
    }
    params = {
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "vocab_size": -1,
        "norm_eps": 1e-5,
    }
    meta = {k: v.clone() for k, v in export_weights(model, model.layouts["meta"]).items()}
    return {
        "one": one,
        "shards": {**index, **shards},
        "meta": {"params.json": json.dumps(params).encode(), "consolidated.00.pth": pth(meta)},
        "gguf": {"model.gguf": gguf(export_weights(model, model.layouts["gguf"]))},
    }


def load(folder):
    found = [p for p in folder.iterdir() if p.suffix == ".gguf"]
    return load_model(found[0] if found else folder, "cpu", "float32").model


def memory(line):
    status = Path("/proc/self/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith(line)).split()[1]) * 1024


class Bounds:
    """Seconds and memory of what happens inside; memory only where Linux tells it."""

    def __init__(self, seconds=SECONDS, growth=MEMORY):
        self.seconds, self.growth = seconds, growth

    def __enter__(self):
        self.linux = os.access("/proc/self/clear_refs", os.W_OK)
        if self.linux:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = memory("VmRSS")
        self.start = time.process_time()

    def __exit__(self, *error):
        assert time.process_time() - self.start < self.seconds
        assert not self.linux or memory("VmHWM") - self.before < self.growth


def write(folder, files):
    for name, data in files.items():
        (folder / name).write_bytes(data)


def everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- safetensors ----------


def entry(name, **changes):
    """Spoil one tensor's entry in the header."""

    def spoil(files):
        header, data = parts(files[ONE])
        header[name] = {**header[name], **changes}
        return {**files, ONE: safetensors(header, data)}

    return spoil


def header(change, **more):
    """Spoil the header as a whole: change(header) -> dict or bytes."""

    def spoil(files):
        found, data = parts(files[ONE])
        return {**files, ONE: safetensors(change(found), data, **more)}

    return spoil


def whole(change, name=ONE):
    return lambda files: {**files, name: change(files[name])}


def value(name, number, at=3):
    """Put one number into a tensor."""

    def spoil(files):
        header, data = parts(files[ONE])
        begin = header[name]["data_offsets"][0] + 4 * at
        return {
            **files,
            ONE: safetensors(header, data[:begin] + struct.pack("<f", number) + data[begin + 4 :]),
        }

    return spoil


def twice(found):
    raw = json.dumps(found)
    again = json.dumps({NORM: found[NORM]})
    return (raw[:-1] + ", " + again[1:]).encode()


DAMAGED = "model.safetensors is damaged or no safetensors file"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html><html><body>Please log in</body></html>"
SAFETENSORS = {
    "empty": (whole(lambda f: b""), DAMAGED),
    "seven bytes": (whole(lambda f: f[:7]), DAMAGED),
    "cut in the header": (whole(lambda f: f[:100]), f"{DAMAGED}: its header claims"),
    "cut in the data": (whole(lambda f: f[: len(f) // 2]), "its tensors have [0-9,]+ bytes, the file"),
    "one byte short": (whole(lambda f: f[:-1]), "its tensors have"),
    "one byte more": (whole(lambda f: f + b"\0"), "its tensors have"),
    "header of 2**63 bytes": (header(lambda h: h, length=2**63), "its header claims 9,223,372,036,854,775,808 of"),
    "header as long as the file": (whole(lambda f: struct.pack("<Q", len(f)) + f[8:]), "its header claims"),
    "header of no bytes": (whole(lambda f: bytes(8) + f[8:]), "its header is no JSON"),
    "header shorter than it is": (whole(lambda f: struct.pack("<Q", 9) + f[8:]), "its header is no JSON"),
    "header of 5 MB": (header(lambda h: h, padding=b" " * 5_000_000), "its header claims 5,0"),
    "header no JSON": (header(lambda h: b"{'a': 1}"), "its header is no JSON"),
    "header a list": (header(lambda h: b"[]"), "must hold one JSON object, not list"),
    "header very deep": (header(lambda h: b"[" * 200_000), "its header is no JSON"),
    "header not UTF-8": (header(lambda h: b'{"\xff\xfe": 1}'), "its header is no JSON"),
    "overlapping": (header(lambda h: {**h, EMB: {**h[EMB], "data_offsets": h["lm_head.weight"]["data_offsets"]}}), "overlaps the tensor before|leaves a hole"),
    "offsets beyond the file": (entry(EMB, data_offsets=[10**9, 10**9 + 2560]), "leaves a hole"),
    "offsets near 2**64": (entry(EMB, data_offsets=[2**64 - 2560, 2**64]), f"{DAMAGED}: its entry of '{EMB}'"),
    "offsets negative": (entry(EMB, data_offsets=[-2560, 0]), f"its entry of '{EMB}'"),
    "offsets backwards": (entry(EMB, data_offsets=[2560, 0]), "has bytes 2560 to 0"),
    "offsets with a fraction": (entry(EMB, data_offsets=[0, 2560.0]), f"its entry of '{EMB}'"),
    "three offsets": (entry(EMB, data_offsets=[0, 1, 2560]), f"its entry of '{EMB}'"),
    "no offsets": (entry(EMB, data_offsets=None), f"its entry of '{EMB}'"),
    "shape absurd": (entry(EMB, shape=[2**62, 2**62]), r"has bytes 0 to 2560|has bytes \d+ to \d+"),
    "shape of 2**63": (entry(EMB, shape=[2**63]), f"its entry of '{EMB}'"),
    "shape that overflows to the right size": (entry(EMB, shape=[2**33, 2**33, 640]), "has bytes"),
    "shape negative": (entry(EMB, shape=[-40, -16]), f"its entry of '{EMB}'"),
    "shape a text": (entry(EMB, shape="40x16"), f"its entry of '{EMB}'"),
    "shape with True": (entry(NORM, shape=[True, 16]), f"its entry of '{NORM}'"),
    "dtype unknown": (entry(EMB, dtype="F99"), f"its entry of '{EMB}'"),
    "dtype a list": (entry(EMB, dtype=["F32"]), f"its entry of '{EMB}'"),
    "dtype integers": (entry(EMB, dtype="I32"), f"no floating-point numbers: {EMB}"),
    "entry a number": (header(lambda h: {**h, EMB: 7}), f"its entry of '{EMB}'"),
    "the same tensor twice": (header(twice), f"'{NORM}' is there twice"),
    "a name with a terminal's codes": (header(lambda h: {**h, "\x1b[2Jx": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}), r"its entry of '\\x1b\[2Jx'"),
    "metadata no texts": (header(lambda h: {"__metadata__": {"a": [1]}, **h}), "__metadata__ is no table of texts"),
    "metadata a list": (header(lambda h: {"__metadata__": [], **h}), "__metadata__ is no table of texts"),
    "NaN": (value(EMB, float("nan")), f"{EMB} holds numbers that are not finite"),
    "infinity": (value(NORM, float("inf")), f"{NORM} holds numbers that are not finite"),
    "minus infinity": (value("lm_head.weight", float("-inf"), at=600), "lm_head.weight holds numbers that are not finite"),
    "another shape": (entry(EMB, shape=[16, 40]), rf"wrong shape: {EMB} is \(16, 40\) in the file"),
    "30,000 tensors of nothing": (header(lambda h: h | {f"x{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(30_000)}), "unexpected: x0"),
    "a web page": (whole(lambda f: PAGE), r"is damaged or no safetensors file \(it is a web page"),
    "a pointer of Git LFS": (whole(lambda f: LFS), r"\(it only points to a file of Git LFS: run git lfs pull\)"),
    "a pickle": (whole(lambda f: pickle.dumps(Evil())), DAMAGED),
}  # fmt: skip


def weight_map(change):
    def spoil(files):
        index = json.loads(files[INDEX])
        return {**files, INDEX: json.dumps(change(index)).encode()}

    return spoil


def first_in(shard):
    return weight_map(lambda i: {"weight_map": {**i["weight_map"], EMB: shard}})


OUTSIDE = "which is not a file of its own folder"
INDEXES = {
    "a shard above": (first_in("../model-1.safetensors"), OUTSIDE),
    "a shard by its whole path": (first_in("/etc/model.safetensors"), OUTSIDE),
    "a shard in a folder": (first_in("a/model-1.safetensors"), OUTSIDE),
    "a shard in a Windows folder": (first_in("..\\model-1.safetensors"), OUTSIDE),
    "a shard that is a number": (first_in(5), OUTSIDE),
    "a shard that is a pickle": (first_in("model-1.bin"), OUTSIDE),
    "a shard that is nothing": (first_in(""), OUTSIDE),
    "a shard that is lost": (first_in("model-9.safetensors"), "names model-9.safetensors, which is missing from"),
    "a shard that has it not": (first_in("model-2.safetensors"), f"says that {EMB} is in model-2.safetensors; it is not"),
    "no map": (weight_map(lambda i: {}), "it has no weight_map"),
    "a map that is a list": (weight_map(lambda i: {"weight_map": []}), "it has no weight_map"),
    "an empty map": (weight_map(lambda i: {"weight_map": {}}), "it has no weight_map"),
    "a tensor twice in the map": (whole(lambda f: f.replace(b'{"weight_map": {', b'{"weight_map": {"%s": "x.safetensors", ' % EMB.encode()), INDEX), f"'{EMB}' is there twice"),
    "no JSON": (whole(lambda f: f[:-5], INDEX), "is no JSON"),
    "the same tensor in two shards": (lambda f: {**f, "model-2.safetensors": f["model-1.safetensors"]}, "is in model-1.safetensors and in model-2"),
    "a shard that is cut": (whole(lambda f: f[:-9], "model-2.safetensors"), "model-2.safetensors is damaged"),
}  # fmt: skip


# --- .pth ----------


def state(change):
    """Spoil Meta's tensors: change(dict) -> what is saved instead."""

    def spoil(files):
        found = torch.load(io.BytesIO(files["consolidated.00.pth"]), weights_only=True)
        return {**files, "consolidated.00.pth": pth(change(found))}

    return spoil


def params(**changes):
    def spoil(files):
        return {
            **files,
            "params.json": json.dumps({**json.loads(files["params.json"]), **changes}).encode(),
        }

    return spoil


def expanded(found):
    return {**found, "output.weight": torch.zeros(1).expand(2**20, 2**20)}


WQ, NOT_PLAIN = "layers.0.attention.wq.weight", "consolidated.00.pth is no plain .pth of tensors"
P = "consolidated.00.pth"
PTH = {
    "code instead of a tensor": (state(lambda s: {**s, WQ: Evil()}), NOT_PLAIN),
    "code instead of everything": (state(lambda s: Evil()), NOT_PLAIN),
    "code in a plain pickle": (whole(lambda f: pickle.dumps(Evil()), P), NOT_PLAIN),
    "empty": (whole(lambda f: b"", P), NOT_PLAIN),
    "cut": (whole(lambda f: f[: len(f) // 2], P), NOT_PLAIN),
    "a web page": (whole(lambda f: PAGE, P), r"no plain .pth of tensors \(it is a web page"),
    "a list": (state(lambda s: list(s.values())), NOT_PLAIN),
    "a text among the tensors": (state(lambda s: {**s, WQ: "tensor"}), f"{WQ} is no tensor, but str"),
    "a number as a name": (state(lambda s: {**s, 7: s[WQ]}), "'7' is no name of a tensor"),
    "a sparse tensor": (state(lambda s: {**s, WQ: s[WQ].to_sparse()}), f"{WQ} is no dense tensor"),
    "a tensor without numbers": (state(lambda s: {**s, WQ: torch.empty(2**40, device="meta")}), f"{WQ} is no dense tensor"),
    "a tensor that repeats one number": (state(expanded), "output.weight claims [0-9,]+ bytes, the file has fewer"),
    "NaN": (state(lambda s: {**s, WQ: s[WQ] * float("nan")}), f"{WQ} holds numbers that are not finite"),
    "integers": (state(lambda s: {**s, WQ: s[WQ].int()}), f"no floating-point numbers: {WQ}"),
    "another shape": (state(lambda s: {**s, WQ: s[WQ][:8]}), f"wrong shape: {WQ}"),
    "no embedding": (state(lambda s: {k: v for k, v in s.items() if "tok" not in k}), "lack what a Llama needs"),
    "a second shard without a tensor": (lambda f: {**f, "consolidated.01.pth": pth({WQ: torch.zeros(16, 16)})}, "lacks .*, which another shard has"),
    "params no JSON": (whole(lambda f: b"{", "params.json"), "params.json is no JSON"),
    "params a list": (whole(lambda f: b"[]", "params.json"), "must hold one JSON object"),
    "width a text": (params(dim="16"), "says dim='16', which is no number"),
    "width zero": (params(dim=0), "lack what a Llama needs"),
    "width a fraction": (params(dim=16.5), "params.json: .*must be a whole number"),
    "no heads": (params(n_heads=None), "params.json lacks n_heads"),
    "heads that do not divide": (params(n_heads=3), "n_heads=3 does not divide"),
    "zero layers": (params(n_layers=0), "n_layers=0 must be a whole number"),
    "a billion layers": (params(n_layers=10**9), r"says n_layers=1000000000, but holds \d+ tensors"),
    "epsilon a list": (params(norm_eps=[1]), r"says norm_eps=\[1\], which is no number"),
    "base a text": (params(rope_theta="x"), "says rope_theta='x', which is no number"),
    "base infinite": (params(rope_theta=1e999), "says rope_theta=inf, which is no number"),
    "vocabulary huge": (params(vocab_size=10**12), "needs [0-9.]+ GB of memory"),
}  # fmt: skip


# --- GGUF ----------


def changed_gguf(**changes):
    """Write the GGUF file anew with other fields or entries."""
    return lambda files: {"model.gguf": gguf(files["tensors"], **changes)}


def field(key, raw):
    return changed_gguf(fields={key: raw})


def info(**changes):
    return changed_gguf(infos={"token_embd.weight": changes})


def many_lists(files):
    lists = {f"a{n}": LIST + struct.pack("<IQ", 0, 2**20) + bytes(2**20) for n in range(3)}
    return {G: gguf(files["tensors"], fields=lists)}


LIST, BAD = struct.pack("<I", 9), "model.gguf is damaged or no GGUF file"
G = "model.gguf"
GGUF = {
    "empty": (whole(lambda f: b"", G), BAD),
    "bad magic": (changed_gguf(start=b"GGUX"), f"{BAD}: it does not begin with GGUF"),
    "version 99": (changed_gguf(version=99), "version 99; 2 and 3 are known"),
    "the other byte order": (changed_gguf(version=3 << 24), "version 50331648"),
    "cut in the header": (whole(lambda f: f[:200], G), "its header claims"),
    "cut in the data": (whole(lambda f: f[:-100], G), "lies outside the file"),
    "2**63 tensors": (changed_gguf(n_tensors=2**63), "it claims 9,223,372,036,854,775,808 tensors"),
    "2**63 fields": (changed_gguf(n_fields=2**63), "9,223,372,036,854,775,808 fields"),
    "60,000 tensors that are not there": (changed_gguf(n_tensors=60_000), BAD),
    "a text of 2**60 bytes": (field("a", struct.pack("<IQ", 8, 2**60)), "its header claims 1,152,921,504,606,846,976 bytes more"),
    "a name of 2**60 bytes": (changed_gguf(extra=struct.pack("<Q", 2**60), n_fields=10), "its header claims"),
    "a list of 2**60": (field("a", LIST + struct.pack("<IQ", 0, 2**60)), "a list in its header claims 1,152,921,504,606,846,976 entries"),
    "a list of a million that is not there": (field("a", LIST + struct.pack("<IQ", 6, 10**6)), "its header claims"),
    "three lists of a million bytes": (many_lists, "a list in its header claims 1,048,576 entries of kind 0"),
    "a list of lists": (field("a", LIST + struct.pack("<IQ", 9, 1)), "a list in its header"),
    "a field of kind 77": (field("a", struct.pack("<I", 77)), "a field is of kind 77"),
    "a text that is not UTF-8": (field("a", struct.pack("<I", 8) + text(b"\xff\xfe")), BAD),
    "a field twice": (changed_gguf(extra=text("llama.block_count") + number(2), n_fields=10), "'llama.block_count' is there twice"),
    "a tensor twice": (info(name="output.weight"), "'output.weight' is there twice"),
    "a tensor of kind 999": (info(kind=999), BAD),
    "a tensor of integers": (info(kind=26), "is of type I32, which cannot be read"),
    "blocks that do not divide the rows": (info(kind=8), "is no whole blocks of Q8_0"),
    "nine axes": (info(n_axes=9), "a tensor has 9 axes"),
    "a tensor of nothing": (info(axes=(0, 40)), "no whole blocks"),
    "a tensor of 2**62 rows": (info(axes=(16, 2**62)), "overlaps another tensor or lies outside"),
    "an offset beyond the file": (info(offset=2**62), "lies outside the file"),
    "no embedding": (info(name="zz"), "vocab_size=0"),
    "overlapping tensors": (changed_gguf(infos={"output.weight": {"offset": 0}}), "overlaps another tensor"),
    "alignment zero": (field("general.alignment", number(0)), "general.alignment is 0"),
    "alignment a text": (field("general.alignment", struct.pack("<I", 8) + text("x")), "general.alignment is 'x'"),
    "another architecture": (field("general.architecture", struct.pack("<I", 8) + text("mamba")), "architecture 'mamba'"),
    "no architecture": (field("general.architecture", None), "architecture None"),
    "heads a text": (field("llama.attention.head_count", struct.pack("<I", 8) + text("2")), "head_count='2', which is no number"),
    "heads a list": (field("llama.attention.head_count", LIST + struct.pack("<IQ", 4, 1) + struct.pack("<I", 2)), r"head_count=\[2\], which is no number"),
    "zero heads": (field("llama.attention.head_count", number(0)), "n_heads=0 must be a whole number"),
    "heads that do not divide": (field("llama.attention.head_count", number(3)), "n_heads=3 does not divide"),
    "zero layers": (field("llama.block_count", number(0)), "n_layers=0"),
    "four billion layers": (field("llama.block_count", number(2**32 - 1)), r"says n_layers=4294967295, but holds 21 tensors"),
    "no width": (field("llama.embedding_length", None), "lacks llama.embedding_length"),
    "epsilon NaN": (field("llama.attention.layer_norm_rms_epsilon", number(float("nan"))), "epsilon=nan, which is no number"),
    "a web page": (whole(lambda f: PAGE, G), r"no GGUF file \(it is a web page"),
}  # fmt: skip


# --- config.json and the small files ----------


def config(**changes):
    def spoil(files):
        raw = {**json.loads(files["config.json"]), **changes}
        return {**files, "config.json": json.dumps(raw).encode()}

    return spoil


def beside(name, data):
    return lambda files: {**files, name: data}


C = "config.json"
CONFIGS = {
    "no JSON": (whole(lambda f: f[:-3], C), "config.json is no JSON"),
    "a web page": (whole(lambda f: PAGE, C), r"config.json is no JSON \(it is a web page"),
    "a list": (whole(lambda f: b"[]", C), "must hold one JSON object, not list"),
    "very deep": (whole(lambda f: b'{"a":' * 100_000, C), "config.json is no JSON"),
    "5 MB": (whole(lambda f: f + b" " * 5_000_000, C), "is no JSON of a model: it has 5,"),
    "an entry twice": (whole(lambda f: b'{"hidden_size": 16, ' + f.strip()[1:], C), "'hidden_size' is there twice"),
    "width a text": (config(hidden_size="16"), "emb_dim='16' must be a whole number"),
    "width a fraction": (config(hidden_size=16.5), "emb_dim=16.5"),
    "width negative": (config(hidden_size=-16), "emb_dim=-16"),
    "width true": (config(hidden_size=True), "emb_dim=True"),
    "heads that do not divide": (config(num_attention_heads=3, head_dim=None), "n_heads=3 does not divide emb_dim=16"),
    "groups that do not divide": (config(num_key_value_heads=3), "n_kv_groups=3 does not divide"),
    "zero heads": (config(num_attention_heads=0), "n_heads=0"),
    "zero layers": (config(num_hidden_layers=0), "n_layers=0 must be a whole number"),
    "a billion layers": (config(num_hidden_layers=10**9), r"says n_layers=1000000000, but holds 21 tensors"),
    "vocabulary of 10**12": (config(vocab_size=10**12), "needs [0-9.]+ GB of memory"),
    "vocabulary of 10**30": (config(vocab_size=10**30), "sizes that no machine can hold"),
    "width of 10**18": (config(hidden_size=10**18), "sizes that no machine can hold|heads of a size"),
    "context of 10**12": (config(max_position_embeddings=10**12), "context_length=1000000000000"),
    "head of 10**9": (config(head_dim=10**9), "heads of a size that no model has"),
    "vocabulary other than the file's": (config(vocab_size=41), f"wrong shape: {EMB}"),
    "epsilon NaN": (config(rms_norm_eps=float("nan")), "norm_eps=nan must be a number"),
    "epsilon infinite": (config(rms_norm_eps=float("inf")), "norm_eps=inf must be a number"),
    "epsilon zero": (config(rms_norm_eps=0), "norm_eps=0 must be a number > 0"),
    "base a text": (config(rope_parameters={"rope_theta": "10"}), "rope_base='10' must be a number"),
    "base 10**400": (config(rope_parameters={"rope_theta": 10**400}), "must be a number"),
    "RoPE a list": (config(rope_parameters=[]), r"rope_parameters=\[\] must be an object"),
    "a type that is a list": (config(model_type=["llama"]), "model_type="),
    "code to be run": (config(model_type="x", auto_map={"AutoConfig": "evil.Config"}), "model_type='x'"),
    "tied a text": (config(tie_word_embeddings="yes"), "tie_embeddings='yes' must be True, False or None"),
    "stop tokens a text": (config(eos_token_id="2"), r"eos_token_id=\['2'\] must be ids of tokens"),
    "stop tokens in lists": (beside("generation_config.json", b'{"eos_token_id": [[1]]}'), r"eos_token_id=\[\[1\]\] must be ids"),
    "generation settings a list": (beside("generation_config.json", b"[]"), "must hold one JSON object"),
    "tokenizer settings a list": (lambda f: {**f, "tokenizer_config.json": b"[1]"}, "must hold one JSON object"),
    "a tokenizer that is no JSON": (beside("tokenizer.json", b"{"), "tokenizer.json is no tokenizer.json"),
    "a tokenizer that is very deep": (beside("tokenizer.json", b"[" * 100_000), "tokenizer.json is no tokenizer.json"),
    "a tokenizer that is empty": (beside("tokenizer.model", b""), "tokenizer.model is no SentencePiece model"),
    "a tokenizer that is a web page": (beside("tokenizer.model", PAGE), "tokenizer.model is no SentencePiece model"),
}  # fmt: skip

CASES = [
    (kind, name, *case)
    for kind, cases in (("one", SAFETENSORS), ("shards", INDEXES), ("meta", PTH), ("gguf", GGUF), ("one", CONFIGS))
    for name, case in cases.items()
]  # fmt: skip


def test_there_are_many():
    assert len(CASES) + len(RANKS) + len(VOCABULARIES) >= 60


@pytest.mark.parametrize(
    ("kind", "name", "spoil", "message"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES]
)
def test_a_file_that_lies_is_refused_by_name(kind, name, spoil, message, good, model, tmp_path, monkeypatch):  # fmt: skip
    files = dict(good[kind])
    if kind == "gguf":
        files["tensors"] = export_weights(model, model.layouts["gguf"])
    files = spoil(files)
    files.pop("tensors", None)
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", files)
    monkeypatch.chdir(tmp_path)
    before = everything(tmp_path)
    with Bounds(), pytest.raises((ValueError, OSError), match=message):
        load(tmp_path / "a")
    assert not OWNED.exists() and everything(tmp_path) == before  # nothing executed or written


def relabelled(files):
    header, data = parts(files[ONE])
    pieces, entries = b"", {}
    for name in reversed(header):  # the same tensors in another order, and the header padded
        begin, end = header[name]["data_offsets"]
        entries[name] = {**header[name], "data_offsets": [len(pieces), len(pieces) + end - begin]}
        pieces += data[begin:end]
    metadata = {"__metadata__": {"format": "pt", "note": "\u00e9"}}
    return {**files, ONE: safetensors(entries, pieces, metadata, padding=b" " * 13)}


def with_masks(files):
    header, data = parts(files[ONE])
    header["model.rotary_emb.inv_freq"] = {
        "dtype": "F32",
        "shape": [4],
        "data_offsets": [len(data), len(data) + 16],
    }
    return {**files, ONE: safetensors(header, data + struct.pack("<4f", 1, 2, 3, 4))}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, dict) for kind in ("one", "shards", "meta", "gguf")),
        ("one", relabelled),
        ("one", with_masks),
        ("one", config(torch_dtype="float32", unknown_key=[{}], max_position_embeddings=32.0 and 32)),
        ("meta", state(lambda s: {**s, "rope.freqs": torch.ones(4)})),
        ("meta", lambda f: {"params.json": f["params.json"], "other.pth": f[P]}),
        ("gguf", changed_gguf(fields={"general.alignment": number(64)}, alignment=64)),
        ("gguf", changed_gguf(fields={"general.tags": LIST + struct.pack("<IQ", 8, 2) + text("a") + text("b")})),
        ("gguf", changed_gguf(version=2)),
    ],
)  # fmt: skip
def test_an_unusual_file_that_is_right_is_read(kind, change, good, model, tmp_path):
    files = dict(good[kind])
    if kind == "gguf":
        files["tensors"] = export_weights(model, model.layouts["gguf"])
    files = change(files)
    files.pop("tensors", None)
    write(tmp_path, files)
    found = (
        load_model(tmp_path / "other.pth", "cpu", "float32").model
        if "other.pth" in files
        else load(tmp_path)
    )
    same_weights(found, model)


@pytest.mark.parametrize(
    ("kind", "entry"), [(0, b"\1"), (6, struct.pack("<f", 0.5)), (8, text("ab"))]
)
def test_lists_as_long_as_are_allowed_are_read_in_time(kind, entry, good, model, tmp_path):
    lists = {f"a{n}": LIST + struct.pack("<IQ", kind, 2**20) + entry * 2**20 for n in range(2)}
    write(tmp_path, {G: gguf(export_weights(model, model.layouts["gguf"]), fields=lists)})
    with Bounds():
        found = load(tmp_path)
    same_weights(found, model)


def same_weights(found, model):
    wanted = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


# --- tokenizers ----------


def ranks(change):
    return lambda: b"\n".join(change((DATA / "gpt2.tiktoken").read_bytes().splitlines()[:1000]))


RANKS = {
    "a rank is missing": (ranks(lambda x: x[:500] + x[501:]), "line 501: rank 501 or its token is out of order or repeated; expected rank 500"),
    "a rank is there twice": (ranks(lambda x: [*x[:500], x[499], *x[500:]]), "line 501: rank 499"),
    "a token is there twice": (ranks(lambda x: [*x[:500], x[3].split()[0] + b" 500", *x[501:]]), "line 501: rank 500 or its token"),
    "two lines changed places": (ranks(lambda x: [*x[:500], x[501], x[500], *x[502:]]), "line 501: rank 501"),
    "too few": (ranks(lambda x: x[:200]), "holds 200 tokens; byte-level BPE needs at least the 256 bytes"),
    "empty": (lambda: b"", "holds 0 tokens"),
    "no base64": (ranks(lambda x: [*x[:500], b"\xff\xff 500"]), "line 501 is not a base64 token"),
    "no rank": (ranks(lambda x: [*x[:500], b"QQ=="]), "line 501 is not a base64 token and its rank"),
    "a negative rank": (ranks(lambda x: [*x[:500], b"QQ== -1"]), "line 501: rank -1"),
    "a rank of 10**5000": (ranks(lambda x: [*x[:500], b"QQ== " + b"9" * 5000]), "line 501"),
    "a web page": (lambda: PAGE, "line 1 is not a base64 token"),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKS)
def test_a_list_of_ranks_that_lies_is_refused(name, tmp_path):
    make, message = RANKS[name]
    (tmp_path / "tokenizer.model").write_bytes(make())
    with Bounds(), pytest.raises(ValueError, match=rf"tokenizer.model.*{message}"):
        Llama3Tokenizer(tmp_path / "tokenizer.model")


def test_a_list_of_ranks_without_its_end_does_not_fit_the_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((DATA / "gpt2.tiktoken").read_bytes())
    with pytest.raises(ValueError, match=r"makes 50,512 tokens, the model has 128,256"):
        tokenizer_of(tmp_path, SimpleNamespace(vocab_size=128_256))


def vocabulary(change):
    raw = json.loads((DATA / "smollm2" / "tokenizer.json").read_bytes())
    raw["model"]["merges"], raw["model"]["vocab"] = (
        [],
        dict(list(raw["model"]["vocab"].items())[:300]),
    )
    raw["added_tokens"] = []
    change(raw["model"]["vocab"], raw)
    return json.dumps(raw).encode()


VOCABULARIES = {
    "an id is there twice": (lambda: vocabulary(lambda v, raw: v.update({"zzz": 100})), "tokenizer.json gives one id to two tokens"),
    "a merge of unknown tokens": (lambda: vocabulary(lambda v, raw: raw["model"].update(merges=["qq zz"])), "tokenizer.json is no tokenizer.json"),
    "an id below zero": (lambda: vocabulary(lambda v, raw: v.update({"zzz": -1})), "tokenizer.json is no tokenizer.json"),
    "a model of another kind": (lambda: vocabulary(lambda v, raw: raw["model"].update(type="Magic")), "tokenizer.json is no tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_that_lies_is_refused(name, tmp_path):
    make, message = VOCABULARIES[name]
    (tmp_path / "tokenizer.json").write_bytes(make())
    with Bounds(), pytest.raises(ValueError, match=message):
        JSONTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("cut", [1, 100, 1000, 200_000])
def test_a_cut_sentencepiece_model_is_refused(cut, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(
        (DATA / "sentencepiece_32k.model").read_bytes()[:-cut]
    )
    with pytest.raises(ValueError, match="tokenizer.model is no SentencePiece model"):
        Llama2Tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tokenizer.json", JSONTokenizer),
        ("tokenizer.model", Llama2Tokenizer),
        ("tokenizer.model", Llama3Tokenizer),
        ("chat_template.jinja", lambda path: tokenizer_of(path.parent, None)),
    ],
)
def test_a_tokenizers_file_larger_than_any_is_not_read(name, read, tmp_path):
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**26 + 1)
    message = f"{name} has 67,108,865 bytes, more than any tokenizer's file"
    with Bounds(growth=50e6), pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_only_what_a_model_needs_is_fetched():
    assert not any(name.endswith((".py", ".bin", ".pth", ".pkl")) for name in SMALL_FILES)


# --- at random ----------

FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", 60)), deadline=None, database=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ, suppress_health_check=list(HealthCheck),
)  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.floats(0, 0.999), st.sampled_from(["put", "insert", "cut", "swap"]), st.binary(min_size=1, max_size=9)
    ),
    min_size=1, max_size=4,
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([0, 1, 2, 3, 8, 16, 32, 2**31, 2**63, 2**64, 10**30, 1e300, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def edited(raw, edits, reach):
    """Change bytes among the first `reach`."""
    raw = bytearray(raw)
    for place, how, some in edits:
        at = int(place * min(reach, len(raw)))
        if how == "put":
            raw[at : at + len(some)] = some
        elif how == "insert":
            raw[at:at] = some
        elif how == "cut":
            del raw[at : at + len(some)]
        else:
            raw[at : at + 8] = raw[at : at + 8][::-1]
    return bytes(raw)


def refused_or_right(folder, model):
    """Either a refusal, or a model whose every row is one of the files' and finite.

    A change at random may give a tensor another's place, so the rows may be another tensor's.
    """
    with Bounds():
        try:
            found = load(folder)
        except (ValueError, OSError) as error:
            assert str(error)
            return
    shapes = {name: p.shape for name, p in model.named_parameters()}
    held = everything(folder).values()
    for name, parameter in found.named_parameters():
        assert parameter.shape == shapes[name] and bool(parameter.isfinite().all())
        for row in parameter.detach().reshape(-1, parameter.shape[-1]).numpy():
            assert any(row.tobytes() in raw for raw in held), name


@pytest.mark.parametrize(
    ("kind", "file", "reach"),
    [("one", ONE, 2200), ("shards", INDEX, 1500), ("gguf", G, 1700), ("meta", P, 10**6)],
)
def test_a_header_changed_at_random_is_refused_or_harmless(
    kind, file, reach, good, model, tmp_path
):
    @FUZZ
    @given(EDITS)
    def run(edits):
        write(tmp_path, {**good[kind], file: edited(good[kind][file], edits, reach)})
        refused_or_right(tmp_path, model)

    run()


@pytest.mark.parametrize(("kind", "file"), [("one", C), ("meta", "params.json")])
def test_an_entry_changed_at_random_is_refused_or_harmless(kind, file, good, model, tmp_path):
    raw = json.loads(good[kind][file])

    @FUZZ
    @given(st.sampled_from(sorted(raw)), JSON)
    def run(key, new):
        write(tmp_path, {**good[kind], file: json.dumps({**raw, key: new}).encode()})
        refused_or_right(tmp_path, model)

    run()


def test_a_tensors_entry_changed_at_random_is_refused_or_harmless(good, model, tmp_path):
    header, data = parts(good["one"][ONE])

    @FUZZ
    @given(
        st.sampled_from(sorted(header)), st.sampled_from(["dtype", "shape", "data_offsets"]), JSON
    )
    def run(name, key, new):
        spoiled = {**header, name: {**header[name], key: new}}
        write(tmp_path, {**good["one"], ONE: safetensors(spoiled, data)})
        refused_or_right(tmp_path, model)

    run()
