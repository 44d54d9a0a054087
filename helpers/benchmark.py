"""How fast a model decodes, beside what the memory of this machine allows.

python -m helpers.benchmark --shape llama-3.2-1b --dtype bfloat16 --out result.json
python -m helpers.benchmark --model smollm2-135m-instruct --variants eager cache fast

To decode one token, every weight is read once. So bandwidth / bytes per token is a limit that no
program passes, and each row of the table says which share of it was reached.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from helpers.attention import attend_plain
from helpers.families import format_table
from helpers.fast import CompiledDecoding, attention_backend, on_cuda, pinned, prepare_for_decoding
from helpers.kv_cache import KVCache
from helpers.llama3 import LLAMA32_CONFIG_1B, LLAMA32_CONFIG_3B, Llama3Model
from helpers.smollm2 import SMOLLM2_CONFIG_135M, SMOLLM2_CONFIG_360M, SmolLM2Model

SHAPES = {
    "llama-3.2-1b": (Llama3Model, LLAMA32_CONFIG_1B),
    "llama-3.2-3b": (Llama3Model, LLAMA32_CONFIG_3B),
    "smollm2-135m": (SmolLM2Model, SMOLLM2_CONFIG_135M),
    "smollm2-360m": (SmolLM2Model, SMOLLM2_CONFIG_360M),
}
NO_COMPILING = "compiled on CUDA devices and CPUs only"
GPU_ONLY = "GPU only: on a CPU its compilation takes minutes"
NO_COMPILER = "no C++ compiler here (g++ or clang++), which torch.compile needs on a CPU"
TOLERANCE = 0.05  # of the logits' root mean square, in bfloat16 and float16


@dataclass(frozen=True)
class Variant:
    """One way to compute: what is different from eager."""

    flash: bool = False  # attention in one pinned kernel
    cache: bool = False  # keys and values are kept
    compiled: bool = False
    prepared: bool = False  # parts of fast.py
    on_cpu: bool = True  # is it run there?

    def reason_against(self, device):
        """Why this variant cannot run here, or None."""
        if self.compiled and device.type not in ("cuda", "cpu"):
            return NO_COMPILING
        if device.type == "cpu" and not self.on_cpu:
            return GPU_ONLY
        if device.type == "cpu" and self.compiled and cpp_compiler() is None:
            return NO_COMPILER
        return None


VARIANTS = {
    "eager": Variant(),
    "flash": Variant(flash=True),
    "cache": Variant(cache=True),
    "cache, flash": Variant(flash=True, cache=True),
    "compiled": Variant(compiled=True),
    "compiled, flash": Variant(flash=True, compiled=True, on_cpu=False),
    "compiled, cache": Variant(cache=True, compiled=True, on_cpu=False),
    "fast": Variant(cache=True, prepared=True),
    "fast, compiled": Variant(cache=True, prepared=True, compiled=True),
}


def cpp_compiler():
    """The C++ compiler that torch.compile would find, or None."""
    names = [os.environ.get("CXX"), "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


# --- one way to compute ----------


class Way:
    """What is measured: it continues a prompt greedily, and gives logits to compare.

    run         called like a model
    new_cache   makes a cache of (rows, capacity), or None: the whole text again for every token
    capacity    at least so many tokens fit into every cache: warm-up and proof have the timed size
    """

    def __init__(self, run, new_cache=None):
        self.run, self.new_cache = run, new_cache
        self.capacity = self.cache_bytes = 0  # cache_bytes: of the last cache that was made
        self.peak_bytes = None  # in the timed rounds

    def start(self, rows, tokens):
        """An empty cache, or None."""
        if self.new_cache is None:
            return None
        cache = self.new_cache(rows, max(self.capacity, tokens))
        self.cache_bytes = getattr(cache, "cache_bytes", 0)
        return cache

    @torch.no_grad()
    def tokens(self, ids, new):
        """Yield `new` greedy tokens (B, 1) after (B, T) ids: one prefill, new - 1 decode calls."""
        cache = self.start(len(ids), ids.shape[1] + new)
        seen = ids
        for _ in range(new):
            token = self.run(seen, cache, last_only=True)[:, -1].argmax(dim=-1, keepdim=True)
            yield token
            seen = token if cache is not None else torch.cat([seen, token], dim=1)

    @torch.no_grad()
    def logits(self, ids, prompt):
        """Logits (B, T - prompt + 1, V) of given ids, each text a token longer than the last."""
        cache = self.start(*ids.shape)
        pieces = []
        for end in range(prompt, ids.shape[1] + 1):
            seen = ids[:, 0 if cache is None or end == prompt else end - 1 : end]
            pieces.append(self.run(seen, cache, last_only=True)[:, -1:].float())
        return torch.cat(pieces, dim=1)


def twin(model, attend=attend_plain):
    """The taught model on the very weights of `model`, with another function that attends."""
    cls = type(model)
    twin_class = type(cls.__name__, (cls,), {"parts": replace(cls.parts, attend=attend)})
    with torch.device("meta"):
        other = twin_class(model.cfg)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval().to(model.tok_emb.weight.device)


def build(model, variant):
    """A variant of this model, sharing its weights."""
    weight = model.tok_emb.weight
    attend = pinned(attention_backend(weight.device, weight.dtype)) if variant.flash else None
    other = twin(model, attend or attend_plain)
    if variant.prepared:
        prepare_for_decoding(other)
    if variant.compiled and variant.cache:
        compiled = CompiledDecoding(other)
        return Way(compiled, compiled.cache)
    if variant.compiled and on_cuda(other):
        return Way(torch.compile(other, dynamic=True))
    if variant.compiled:
        for block in other.trf_blocks:  # per block: all of them share one compilation
            block.compile(dynamic=True)
    return Way(other, partial(KVCache, other) if variant.cache else None)


# --- proof before time ----------


def prove(way, model, ids, new, wanted=None):
    """Does this way compute what the taught model computes? Returns the proof in words.

    float32   the same greedy tokens
    else      the same logits of one text, within TOLERANCE of their root mean square; in half the
              precision a near-tie may be decided otherwise, and from there on texts part
    wanted    eager's tokens where they are known already

    Errors    AssertionError with the first token that differs, or the difference
    """
    if model.tok_emb.weight.dtype == torch.float32:
        if wanted is None:
            wanted = torch.cat(list(Way(model).tokens(ids, new)), dim=1)
        wanted = wanted[:, :new]
        got = torch.cat(list(way.tokens(ids, new)), dim=1)
        if not torch.equal(got, wanted):
            at = (got != wanted).any(dim=0).nonzero()[0].item()
            raise AssertionError(
                f"token {at + 1} of {new} is {got[:, at].tolist()}, eager has "
                f"{wanted[:, at].tolist()}"
            )
        return f"{new} greedy tokens as eager"
    more = ids.flip(1).repeat(1, new // ids.shape[1] + 1)[:, :new]
    text = torch.cat([ids, more], dim=1)  # any text will do
    got = way.logits(text, ids.shape[1])
    with torch.no_grad():
        exact = model(text)[:, -got.shape[1] :].float()  # one pass: every position sees its past
    apart = ((got - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()).item()
    if not apart <= TOLERANCE:
        raise AssertionError(f"logits are {apart:.3f} of their size away; allowed is {TOLERANCE}")
    return f"logits within {TOLERANCE:.0%} of eager's"


def attention_that_ran(way, ids):
    """The attention kernel that this way really runs, from PyTorch's profiler.

    One name, or where they differ that of the prefill, then that of a decode step.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports its own start and stop
    tokens, ran = way.tokens(ids, 2), []
    for _ in range(2):
        with torch.profiler.profile() as profile:
            next(tokens)
        ran.append(kernels({event.name for event in profile.events()}))
    return " / ".join(dict.fromkeys(ran))


