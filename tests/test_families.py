"""Configs, parameter counts, the parts table, and what makes one tensor of two."""

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from helpers import gpt2, llama1, llama2, llama3, smollm2
from helpers.attention import GroupedQueryAttention
from helpers.families import FAMILIES, describe, diff_families, parts_table
from helpers.norms import RMSNorm
from helpers.skeleton import count_parameters

COUNTS = [  # unique, with a head of its own
    (gpt2.GPTModel, gpt2.GPT2_CONFIG_124M, 124_439_808, 163_037_184),
    (gpt2.GPTModel, gpt2.GPT2_CONFIG_355M, 354_823_168, 406_286_336),
    (gpt2.GPTModel, gpt2.GPT2_CONFIG_774M, 774_030_080, 838_359_040),
    (gpt2.GPTModel, gpt2.GPT2_CONFIG_1558M, 1_557_611_200, 1_638_022_400),
    (llama1.Llama1Model, llama1.LLAMA1_CONFIG_7B, 6_738_415_616, 6_738_415_616),
    (llama1.Llama1Model, llama1.LLAMA1_CONFIG_13B, 13_015_864_320, 13_015_864_320),
    (llama2.Llama2Model, llama2.LLAMA2_CONFIG_7B, 6_738_415_616, 6_738_415_616),
    (llama2.Llama2Model, llama2.LLAMA2_CONFIG_13B, 13_015_864_320, 13_015_864_320),
    (llama2.Llama2Model, llama2.LLAMA2_CONFIG_70B, 68_976_648_192, 68_976_648_192),
    (llama3.Llama3Model, llama3.LLAMA3_CONFIG_8B, 8_030_261_248, 8_030_261_248),
    (llama3.Llama3Model, llama3.LLAMA3_CONFIG_70B, 70_553_706_496, 70_553_706_496),
    (llama3.Llama3Model, llama3.LLAMA31_CONFIG_8B, 8_030_261_248, 8_030_261_248),
    (llama3.Llama3Model, llama3.LLAMA31_CONFIG_70B, 70_553_706_496, 70_553_706_496),
    (llama3.Llama3Model, llama3.LLAMA32_CONFIG_1B, 1_235_814_400, 1_498_482_688),
    (llama3.Llama3Model, llama3.LLAMA32_CONFIG_3B, 3_212_749_824, 3_606_752_256),
    (smollm2.SmolLM2Model, smollm2.SMOLLM2_CONFIG_135M, 134_515_008, 162_826_560),
    (smollm2.SmolLM2Model, smollm2.SMOLLM2_CONFIG_360M, 361_821_120, 409_007_040),
    (smollm2.SmolLM2Model, smollm2.SMOLLM2_CONFIG_1_7B, 1_711_376_384, 1_812_039_680),
]
SMALL = {"vocab_size": 50, "context_length": 32, "emb_dim": 16, "n_heads": 4, "n_layers": 2}


@pytest.mark.parametrize(("model_class", "cfg", "unique", "twice"), COUNTS)
def test_parameter_counts_of_the_presets(model_class, cfg, unique, twice):
    with torch.device("meta"):
        model = model_class(replace(cfg, context_length=cfg.context_length if cfg.bias else 8))
    assert count_parameters(model) == (unique, twice)
    assert all(p.dtype == cfg.dtype and p.is_meta for p in model.parameters())


def test_the_steps_of_the_line_are_those_of_the_design():
    def changed(old, new):
        return {part for part, _, _ in diff_families(old, new)}

    assert changed("GPT-2", "Llama 1") == {"norm", "positions", "feed-forward", "biases", "dropout", "head", "tokenizer",
                                           "context", "norm epsilon"}  # fmt: skip
    assert changed("Llama 1", "Llama 2") == {"context", "norm epsilon"}
    assert changed("Llama 2", "Llama 3") == {"attention", "positions", "tokenizer", "context"}
    assert changed("Llama 3", "Llama 3.1") == {"positions", "context"}
    assert changed("Llama 3.1", "Llama 3.2") == {"positions", "head"}
    assert changed("Llama 3.2", "SmolLM2") == {"positions", "attention", "tokenizer", "context"}


