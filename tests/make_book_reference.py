"""Make tests/data/book.safetensors: what the book's own classes compute, to compare ours with.

Run once, in an environment of its own:

    pip install torch safetensors tiktoken && pip install --no-deps llms-from-scratch==1.0.19
    python tests/make_book_reference.py

The file holds the state dicts of a tiny GPTModel and a tiny Llama3Model (weights of std 0.2), the ids
they were given, their float32 logits, and 12 greedy tokens.
"""

import json
from pathlib import Path

import torch
from llms_from_scratch.ch04 import GPTModel, generate_text_simple
from llms_from_scratch.llama3 import Llama3Model
from safetensors.torch import save_file

GPT = dict(vocab_size=97, context_length=96, emb_dim=32, n_heads=4, n_layers=2, drop_rate=0.1)
ROPE = dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64)
LLAMA = dict(
    vocab_size=97,
    context_length=160,
    emb_dim=64,
    n_heads=4,
    n_layers=2,
    hidden_dim=80,
    n_kv_groups=2,
)


def redraw(model):
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2) if p.dim() > 1 else p.add_(torch.rand_like(p) * 0.6 - 0.3)
    return model.eval()


def main():
    torch.manual_seed(123)
    models = {
        "gpt": GPTModel({**GPT, "qkv_bias": True}),
        "llama": Llama3Model(
            {**LLAMA, "rope_base": 500_000.0, "rope_freq": ROPE, "dtype": torch.float32}
        ),
    }
    tensors = {}
    for name, model in models.items():
        redraw(model)
        tensors[f"{name}/ids"] = torch.randint(0, 97, (2, 80))
        with torch.no_grad():
            tensors[f"{name}/logits"] = model(tensors[f"{name}/ids"])
        tensors[f"{name}/greedy"] = generate_text_simple(
            model, tensors[f"{name}/ids"][:, :8], 12, 80
        )
        tensors |= {f"{name}/weights/{k}": v.clone() for k, v in model.state_dict().items()}
    configs = {
        "gpt": json.dumps({**GPT, "qkv_bias": True}),
        "llama": json.dumps({**LLAMA, "rope_freq": ROPE}),
    }
    save_file(tensors, Path(__file__).parent / "data" / "book.safetensors", metadata=configs)


if __name__ == "__main__":
    main()
