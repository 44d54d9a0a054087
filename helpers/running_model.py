"""The small model that keeps running through Part I: one config, one short text, one training loop.

After a swap a lesson asks three questions, and this file answers them: which tensors are the same
to the last bit, how many parameters came or went, how the loss falls in the same 100 steps.
"""

import copy
from pathlib import Path

import torch
from torch.nn import functional as F

from helpers.config import Config

TEXT = (Path(__file__).parent / "data" / "hamlet.txt").read_text(encoding="ascii")
CHARACTERS = sorted(set(TEXT))
RUNNING_CONFIG = Config(
    vocab_size=len(CHARACTERS),
    context_length=128,
    emb_dim=128,
    n_heads=4,
    n_layers=4,
    qkv_bias=True,
    bias=True,
    tie_embeddings=True,
)


def encode(text):
    """Characters -> list of ids; the vocabulary is the characters of the text, in order."""
    return [CHARACTERS.index(character) for character in text]


def decode(ids):
    """Ids -> characters."""
    return "".join(CHARACTERS[i] for i in ids)


def build(model_class, cfg=RUNNING_CONFIG, seed=123):
    """A model with random weights that depend on the seed alone; small enough to train on a CPU.

    Matrices are drawn with standard deviation 0.05, so that an untrained model is unsure of all
    characters; the caller's random numbers are left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(cfg)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.05)
    return model.eval()


def swap(old, new_class, cfg=None):
    """The old model with another choice of parts: new parts are drawn, all other tensors are kept.

    Returns the new model and prints what stayed the same to the last bit, and the parameters.
    """
    new = build(new_class, cfg or old.cfg)
    before, after = dict(old.named_parameters()), dict(new.named_parameters())
    kept = [name for name in after if name in before and after[name].shape == before[name].shape]
    with torch.no_grad():
        for name in kept:
            after[name].copy_(before[name])
    added, gone = (_kinds(set(a) - set(kept)) for a in (after, before))
    print(f"kept to the last bit: {len(kept)} of {len(after)} tensors")
    print(f"new: {added or 'none'}")
    print(f"gone: {gone or 'none'}")
    counts = [sum(p.numel() for p in model.parameters()) for model in (old, new)]
    print(f"parameters: {counts[0]:,} to {counts[1]:,} ({counts[1] - counts[0]:+,})")
    return new


def _kinds(names):
    """Tensor names without their block's number, each once, in order."""
    plain = {".".join(part for part in name.split(".") if not part.isdigit()) for name in names}
    return ", ".join(sorted(plain))


def train(model, steps=100, batch=8, length=64, learning_rate=2e-3, seed=0, ids=None):
    """Train a copy of the model on the text and return it with the loss of every step.

    The same seed gives the same batches to every model, so that two losses can be compared.

    ids      the text by another tokenizer; left out, its characters
    Returns  (model, losses): losses in nats per token; log(vocabulary) is pure guessing
    """
    model = copy.deepcopy(model).train()
    ids = torch.tensor(encode(TEXT) if ids is None else ids)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(ids) - length, (batch,), generator=generator)
        rows = ids[starts[:, None] + torch.arange(length + 1)]  # (batch, length + 1)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses
