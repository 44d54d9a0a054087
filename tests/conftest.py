"""What all tests share: a machine without hub and GPU, tiny reference models, the real SmolLM2."""

import json
import os
from pathlib import Path

os.environ |= {
    "COURSE_MODEL": "smollm2-135m-instruct-q4",
    "COURSE_DEVICE": "cpu",
    "COURSE_DTYPE": "float32",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DATA = Path(__file__).parent / "data"
LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from helpers.checkpoints import load_model  # noqa: E402
from helpers.model_config import read_config  # noqa: E402
from helpers.packages import package_file  # noqa: E402
from helpers.weights import DictReader, load_weights  # noqa: E402

TINY = json.loads((DATA / "tiny_configs.json").read_text())
TINY["llama3_2"]["seq_len"] = TINY["llama3_1_8b"]["seq_len"] = 96
LINE = (
    "gpt2",
    "llama1",
    "llama2_7b",
    "llama2_70b",
    "llama3_8b",
    "llama3_1_8b",
    "llama3_2",
    "smollm2",
)  # of descent


def redraw(model, seed=0, std=0.2):
    """Weights at which a missing part shows: std 0.2, norms away from 1, biases away from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, std, generator=generator)
            else:
                p.add_(torch.rand(p.shape, generator=generator) * 0.6 - 0.3)
    return model.eval()


def reference(name, **changes):
    """A tiny random model of transformers for one entry of tiny_configs.json."""
    entry = TINY[name]
    config = getattr(transformers, entry["class"])(
        **{**json.loads(json.dumps(entry["config"])), **changes}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return redraw(getattr(transformers, entry["model_class"])(config))


def ours(theirs, model_class=None, **changes):
    """Our model with the configuration and the weights of a transformers model."""
    found, cfg = read_config(theirs.config.to_dict())
    model = (model_class or found)({**cfg, "dtype": torch.float32, **changes})
    return load_weights(model, DictReader(theirs.state_dict()), model.layouts["huggingface"]).eval()


def token_ids(name, batch=2, seed=1):
    """64 tokens or more: two rows of ids for a tiny model."""
    length = max(64, TINY[name]["seq_len"])
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        3, TINY[name]["config"]["vocab_size"], (batch, length), generator=generator
    )


def logits_of(theirs, ids):
    with torch.no_grad():
        return theirs(ids, use_cache=False).logits


@pytest.fixture(scope="session")
def golden():
    return json.loads((DATA / "golden.json").read_text())


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M-Instruct from the package: (model, tokenizer, chat_format, ...)."""
    return load_model("smollm2-135m-instruct-q4")


@pytest.fixture(scope="session")
def llama3_tokenizer_file(tmp_path_factory):
    """Meta's own Llama 3 tokenizer.model, out of Meta's PyPI package."""
    target = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    with package_file(
        "llama-models",
        "0.3.0",
        "llama_models/llama3/tokenizer.model",
        LLAMA3_SHA256,
        download_bytes=6_600_000,
    ) as path:
        target.write_bytes(path.read_bytes())
    return target
