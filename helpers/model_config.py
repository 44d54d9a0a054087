"""From a checkpoint's own description of itself to our Config, and back; nothing is guessed.

Three descriptions exist: Hugging Face's config.json, Meta's params.json and the metadata of a GGUF
file.
"""

from dataclasses import replace
from numbers import Real

import torch

from helpers.config import Config
from helpers.families import MODEL_TYPES
from helpers.llama3 import (
    LLAMA31_CONFIG_8B,
    LLAMA31_CONFIG_70B,
    LLAMA32_CONFIG_1B,
    LLAMA32_CONFIG_3B,
    Llama3Model,
)
from helpers.positions import rescale

# what a config.json may say besides sizes, and the only value that this skeleton computes
LLAMA_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
}
GPT2_FIXED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
ROPE_FREQ_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context_length": "original_max_position_embeddings",
}


def read_config(raw, where="config.json"):
    """config.json as a dict -> (model class, Config).

    Errors   ValueError names the entry and its value: an unknown model_type, something that this
             skeleton does not compute, a missing or wrong size, a RoPE base that cannot be known
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must hold one JSON object, not {type(raw).__name__}")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ValueError(f"{where} says model_type={model_type!r}; known are {known}")
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"{where} has a quantization_config: quantised weights are read from GGUF files only"
        )
    model_class = MODEL_TYPES[model_type]
    for key, only in (GPT2_FIXED if model_type == "gpt2" else LLAMA_FIXED).items():
        if raw.get(key) is not None and raw[key] != only:
            raise ValueError(f"{where} says {key}={raw[key]!r}; only {only!r} is implemented")
    values = {
        ours: raw[theirs]
        for ours, theirs in model_class.config_names.items()
        if raw.get(theirs) is not None
    }
    required = set(model_class.config_names) - {"hidden_dim", "n_kv_groups", "head_dim"} | (
        {"hidden_dim"} if model_type == "llama" else set()
    )
    if missing := sorted(model_class.config_names[key] for key in required - set(values)):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if model_type == "gpt2":
        rates = {
            _number(where, key, raw.get(key, 0.1))
            for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")
        }
        if len(rates) > 1:
            raise ValueError(
                f"{where} has different dropout rates {sorted(rates)}; "
                "one rate for all is implemented"
            )
        values |= {"drop_rate": rates.pop(), "qkv_bias": True, "bias": True}
    else:
        values |= read_rope(raw, where)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    try:
        return model_class, Config(
            **values,
            dtype=dtype_named(dtype),
            tie_embeddings=raw.get("tie_word_embeddings", model_type == "gpt2"),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def dtype_named(name):
    """'bfloat16', 'float16' or 'float32' -> the torch.dtype."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if isinstance(name, torch.dtype):
        return name
    if not isinstance(name, str) or name not in dtypes:
        raise ValueError(f"dtype={name!r}: known are {', '.join(dtypes)}")
    return dtypes[name]


def read_rope(raw, where):
    """RoPE's base and rescaling.

    They come from the old keys (rope_theta, rope_scaling) or transformers 5's rope_parameters.
    """
    settings = raw.get("rope_parameters")
    if settings is None:
        settings = raw.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: rope_parameters={settings!r} must be an object")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"{where} asks for RoPE of type {kind!r}; known are default and llama3")
    known = {"rope_type", "type", "rope_theta"}
    known |= set(ROPE_FREQ_NAMES.values()) if kind == "llama3" else set()
    if unknown := [key for key in settings if key not in known and settings[key] is not None]:
        raise ValueError(f"{where}: RoPE of type {kind!r} has no {unknown[0]!r} here")
    base = settings.get("rope_theta", raw.get("rope_theta"))
    if base is None:
        length = raw.get("max_position_embeddings")
        if kind != "default" or not isinstance(length, Real) or length > 4096:
            raise ValueError(
                f"{where} gives no RoPE base (rope_theta). Only Llama 1 and 2, with at most "
                "4,096 positions and no rescaling, leave out their 10,000; here "
                f"max_position_embeddings={length} and rope_type={kind!r}. "
                "Add rope_theta to the file"
            )
        base = 10_000.0
    rope_freq = None
    if kind == "llama3":
        rope_freq = {ours: settings.get(theirs) for ours, theirs in ROPE_FREQ_NAMES.items()}
    return {"rope_base": base, "rope_freq": rope_freq}


def write_config(model):
    """The config.json of a model, as transformers reads it."""
    cfg, dtype = model.cfg, str(model.tok_emb.weight.dtype).removeprefix("torch.")
    raw = {"model_type": model.model_type, "dtype": dtype, "tie_word_embeddings": model.tied}
    raw |= {
        theirs: cfg[ours] for ours, theirs in model.config_names.items() if cfg[ours] is not None
    }
    if model.model_type == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            **raw,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), cfg.drop_rate),
        }
    rope = {"rope_type": "default", "rope_theta": cfg.rope_base}
    if cfg.rope_freq:
        rope |= {
            "rope_type": "llama3",
            **{theirs: cfg.rope_freq[ours] for ours, theirs in ROPE_FREQ_NAMES.items()},
        }
    raw.setdefault("intermediate_size", 4 * cfg.emb_dim)
    return {
        "architectures": ["LlamaForCausalLM"],
        **raw,
        "hidden_act": "silu",
        "rope_parameters": rope,
    }


