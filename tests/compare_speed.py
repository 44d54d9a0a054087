"""Our decoding beside other programs', on the same random weights, taking turns in one run.

    pip install --no-deps llms-from-scratch==1.0.19
    pip install --no-deps llama-cpp-python diskcache        # compiles for ten minutes
    python tests/compare_speed.py --shape llama-3.2-1b --dtype bfloat16 --out comparison.json

A program that is not installed is left out. Those that are compute first, beside ours, the logits
after the prompt and of one decode step: one that computes something else is not timed. No test and no requirement.
"""

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers import benchmark
from helpers.benchmark import Way, random_ids, random_model, twin
from helpers.checkpoints import dtype_named
from helpers.fast import CompiledDecoding, prepare_for_decoding
from helpers.kv_cache import KVCache
from helpers.model_config import write_config
from helpers.weights import export_weights

CLOSE = 0.1  # of the logits' root mean square: some keep the cache, and compute, in half precision


def transformers_model(model):
    import transformers

    config = transformers.LlamaConfig(**write_config(model), attn_implementation="sdpa")
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(
        export_weights(model, model.layouts["huggingface"]), assign=True, strict=False
    )
    theirs.tie_weights()
    rotary = theirs.model.rotary_emb
    theirs.model.rotary_emb = type(rotary)(config)  # its buffers were on the meta device
    return theirs.eval()


def with_transformers(model):
    """transformers, sdpa attention and its own growing cache, called directly."""
    from transformers import DynamicCache

    theirs = transformers_model(model)

    def run(ids, cache, last_only):
        return theirs(ids, cache=cache, use_cache=True, logits_to_keep=1).logits

    return Way(run, lambda rows, capacity: DynamicCache(config=theirs.config))


def with_llms_from_scratch(model):
    """The book's Llama 3 with its KV cache."""
    from llms_from_scratch.kv_cache.llama3 import KVCache as TheirCache
    from llms_from_scratch.kv_cache.llama3 import Llama3Model

    cfg = model.cfg
    keys = ("vocab_size", "emb_dim", "n_heads", "n_layers", "hidden_dim", "n_kv_groups")
    settings = {key: cfg[key] for key in (*keys, "rope_base", "rope_freq")}
    theirs = Llama3Model({**settings, "context_length": 8192, "dtype": model.tok_emb.weight.dtype})
    theirs.load_state_dict(model.state_dict(), assign=True, strict=False)
    theirs.eval()

    def new_cache(rows, capacity):
        theirs.reset_kv_cache()
        return TheirCache(n_layers=cfg.n_layers)

    return Way(lambda ids, cache, last_only: theirs(ids, cache), new_cache)


def write_gguf(model, path, kind):
    """The model as a GGUF file without a vocabulary, matrices in `kind`, norms in float32."""
    import gguf

    cfg, types = model.cfg, gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(cfg.context_length)
    writer.add_embedding_length(cfg.emb_dim)
    writer.add_block_count(cfg.n_layers)
    writer.add_feed_forward_length(cfg.hidden_dim)
    writer.add_head_count(cfg.n_heads)
    writer.add_head_count_kv(cfg.n_kv_groups)
    writer.add_rope_dimension_count(cfg.emb_dim // cfg.n_heads)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_freq_base(cfg.rope_base)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in export_weights(model, model.layouts["gguf"]).items():
        if tensor.dim() == 1 or kind == "F32":
            writer.add_tensor(name, tensor.float().numpy())
        elif kind == "F16":
            writer.add_tensor(name, tensor.half().numpy())
        else:
            values = tensor.bfloat16().view(torch.uint16).numpy()
            writer.add_tensor(name, values, raw_dtype=types.BF16)
    if cfg.rope_freq:
        plain, scaled = (
            type(model)({**cfg, "n_layers": 1, "vocab_size": 1, "context_length": 2, **change})
            for change in ({"rope_freq": None}, {})
        )
        half = cfg.emb_dim // cfg.n_heads // 2
        angles = [
            torch.atan2(m.pos_emb.sin[1, :half], m.pos_emb.cos[1, :half]) for m in (plain, scaled)
        ]
        writer.add_tensor("rope_freqs.weight", (angles[0] / angles[1]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_llama_cpp(model, kind, folder):
    """llama.cpp through llama-cpp-python, all threads; its file is written on the spot."""
    import llama_cpp

    path = str(Path(folder) / f"{kind}.gguf")
    write_gguf(model, path, kind)
    threads = torch.get_num_threads()
    theirs = llama_cpp.Llama(
        path, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    width = model.cfg.vocab_size

    def run(ids, cache, last_only):
        theirs.eval(ids[0].tolist())
        logits = theirs._ctx.get_logits()
        return torch.frombuffer(
            (logits._type_ * width).from_address(llama_cpp.ctypes.addressof(logits.contents)),
            dtype=torch.float32,
        )[None, None].clone()  # the next call writes there again

    def new_cache(rows, capacity):
        theirs.reset()
        return theirs

    return Way(run, new_cache)


def contenders(model, folder):
    """Name -> a function that makes the way of computing."""
    kinds = ("BF16", "F16") if model.tok_emb.weight.dtype == torch.bfloat16 else ("F32",)
    ours = twin(model)
    fast = prepare_for_decoding(twin(model))
    compiled = CompiledDecoding(fast)
    makers = {
        "ours, taught": lambda: Way(ours, partial(KVCache, ours)),
        "ours, fast": lambda: Way(fast, partial(KVCache, fast)),
        "ours, fast, compiled": lambda: Way(compiled, compiled.cache),
        "transformers, sdpa": lambda: with_transformers(model),
        "llms-from-scratch, KV cache": lambda: with_llms_from_scratch(model),
    } | {f"llama.cpp, {kind}": partial(with_llama_cpp, model, kind, folder) for kind in kinds}
    modules = {"transformers": "transformers", "llms": "llms_from_scratch", "llama": "llama_cpp"}
    for name, make in makers.items():
        module = next((m for start, m in modules.items() if name.startswith(start)), "torch")
        if importlib.util.find_spec(module) is None:
            print(f"{name}: {module} is not installed", file=sys.stderr)
        else:
            yield name, make


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=benchmark.SHAPES, default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=512, help="0: leave this part out")
    parser.add_argument("--out", help="write the result here, as JSON")
    args = parser.parse_args()
    device = torch.device("cpu")
    model = prepare_for_decoding(random_model(args.shape, "cpu", dtype_named(args.dtype)))
    ids, ways = random_ids(model, args.prompt), {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        text = torch.cat([ids, ids[:, :1]], dim=1)  # the prompt and one decode step
        wanted = twin(model)(text)[:, -2:].float()
        for name, make in contenders(model, folder):
            way = make()
            way.capacity = args.prompt + args.new
            got = way.logits(text, args.prompt)
            apart = ((got - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt().item()
            print(f"{name}: logits {apart:.4f} of their size from ours", file=sys.stderr)
            if apart < CLOSE:
                ways[name] = way
                list(way.tokens(ids, 4))  # warms up
        bandwidth = benchmark.measure_bandwidth()
        times = benchmark.measure(ways, ids, args.new, args.rounds, device)
        long = {}
        if args.prefill:
            prompt = random_ids(model, args.prefill, seed=1)
            long = benchmark.measure(ways, prompt, 1, args.rounds, device)
        bandwidth = max(bandwidth, benchmark.measure_bandwidth())
    per_token = benchmark.weight_bytes_per_token(model)
    per_token += benchmark.cache_bytes_per_token(model, args.prompt + args.new // 2)
    rows = {}
    for name in ways:
        rows[name] = benchmark.row_of(times[name], args.prompt, args.new, per_token, bandwidth)
        if long:
            middle = sorted(first for first, _ in long[name])[len(long[name]) // 2]
            rows[name]["prefill_tokens_per_second"] = args.prefill / middle
    packages = ("torch", "transformers", "llms-from-scratch", "llama-cpp-python")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    result = {
        "machine": benchmark.machine(device),
        "versions": versions,
        "model": f"{args.shape} (random weights)",
        "dtype": args.dtype,
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "rounds": args.rounds,
        "prefill_tokens": args.prefill,
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
        "weight_bytes_per_token": benchmark.weight_bytes_per_token(model),
        "bandwidth_bytes_per_second": bandwidth,
        "limit_tokens_per_second": bandwidth / benchmark.weight_bytes_per_token(model),
        "rows": rows,
    }
    print(benchmark.table(result))
    for name, row in rows.items():
        print(f"{name}: prefill {row['prefill_tokens_per_second']:.0f} tokens/s")
    print(versions)
    if args.out:
        benchmark.save(result, args.out)


if __name__ == "__main__":
    main()
