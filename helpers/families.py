"""The line of descent: which family has which parts, and what changed from one to the next.

python -m helpers.families              the parts table
python -m helpers.families GPT-2 "Llama 2"    what changed between two families
"""

import sys
from typing import NamedTuple

from helpers.config import Config
from helpers.gpt2 import GPT2_CONFIG_124M, GPTModel
from helpers.llama1 import LLAMA1_CONFIG_7B, Llama1Model
from helpers.llama2 import LLAMA2_CONFIG_7B, Llama2Model
from helpers.llama3 import LLAMA3_CONFIG_8B, LLAMA31_CONFIG_8B, LLAMA32_CONFIG_1B, Llama3Model
from helpers.smollm2 import SMOLLM2_CONFIG_135M, SmolLM2Model


class Family(NamedTuple):
    """A model class with the config of one size, for tables."""

    model_class: type
    cfg: Config
    tokenizer: str


FAMILIES = {
    "GPT-2": Family(GPTModel, GPT2_CONFIG_124M, "byte-level BPE"),
    "Llama 1": Family(Llama1Model, LLAMA1_CONFIG_7B, "SentencePiece"),
    "Llama 2": Family(Llama2Model, LLAMA2_CONFIG_7B, "SentencePiece"),
    "Llama 3": Family(Llama3Model, LLAMA3_CONFIG_8B, "tiktoken BPE"),
    "Llama 3.1": Family(Llama3Model, LLAMA31_CONFIG_8B, "tiktoken BPE"),
    "Llama 3.2": Family(Llama3Model, LLAMA32_CONFIG_1B, "tiktoken BPE"),
    "SmolLM2": Family(SmolLM2Model, SMOLLM2_CONFIG_135M, "byte-level BPE"),
}

MODEL_TYPES = {"gpt2": GPTModel, "llama": Llama3Model}  # config.json's model_type -> class


def describe(model_class, cfg, tokenizer):
    """One model's rows of the parts table: name of the part -> what it is in words, no widths."""
    parts = model_class.parts
    biases = {(True, True): "everywhere", (False, False): "none"}.get(
        (cfg.qkv_bias, cfg.bias), "some"
    )
    return {
        "block": parts.block.label(cfg),
        "norm": parts.norm.label(cfg),
        "positions": parts.positions.label(cfg),
        "attention": parts.attention.label(cfg),
        "feed-forward": parts.feed_forward.label(cfg),
        "biases": biases,
        "dropout": f"{cfg.drop_rate:g}" if cfg.drop_rate else "none",
        "head": "tied to embedding" if cfg.tie_embeddings else "own matrix",
        "tokenizer": f"{tokenizer}, {cfg.vocab_size:,}",
        "context": f"{cfg.context_length:,}",
        "norm epsilon": f"{cfg.norm_eps:g}",
    }


def parts_table():
    """Every family's rows: list of lists of text, the first being the header."""
    described = {name: describe(*family) for name, family in FAMILIES.items()}
    rows = next(iter(described.values()))
    return [["", *described]] + [[row, *(d[row] for d in described.values())] for row in rows]


def diff_families(old, new):
    """What changed between two families, by name: list of (part, old, new).

    `old` and `new` are names in FAMILIES or Family tuples, so a lesson can compare its own model
    too.
    """
    old, new = (describe(*(lookup(f) if isinstance(f, str) else f)) for f in (old, new))
    return [(row, old[row], new[row]) for row in old if old[row] != new[row]]


def print_diff(old, new):
    """Print what changed between two families as a Markdown table; arguments as `diff_families`."""
    names = [f if isinstance(f, str) else f.model_class.__name__ for f in (old, new)]
    print(format_table([["part", *names], *map(list, diff_families(old, new))]))


def lookup(name):
    if name not in FAMILIES:
        raise ValueError(f"no family {name!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def format_table(rows):
    """Rows of text as a Markdown table whose columns line up."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def main(arguments):
    if not arguments:
        print(format_table(parts_table()))
    elif len(arguments) == 2:
        print_diff(*arguments)
    else:
        raise ValueError(
            "give no argument for the parts table, or two families: python -m helpers.families "
            'GPT-2 "Llama 2"'
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