def kernels(names):
    """The attention kernels among the names of a profile."""
    kinds = {
        "flash_attention": "flash",
        "efficient_attention": "memory-efficient",
        "cudnn_attention": "cudnn",
        "attention_math": "math",
    }
    ran = {
        word
        for name in names
        if "_scaled_dot_product" in name
        for kind, word in kinds.items()
        if kind in name
    }
    return ", ".join(sorted(ran)) or "matrix products"


# --- measuring ----------


def synchronize(device):
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def time_once(way, ids, new, device):
    """(seconds to the first token, seconds for the new - 1 decode calls after it)."""
    synchronize(device)
    start = time.perf_counter()
    tokens = way.tokens(ids, new)
    next(tokens)
    synchronize(device)
    first = time.perf_counter()
    for _ in tokens:
        pass
    synchronize(device)
    return first - start, time.perf_counter() - first


def measure_bandwidth(device="cpu", buffer_bytes=None, rounds=7):
    """Bytes per second that this device can read, with all threads, from its main memory.

    The buffer must be much larger than all caches; half a gigabyte on a CPU, four on a GPU. On a
    GPU a copy reads and writes, and both count. Less where memory is short: a quarter of what is
    free.
    """
    device = torch.device(device)
    size = buffer_bytes or (2**29 if device.type == "cpu" else 2**32)
    size = max(min(size, free_bytes(device) // 4) // 2**14, 1) * 2**14  # whole rows of 4096
    buffer = torch.ones(size // 4, device=device)
    other = torch.empty_like(buffer) if device.type != "cpu" else None
    readers = {"sum": (buffer.sum, size)}
    if device.type == "cpu":
        matrix, vector = buffer.view(-1, 4096), torch.ones(4096)
        readers["mv"] = (lambda: torch.mv(matrix, vector), size)
    else:
        readers["copy"] = (lambda: other.copy_(buffer), 2 * size)
    best = 0
    for read, moved in readers.values():
        seconds = []
        for _ in range(rounds):
            synchronize(device)
            start = time.perf_counter()
            read()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        best = max(best, moved / statistics.median(seconds[1:]))
    return best


def free_bytes(device):
    """Bytes of memory that are free, or a very large number where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if Path("/proc/meminfo").exists():
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next((line for line in lines if line.startswith("MemAvailable")), "x 1000000000")
        return int(line.split()[1]) * 1024
    return 2**50


def weight_bytes_per_token(model):
    """Bytes of weights that one decode step reads: all of them once.

    Of an embedding table that is not the head too, only the token's row is read.
    """
    unused = 0 if model.tied else model.tok_emb.weight.nbytes
    return sum(p.nbytes for p in model.parameters()) - unused


def cache_bytes_per_token(model, length):
    """Bytes of keys and values that one decode step reads when `length` tokens are kept."""
    att = model.trf_blocks[0].att
    per_token = 2 * len(model.trf_blocks) * att.num_kv_groups * att.head_dim
    return per_token * length * model.tok_emb.weight.element_size()


class PeakMemory:
    """Most memory in use inside a `with`: of the device, or of this process on a CPU.

    `bytes` is None where the system does not say.
    """

    def __init__(self, device):
        self.device, self.bytes = device, None

    def __enter__(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the old peak
            except OSError:
                self.device = None
        return self

    def __exit__(self, *error):
        if self.device is None:
            return
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self.device.type == "cpu":
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            self.bytes = int(line.split()[1]) * 1024


def few(way, new, device):
    """How many tokens to measure: 8 where a CPU computes the whole text for each of them."""
    return new if way.new_cache or device.type != "cpu" else min(new, 8)


def measure(ways, ids, new, rounds, device):
    """Seconds of every round, the ways taking turns: name -> [(first token, decoding), ...].

    A way that runs out of memory drops out: in its place is the error.
    """
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            if isinstance(times[name], Exception):
                continue
            try:
                with PeakMemory(device) as peak:
                    seconds = time_once(way, ids, few(way, new, device), device)
            except OUT_OF_MEMORY as error:
                times[name] = error
                continue
            times[name].append(seconds)
            if peak.bytes is not None:
                way.peak_bytes = max(peak.bytes, way.peak_bytes or 0)
    return times


OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def note_on(error):
    """An error as the note of a row."""
    kind = "out of memory" if isinstance(error, OUT_OF_MEMORY) else "did not run"
    return f"{kind}: {(str(error).splitlines() or [type(error).__name__])[0]}"


def row_of(times, prompt, new, bytes_per_token, bandwidth, rows=1):
    """What a row of the table says about one way's rounds."""
    first = [seconds for seconds, _ in times]
    speeds = [rows * (new - 1) / seconds for _, seconds in times]
    middle = statistics.median(speeds)
    return {
        "first_token_seconds": statistics.median(first),
        "prefill_tokens_per_second": rows * prompt / statistics.median(first),
        "tokens_per_second": middle,
        "slowest": min(speeds),
        "fastest": max(speeds),
        "new_tokens": new,
        "bytes_per_token": bytes_per_token,
        "share_of_limit": middle / rows * bytes_per_token / bandwidth,
    }


def benchmark(model, ids, new=64, variants=tuple(VARIANTS), rounds=5, name="model"):
    """Prove and time variants of a model after (1, T) prompt ids; returns a dict for JSON.

    A variant that is not proved is not timed: its row says why. The model is prepared in place, so
    that all variants share one copy of the weights.
    """
    device, dtype = model.tok_emb.weight.device, model.tok_emb.weight.dtype
    ids, prompt = ids.to(device), ids.shape[1]
    prepare_for_decoding(model)
    bandwidth = measure_bandwidth(device)
    result = {
        "machine": machine(device),
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": prompt,
        "new_tokens": new,
        "rounds": rounds,
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
        "weight_bytes_per_token": weight_bytes_per_token(model),
        "bandwidth_bytes_per_second": bandwidth,
        "rows": {},
    }
    result["limit_tokens_per_second"] = bandwidth / result["weight_bytes_per_token"]
    proved = min(max(8, min(new, 32)), model.cfg["context_length"] - prompt)
    eager, ways, rows = twin(model), {}, result["rows"]
    wanted = None
    if dtype == torch.float32:
        wanted = torch.cat(list(Way(eager).tokens(ids, proved)), dim=1)
    for variant in variants:
        rows[variant] = row = {}
        if note := VARIANTS[variant].reason_against(device):
            row["note"] = note
            continue
        try:
            start = time.perf_counter()
            way = build(model, VARIANTS[variant])
            way.capacity = prompt + max(new, proved)
            time_once(way, ids, min(new, 4), device)  # warms up, compiles
            if VARIANTS[variant].compiled:
                row["compile_seconds"] = time.perf_counter() - start
            row["proof"] = prove(way, eager, ids, few(way, proved, device), wanted)
            row["attention"] = attention_that_ran(way, ids)
        except AssertionError as error:
            row["note"] = f"not timed, since it is wrong: {error}"
            continue
        except (RuntimeError, MemoryError) as error:  # of memory, of the compiler, of a kernel
            row["note"] = note_on(error)
            continue
        ways[variant] = way
    times = measure(ways, ids, new, rounds, device)
    for variant, way in ways.items():
        if isinstance(times[variant], Exception):
            rows[variant] = {"note": note_on(times[variant])}
            continue
        rows[variant] |= {"peak_bytes": way.peak_bytes, "cache_bytes": way.cache_bytes}
        kept = cache_bytes_per_token(model, prompt + new // 2) if way.new_cache else 0
        bytes_per_token = weight_bytes_per_token(model) + kept
        decoded = few(way, new, device)
        rows[variant] |= row_of(times[variant], prompt, decoded, bytes_per_token, bandwidth)
    return result


def machine(device):
    """What a reader needs to know to compare numbers."""
    kind = platform.processor() or platform.machine()
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        kind = names[0] if names else kind
    return {
        "device": device.type,
        "name": kind,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


# --- showing ----------


def table(result):
    """A benchmark's result as a table in Markdown, what it was measured with above it."""
    where = result["machine"]
    head = (
        f"{result['model']} in {result['dtype']} on {where['name']} ({where['device']}, "
        f"{where['threads']} threads), PyTorch {where['torch']}, {where['date']}; prompt "
        f"{result['prompt_tokens']}, {result['new_tokens']} new tokens, median of "
        f"{result['rounds']} rounds.\n"
        f"Bandwidth {result['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s over "
        f"{result['weight_bytes_per_token'] / 1e9:.2f} GB of weights read per token (all weights: "
        f"{result['weight_bytes'] / 1e9:.2f} GB): at most "
        f"{result['limit_tokens_per_second']:.1f} tokens/s. Peak memory is that of the "
        f"{'process' if where['device'] == 'cpu' else 'device'}, weights and cache included.\n"
    )
    head_line = ", tokens/s, range, of the limit, first token, attention, cache, peak memory, "
    lines = [head_line.split(", ")]
    for name, row in result["rows"].items():
        if "tokens_per_second" not in row:
            lines.append([name, *[""] * 7, row["note"]])
            continue
        notes = [f"compiled in {row['compile_seconds']:.0f} s"] if "compile_seconds" in row else []
        if row["new_tokens"] != result["new_tokens"]:
            notes.append(f"{row['new_tokens']} new tokens")
        cache, peak = row.get("cache_bytes"), row.get("peak_bytes")
        lines.append(
            [
                name,
                f"{row['tokens_per_second']:.1f}",
                f"{row['slowest']:.1f} to {row['fastest']:.1f}",
                f"{row['share_of_limit']:.0%}",
                f"{row['first_token_seconds']:.2f} s",
                row.get("attention", ""),
                f"{cache / 1e6:.1f} MB" if cache else "",
                f"{peak / 1e9:.2f} GB" if peak else "",
                ", ".join(notes),
            ]
        )
    return head + "\n" + format_table(lines)


def save(result, file):
    """Write a result as JSON."""
    Path(file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def load(file):
    """Read a result that `save` wrote."""
    return json.loads(Path(file).read_text(encoding="utf-8"))


# --- models to measure ----------


def random_model(shape, device="cpu", dtype=torch.bfloat16):
    """A model of a real shape with random weights: its speed is that of the real one.

    One small block of random numbers is repeated, since a billion draws take a minute.
    """
    model_class, cfg = SHAPES[shape]
    with torch.device("meta"):
        model = model_class({**cfg, "dtype": dtype})
    model = model.to_empty(device=device).eval()
    noise = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0))
    noise = noise.to(device, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            scale = 1 / parameter.shape[1] ** 0.5
            for part in parameter.view(-1).split(len(noise)):
                torch.mul(noise[: len(part)], scale, out=part)
    return model


def random_ids(model, prompt, seed=0):
    """(1, prompt) token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.cfg["vocab_size"], (1, prompt), generator=generator)


def main(arguments=None):
    """The terminal command: a table on stdout, the result as JSON where asked for."""
    from helpers.checkpoints import load_model, pick_device, pick_dtype

    parser = argparse.ArgumentParser(
        prog="python -m helpers.benchmark", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", help="a known name, a folder: see helpers.checkpoints")
    what.add_argument("--shape", choices=SHAPES, help="random weights of this model's shape")
    parser.add_argument("--device", help="cpu, cuda, mps; default: the best one here")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--prompt", type=int, default=32, help="tokens (default: %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--out", help="write the result here, as JSON")
    args = parser.parse_args(arguments)
    if args.prompt < 1 or args.new < 2 or args.rounds < 1:
        parser.error("--prompt and --rounds must be at least 1, --new at least 2")
    try:
        device = pick_device(args.device)
        dtype = pick_dtype(device, args.dtype)
        if args.shape:
            name, model = f"{args.shape} (random weights)", random_model(args.shape, device, dtype)
        else:
            loaded = load_model(args.model or "auto", device=device, dtype=dtype)
            name, model = loaded.name, loaded.model
        ids = random_ids(model, args.prompt)
        result = benchmark(model, ids, args.new, args.variants, args.rounds, name)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(result))
    if args.out:
        save(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