def test_one_attention_class_is_printed_by_what_it_does():
    def attention(cfg):
        return describe(llama2.Llama2Model, cfg, "")["attention"]

    assert attention(llama2.LLAMA2_CONFIG_7B) == "multi-head"
    assert attention(llama2.LLAMA2_CONFIG_70B) == "grouped-query, 8 to 1"
    assert (
        attention({**SMALL, "n_kv_groups": 1} and replace(llama2.LLAMA2_CONFIG_7B, n_kv_groups=1))
        == "multi-query"
    )


def test_the_fast_model_differs_in_one_part():
    slow, fast = llama3.Llama3Model.parts, llama3.Llama3ModelFast.parts
    assert [f for f in slow.__dataclass_fields__ if getattr(slow, f) != getattr(fast, f)] == [
        "attend"
    ]


def test_families_from_the_terminal():
    def run(*arguments):
        command = [sys.executable, "-m", "helpers.families", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    table = run()
    assert table.returncode == 0 and table.stderr == ""
    for row in parts_table():
        assert all(cell in table.stdout for cell in row)
    diff = run("GPT-2", "Llama 2")
    assert "RMSNorm" in diff.stdout and "multi-head" not in diff.stdout
    wrong = run("GPT-2", "Llama 9")
    assert wrong.returncode == 1 and "Llama 3.2" in wrong.stderr and "Traceback" not in wrong.stderr


def test_intermediate_models_are_another_choice_of_parts():
    class GPTWithRMSNorm(gpt2.GPTModel):
        parts = replace(gpt2.GPTModel.parts, norm=RMSNorm)

    model = GPTWithRMSNorm({**SMALL, "drop_rate": 0.0})
    assert isinstance(model.final_norm, RMSNorm) and model(
        torch.zeros(1, 32, dtype=torch.long)
    ).shape == (1, 32, 50)

    class Alternating(llama3.Llama3Model):
        """Layers may take turns: the door for sliding windows."""

        def parts_for(self, layer):
            return self.parts if layer % 2 else llama3.Llama3ModelFast.parts

    model = Alternating({**SMALL, "n_kv_groups": 2})
    assert [b.att.attend.__name__ for b in model.trf_blocks] == ["attend_sdpa", "attend_plain"]


# --- Config ----------


def test_a_config_reads_like_a_dict():
    cfg = llama3.LLAMA32_CONFIG_1B
    assert cfg["emb_dim"] == cfg.emb_dim == 2048 and "emb_dim" in cfg and "width" not in cfg
    assert cfg.get("width", 7) == 7 and len(cfg) == len({**cfg})
    assert type({**cfg, "emb_dim": 64}) is type(cfg.copy()) is type(cfg | {"n_layers": 1}) is dict
    assert (cfg | {"n_layers": 1})["n_layers"] == 1 and ({"n_layers": 1} | cfg)["n_layers"] == 16
    assert (
        cfg == cfg.copy() and pickle.loads(pickle.dumps(cfg)) == cfg and copy.deepcopy(cfg) == cfg
    )
    with pytest.raises(KeyError):
        cfg["width"]
    assert "emb_dim=2048" in repr(cfg) and "qkv_bias" not in repr(cfg)


def test_a_config_does_not_change():
    cfg = llama3.LLAMA32_CONFIG_1B
    with pytest.raises(TypeError, match=r'\{\*\*cfg, "emb_dim": 64\}'):
        cfg["emb_dim"] = 64
    with pytest.raises(TypeError, match="emb_dim"):
        del cfg["emb_dim"]
    with pytest.raises(FrozenInstanceError):
        cfg.emb_dim = 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 7}, r"n_heads=7 does not divide emb_dim=16: every head needs the same width"),
        ({"n_kv_groups": 3}, r"n_kv_groups=3 does not divide n_heads=4"),
        ({"emb_dim": 12}, r"head of size 3 cannot be rotated"),
        ({"n_layers": 0}, r"n_layers=0 must be a whole number of at least 1"),
        ({"emb_dim": "16"}, r"emb_dim='16' must be a whole number"),
        ({"vocab_size": True}, r"vocab_size=True"),
        ({"norm_eps": 0}, r"norm_eps=0 must be a number > 0"),
        ({"norm_eps": float("nan")}, r"norm_eps=nan"),
        ({"drop_rate": 1.0}, r"drop_rate=1.0 must be a number >= 0 and < 1"),
        ({"rope_base": -1.0}, r"rope_base=-1.0 must be a number > 0"),
        ({"rope_freq": {"factor": 8.0}}, r"rope_freq=.*must be a dict with exactly factor"),
        ({"rope_freq": {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
                        "original_context_length": 64}}, r"low_freq_factor=4.0 must be below"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16' must be a torch.dtype"),
        ({"tie_embeddings": "yes"}, r"tie_embeddings='yes'"),
        ({"qkv_bias": 1}, r"qkv_bias=1 must be True or False"),
        ({"embed_dim": 16}, r"unknown config key 'embed_dim': did you mean 'emb_dim'"),
        ({"drop_rate": 0.1}, r"drop_rate=0.1: grouped-query attention has neither biases nor dropout"),
        ({"bias": True}, r"bias=True"),
        ({"rope_base": None}, r"rope_base=None: a model with RoPE needs its base"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        llama3.Llama3Model({**SMALL, "n_kv_groups": 2, **changes})


def test_a_config_that_lacks_a_size_is_refused_by_name():
    with pytest.raises(ValueError, match="lacks n_layers"):
        llama3.Llama3Model({k: v for k, v in SMALL.items() if k != "n_layers"})
    with pytest.raises(TypeError, match="not list"):
        llama3.Llama3Model([1, 2])


def test_keys_left_out_take_the_familys_value():
    assert llama2.Llama2Model(SMALL).cfg.rope_base == 10_000
    assert llama3.Llama3Model({**SMALL, "n_heads": 8}).cfg.rope_base == 500_000
    assert llama3.Llama3Model({**SMALL, "n_heads": 8}).cfg.n_kv_groups == 8
    assert llama1.Llama1Model(SMALL).cfg.norm_eps == 1e-6
    gpt = gpt2.GPTModel(SMALL)
    assert gpt.trf_blocks[0].ff.layers[0].out_features == 4 * 16
    assert gpt.cfg.qkv_bias and gpt.trf_blocks[0].att.out_proj.bias is not None


# --- one tensor, one table ----------


def tied(model):
    return model.out_head.weight is model.tok_emb.weight and model.tied


def test_the_head_stays_tied():
    cfg = {**SMALL, "n_kv_groups": 2, "tie_embeddings": True}
    model = llama3.Llama3Model(cfg)
    assert (
        tied(model)
        and tied(copy.deepcopy(model))
        and tied(model.to(torch.bfloat16))
        and tied(model.double())
    )
    assert tied(pickle.loads(pickle.dumps(model)))
    state = llama3.Llama3Model(cfg).state_dict()
    model.load_state_dict(state, assign=True)
    assert tied(model) and len(list(model.parameters())) == len(
        list(llama3.Llama3Model(cfg).parameters())
    )
    del state["out_head.weight"]
    model.load_state_dict(state)
    with torch.device("meta"):
        empty = llama3.Llama3Model(cfg)
    assert tied(empty) and tied(empty.to_empty(device="cpu"))
    model.tok_emb.weight.data[3] = 7
    assert (model.out_head.weight[3] == 7).all()


def test_two_different_matrices_do_not_go_into_a_tied_head():
    cfg = {**SMALL, "n_kv_groups": 2}
    untied = llama3.Llama3Model(cfg)
    assert not untied.tied
    model = llama3.Llama3Model({**cfg, "tie_embeddings": True})
    before = model.final_norm.weight.clone()
    untied.final_norm.weight.data += 1
    with pytest.raises(ValueError, match='"tie_embeddings": False'):
        model.load_state_dict(untied.state_dict())
    assert torch.equal(model.final_norm.weight, before)  # nothing was written


def test_rope_tables_stay_float32_and_real():
    cfg = {**SMALL, "n_kv_groups": 2, "rope_freq": dict(llama3.LLAMA32_CONFIG_1B.rope_freq)}
    wanted = llama3.Llama3Model(cfg).pos_emb.cos.clone()
    with torch.device("meta"):
        model = llama3.Llama3Model({**cfg, "dtype": torch.bfloat16})
    for moved in (
        model,
        model.to(torch.float16),
        model.to_empty(device="cpu"),
        model.half(),
        copy.deepcopy(model),
    ):
        assert moved.pos_emb.cos.dtype == torch.float32 and torch.equal(moved.pos_emb.cos, wanted)
    longer = llama3.Llama3Model({**cfg, "context_length": 100})
    assert torch.equal(
        longer.pos_emb.cos[:32], wanted
    )  # the reader's context_length decides the length alone


def test_the_context_is_a_limit():
    model = llama3.Llama3Model({**SMALL, "n_kv_groups": 2})
    with pytest.raises(ValueError, match="0 cached and 33 new tokens exceed context_length=32"):
        model(torch.zeros(1, 33, dtype=torch.long))


def test_gpt2_drops_out_only_while_training():
    torch.manual_seed(0)
    model, ids = gpt2.GPTModel(SMALL), torch.arange(32)[None]
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    assert isinstance(llama1.Llama1Model(SMALL).trf_blocks[0].att, GroupedQueryAttention)
    assert set(FAMILIES) == set(parts_table()[0][1:])


def test_a_head_alone_goes_into_a_tied_model_and_containers_keep_the_tie():
    cfg = {**SMALL, "n_kv_groups": 2, "tie_embeddings": True}
    for assign in (False, True):
        model = llama3.Llama3Model(cfg)
        head = torch.full_like(model.out_head.weight, 7.0)
        model.load_state_dict({"out_head.weight": head}, strict=False, assign=assign)
        assert tied(model) and (model.tok_emb.weight == 7).all()
    wrapper = torch.nn.Sequential(llama3.Llama3Model(cfg))
    wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()), assign=True)
    assert tied(wrapper[0])