def read_params(raw, reader, where="params.json"):
    """Meta's params.json and a reader of its weights -> (model class, Config).

    The file knows neither the context length nor the rescaling factor of Llama 3.1 and 3.2: these
    are those of the published model with the same sizes, and another model that asks for rescaling
    is refused. Without rescaling the length is that of the published models with the same RoPE
    base (and epsilon), else 2048, the shortest of any Llama.
    """
    try:
        numbers = ("dim", "n_heads", "n_layers", "norm_eps")
        emb_dim, n_heads, n_layers, eps = (_number(where, key, raw[key]) for key in numbers)
        vocab_size = _number(where, "vocab_size", raw.get("vocab_size", -1))
        base = _number(where, "rope_theta", raw.get("rope_theta", 10_000.0))
        longer = raw.get("use_scaled_rope", False)
        rows = {
            name: reader.count(name) // emb_dim
            for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight")
        }
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{where} or its weights lack what a Llama needs: {error!r}") from error
    published = {
        (c.emb_dim, c.n_heads, c.n_layers): c
        for c in (LLAMA31_CONFIG_8B, LLAMA31_CONFIG_70B, LLAMA32_CONFIG_1B, LLAMA32_CONFIG_3B)
    }
    known = published.get((emb_dim, n_heads, n_layers))
    if longer and known is None:
        raise ValueError(
            f"{where} asks for rescaled RoPE (use_scaled_rope) but does not give the factor, and "
            f"no published Llama has dim={emb_dim}, n_heads={n_heads}, n_layers={n_layers}"
        )
    lengths = {10_000: 4096 if eps > 2e-6 else 2048, 500_000: 8192, 1_000_000: 16_384}
    context_length = known.context_length if longer else lengths.get(base, 2048)
    try:
        return Llama3Model, Config(
            vocab_size=vocab_size if vocab_size != -1 else rows["tok_embeddings.weight"],
            context_length=context_length,
            emb_dim=emb_dim,
            n_heads=n_heads,
            n_layers=n_layers,
            n_kv_groups=raw.get("n_kv_heads"),
            hidden_dim=rows["layers.0.feed_forward.w1.weight"],
            norm_eps=eps,
            rope_base=float(base),
            rope_freq=known.rope_freq if longer else None,
            tie_embeddings=known.tie_embeddings or None if longer else None,
            dtype=torch.bfloat16,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _number(where, key, value):
    if value is None:
        raise ValueError(f"{where} lacks {key}")
    if not isinstance(value, Real) or not abs(value) < 1e300:
        raise ValueError(f"{where} says {key}={value!r}, which is no number")
    return value


def read_gguf(reader):
    """A GGUF file of architecture llama -> (model class, Config)."""
    where, architecture = reader.path, reader.field("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{where} is of architecture {architecture!r}; only 'llama' is known")
    names = {
        "context_length": "context_length",
        "emb_dim": "embedding_length",
        "n_heads": "attention.head_count",
        "n_layers": "block_count",
        "hidden_dim": "feed_forward_length",
        "n_kv_groups": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_base": "rope.freq_base",
    }
    values = {ours: reader.field(f"llama.{theirs}") for ours, theirs in names.items()}
    if missing := [
        names[k]
        for k, v in values.items()
        if v is None and k not in ("n_kv_groups", "head_dim", "rope_base")
    ]:
        raise ValueError(f"{where} lacks llama.{', llama.'.join(missing)}")
    for ours, theirs in names.items():
        if values[ours] is not None:
            _number(where, f"llama.{theirs}", values[ours])
    if values["rope_base"] is None and values["context_length"] > 4096:
        raise ValueError(
            f"{where} gives no llama.rope.freq_base; only Llama 1 and 2, with at most 4,096 "
            f"positions, leave out their 10,000, and this file has {values['context_length']}"
        )
    scaling = reader.field("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(
            f"{where} asks for RoPE scaling of type {scaling!r}, which is not implemented"
        )
    values["rope_base"] = float(values["rope_base"] or 10_000.0)
    values["norm_eps"] = float(
        f"{values['norm_eps']:.6g}"
    )  # stored as float32: 9.99999974e-06 is 1e-05
    vocab_size = (
        reader.shape("token_embd.weight", None)[0] if "token_embd.weight" in reader.names() else 0
    )
    try:
        cfg = Config(**values, vocab_size=vocab_size, dtype=torch.float32)
        if "rope_freqs.weight" in reader.names():
            cfg = replace(cfg, rope_freq=_rope_freq_of(reader, cfg))
        return Llama3Model, cfg
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _rope_freq_of(reader, values):
    """Find the four numbers of Llama 3.1's rescaling in a GGUF file.

    GGUF keeps it as a divisor per pair; the numbers are proved to give these divisors.
    """
    head_dim = values["head_dim"] or values["emb_dim"] // values["n_heads"]
    if reader.shape("rope_freqs.weight", None) != (head_dim // 2,):
        raise ValueError(f"rope_freqs.weight must have {head_dim // 2} numbers, one for each pair")
    divisors = reader.read("rope_freqs.weight", None).float()
    guess = {
        "factor": round(divisors.max().item(), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context_length": 8192,
    }
    inverse_freq = 1 / values["rope_base"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if not torch.allclose(inverse_freq / divisors, rescale(inverse_freq, guess), rtol=1e-4):
        raise ValueError(
            f"its rope_freqs.weight is not Llama 3.1's rescaling with factor {guess['factor']}"
        )
    return guess