def test_a_preset_cannot_be_changed_through_its_copies():
    preset = llama3.LLAMA31_CONFIG_8B
    for changed in (preset.copy(), {**preset}, preset | {}):
        changed["rope_freq"]["factor"] = 2.0
    assert preset.rope_freq["factor"] == llama3.LLAMA31_CONFIG_70B["rope_freq"]["factor"] == 8.0
    with pytest.raises(TypeError, match="does not change"):
        preset.rope_freq["factor"] = 2.0
    with pytest.raises(ValueError, match="tie_embeddings=0"):
        gpt2.GPTModel({**SMALL, "tie_embeddings": 0})
    assert pickle.loads(pickle.dumps(preset)).rope_freq == copy.deepcopy(preset).rope_freq


def test_a_block_of_the_books_llama_rotates_by_itself():
    for module in (llama2, llama3):
        block = module.TransformerBlock(
            {**SMALL, "hidden_dim": 24, "n_kv_groups": 2, "dtype": torch.float32}
        )
        x = torch.randn(1, 9, 16)
        shuffled = torch.cat([x[:, :8].flip(1), x[:, 8:]], dim=1)
        assert not torch.allclose(block(x)[:, -1], block(shuffled)[:, -1], atol=1e-4)
        base = 500_000.0 if module is llama3 else 10_000.0
        cos, sin = llama3.compute_rope_params(4, base, 32)
        assert torch.equal(block(x), block(x, None, cos, sin))
        assert not any("pos_emb" in key for key in block.state_dict())
