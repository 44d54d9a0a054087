"""Twins of a table of weight names and of a tied head."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from helpers.checks import check_tied, check_weight_table
from helpers.llama3 import Llama3Model
from helpers.weights import Layout, Stored, layouts_of_llama
from twins.registry import accepted, proves, refused

ALL = "table of weight names: right, for files of Hugging Face, Meta, GGUF"
ONE = "table of weight names: right, for files of {}".format
proves(check_weight_table, layouts_of_llama, ALL)

B, HF, META = "trf_blocks.{n}.", "model.layers.{n}.", "layers.{n}."
Q, K, V, O = (f"{B}att.{name}.weight" for name in ("W_query", "W_key", "W_value", "out_proj"))
GATE, UP, DOWN = (f"{B}ff.fc{i}.weight" for i in (1, 2, 3))


def hugging_face(**changes):
    """A right table of Hugging Face's names, and changes by our short names."""
    table = {
        "tok_emb": "model.embed_tokens",
        "norm1": f"{HF}input_layernorm",
        "W_query": f"{HF}self_attn.q_proj",
        "W_key": f"{HF}self_attn.k_proj",
        "W_value": f"{HF}self_attn.v_proj",
        "out_proj": f"{HF}self_attn.o_proj",
        "norm2": f"{HF}post_attention_layernorm",
        "fc1": f"{HF}mlp.gate_proj",
        "fc2": f"{HF}mlp.up_proj",
        "fc3": f"{HF}mlp.down_proj",
        "final_norm": "model.norm",
        "out_head": "lm_head",
    } | changes
    places = {"W": "att.", "o": "att.", "f": "ff.", "n": ""}
    return {
        (name if name in ("tok_emb", "final_norm", "out_head") else B + places[name[0]] + name)
        + ".weight": there + ".weight" if isinstance(there, str) else there
        for name, there in table.items()
    }


def meta(**changes):
    """A right table of Meta's names, with the rows of queries and keys reordered."""
    table = {
        "tok_emb.weight": "tok_embeddings.weight",
        f"{B}norm1.weight": f"{META}attention_norm.weight",
        Q: Stored(f"{META}attention.wq.weight", pairs=True),
        K: Stored(f"{META}attention.wk.weight", pairs=True),
        V: f"{META}attention.wv.weight",
        O: f"{META}attention.wo.weight",
        f"{B}norm2.weight": f"{META}ffn_norm.weight",
        GATE: f"{META}feed_forward.w1.weight",
        UP: f"{META}feed_forward.w3.weight",
        DOWN: f"{META}feed_forward.w2.weight",
        "final_norm.weight": "norm.weight",
        "out_head.weight": "output.weight",
    }
    return {ours: changes.get(ours, there) for ours, there in table.items()}


def without(table, *names):
    return {ours: there for ours, there in table.items() if ours not in names}


def wrong(name, hint, table):
    """Register a wrong table, as a function that returns it."""

    def answer():
        return table

    answer.__name__ = name
    refused(check_weight_table, hint)(answer)


# --- right tables ----------


@accepted(check_weight_table)
def three_formats():
    block = {
        "norm1": "attn_norm",
        "att.W_query": "attn_q",
        "att.W_key": "attn_k",
        "att.W_value": "attn_v",
        "att.out_proj": "attn_output",
        "norm2": "ffn_norm",
        "ff.fc1": "ffn_gate",
        "ff.fc2": "ffn_up",
        "ff.fc3": "ffn_down",
    }
    gguf = {
        "tok_emb.weight": Stored("token_embd.weight"),
        "final_norm.weight": Stored("output_norm.weight"),
        "out_head.weight": Stored("output.weight"),
    }
    for ours, there in block.items():
        rotated = there in ("attn_q", "attn_k")
        gguf[f"{B}{ours}.weight"] = Stored(f"blk.{{n}}.{there}.weight", pairs=rotated)
    return {"gguf": Layout(gguf), "meta": meta(), "huggingface": hugging_face()}


def _stored(table):
    return {k: v if isinstance(v, Stored) else Stored(v) for k, v in table.items()}


@accepted(check_weight_table, ONE("Hugging Face"))
def plain_dict():
    return hugging_face()


@accepted(check_weight_table, ONE("Meta"))
def dict_of_metas_names():
    return meta()


@accepted(check_weight_table, ONE("Hugging Face"))
def layout_that_ignores_frequencies():
    return Layout(_stored(hugging_face()), ignored=(r"model\.layers\.\d+\.self_attn\.rotary.*",))


@accepted(check_weight_table, ONE("Hugging Face"))
def layout_with_a_prefix():
    names = {ours: there.removeprefix("model.") for ours, there in hugging_face().items()}
    return Layout(_stored(names), prefix="model.")


@accepted(check_weight_table, ONE("Meta, GGUF"))
def two_of_the_helpers():
    return {key: layouts_of_llama[key] for key in ("gguf", "meta")}


# --- wrong tables ----------

up, gate, down = f"{HF}mlp.up_proj", f"{HF}mlp.gate_proj", f"{HF}mlp.down_proj"
wrong("gate_and_up_exchanged", "ff.fc1 and ff.fc2 are exchanged: ff.fc1 is the gate", hugging_face(fc1=up, fc2=gate))  # fmt: skip
wrong("up_and_down_exchanged", "ff.fc2 and ff.fc3 are exchanged", hugging_face(fc2=down, fc3=up))
wrong("w2_is_no_up", "ff.fc2 and ff.fc3 are exchanged: ff.fc2 is the value", meta(**{UP: f"{META}feed_forward.w2.weight", DOWN: f"{META}feed_forward.w3.weight"}))  # fmt: skip
wrong("feed_forward_turned_round", "ff.fc1 is the gate, which passes SiLU, but", hugging_face(fc1=down, fc2=gate, fc3=up))  # fmt: skip
wrong("queries_and_keys_exchanged", "att.W_query and att.W_key are exchanged", hugging_face(W_query=f"{HF}self_attn.k_proj", W_key=f"{HF}self_attn.q_proj"))  # fmt: skip
wrong("keys_and_values_exchanged", "att.W_key and att.W_value are exchanged", hugging_face(W_key=f"{HF}self_attn.v_proj", W_value=f"{HF}self_attn.k_proj"))  # fmt: skip
wrong("norms_exchanged", "norm1 and norm2 are exchanged: norm1 is the norm before attention", hugging_face(norm1=f"{HF}post_attention_layernorm", norm2=f"{HF}input_layernorm"))  # fmt: skip
wrong("embedding_and_head_exchanged", "tok_emb and out_head are exchanged", hugging_face(tok_emb="lm_head", out_head="model.embed_tokens"))  # fmt: skip
wrong("a_norm_missing", "trf_blocks.{n}.norm2.weight has no entry", without(hugging_face(), f"{B}norm2.weight"))  # fmt: skip
wrong("head_forgotten", "out_head.weight has no entry. Files of Llama 3.2 1B and 3B have no head", without(hugging_face(), "out_head.weight"))  # fmt: skip
wrong("head_of_meta_forgotten", "those of all other Llamas have output.weight", without(meta(), "out_head.weight"))  # fmt: skip
wrong("head_is_the_embedding", "model.embed_tokens.weight is used twice, for tok_emb.weight and out_head.weight, and lm_head.weight not at all", hugging_face(out_head="model.embed_tokens"))  # fmt: skip
wrong("gate_used_twice", "mlp.gate_proj.weight is used twice", hugging_face(fc2=gate))
wrong("one_norm_for_both", "input_layernorm.weight is used twice", hugging_face(norm2=f"{HF}input_layernorm"))  # fmt: skip
wrong("out_proj_transposed", "att.out_proj is transposed: files of Hugging Face keep (out, in)", hugging_face(out_proj=Stored(f"{HF}self_attn.o_proj.weight", transposed=True)))  # fmt: skip
wrong("fc1_transposed", "ff.fc1 is transposed", hugging_face(fc1=Stored(f"{gate}.weight", transposed=True)))  # fmt: skip
wrong("queries_in_thirds", "att.W_query is taken as a third of a matrix", hugging_face(W_query=Stored(f"{HF}self_attn.q_proj.weight", third=0)))  # fmt: skip
wrong("block_number_ignored", "is read from model.layers.0.input_layernorm.weight in every block: the block's number is missing", hugging_face(norm1="model.layers.0.input_layernorm"))  # fmt: skip
wrong("another_name_for_the_number", "only {n} may stand in braces", {ours: there.replace("{n}", "{layer}") + ("{n}" if "{n}" in there else "") for ours, there in hugging_face().items()} | {"tok_emb.weight": "model.embed_tokens.weight"})  # fmt: skip
wrong("blocks_listed_one_by_one", "The block's number is written {n}: trf_blocks.{n}.norm1.weight", {ours.format(n=n): there.format(n=n) for ours, there in hugging_face().items() for n in range(12)})  # fmt: skip
wrong("rows_of_meta_not_reordered", "the rows of att.W_query stay in interleaved pairs: files of Meta", meta(**{Q: f"{META}attention.wq.weight", K: f"{META}attention.wk.weight"}))  # fmt: skip
wrong("keys_of_meta_not_reordered", "the rows of att.W_key stay in interleaved pairs", meta(**{K: f"{META}attention.wk.weight"}))  # fmt: skip
wrong("values_of_meta_reordered", "the rows of att.W_value are reordered: only queries and keys", meta(**{V: Stored(f"{META}attention.wv.weight", pairs=True)}))  # fmt: skip
wrong("rows_of_hugging_face_reordered", "files of Hugging Face are half-split already", hugging_face(W_query=Stored(f"{HF}self_attn.q_proj.weight", pairs=True)))  # fmt: skip
wrong("one_name_misspelt", "Did you mean model.layers.{n}.post_attention_layernorm.weight?", hugging_face(norm2=f"{HF}post_attention_norm"))  # fmt: skip
wrong("prefix_forgotten", "has no layers.{n}.input_layernorm.weight", {k: v if k in ("tok_emb.weight", "out_head.weight") else v.removeprefix("model.") for k, v in hugging_face().items()})  # fmt: skip
wrong("ending_forgotten", "Our names end in .weight", {k.removesuffix(".weight"): v for k, v in hugging_face().items()})  # fmt: skip
wrong("turned_round", "Our name comes first, then the file's", {v: k for k, v in hugging_face().items()} | {"tok_emb.weight": "model.embed_tokens.weight"})  # fmt: skip
wrong("names_of_gpt2", "no name in the table is one of a published file", {"tok_emb.weight": "wte.weight", f"{B}norm1.weight": "h.{n}.ln_1.weight"})  # fmt: skip
wrong("a_norm_of_qwen", "'trf_blocks.{n}.att.q_norm.weight' is no tensor of our Llama", hugging_face() | {f"{B}att.q_norm.weight": f"{HF}self_attn.q_norm.weight"})  # fmt: skip
wrong("a_list_of_pairs", "this is of type list", [*hugging_face().items()])
wrong("pairs_as_tuples", "has an entry of type tuple: write the file's name", {k: (v, False) for k, v in hugging_face().items()})  # fmt: skip
wrong("everything_ignored", "`ignored` of the Layout hides model.embed_tokens.weight", Layout(_stored(hugging_face()), ignored=(r".*",)))  # fmt: skip
wrong("formats_exchanged", "a file of Meta has no model.embed_tokens.weight", {"meta": hugging_face(), "huggingface": meta()} | {"huggingface": hugging_face()})  # fmt: skip


# --- a tied head ----------

TIED = "head and embedding: one tensor, also after deepcopy, .to(), to_empty and loading"
proves(check_tied, Llama3Model, TIED)


class Untied(nn.Module):
    """A model of embedding, norm and head; `tie` is what a twin does with the head."""

    def __init__(self, cfg):
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"], dtype=cfg["dtype"])
        self.norm = nn.RMSNorm(cfg["emb_dim"], dtype=cfg["dtype"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False, dtype=cfg["dtype"])
        self.tie()

    def tie(self):
        pass

    def forward(self, in_idx):
        return self.out_head(self.norm(self.tok_emb(in_idx)))


@accepted(check_tied)
class HeadWithoutATensor(Untied):
    def tie(self):
        del self.out_head

    def forward(self, in_idx):
        return F.linear(self.norm(self.tok_emb(in_idx)), self.tok_emb.weight)


@accepted(check_tied)
class OneModuleForBoth(Untied):
    def tie(self):
        self.out_head = self.tok_emb

    def forward(self, in_idx):
        return self.norm(self.tok_emb(in_idx)) @ self.out_head.weight.T


@accepted(check_tied)
class TiedAgainInForward(Untied):
    def forward(self, in_idx):
        self.out_head.weight = self.tok_emb.weight
        return super().forward(in_idx)


@accepted(check_tied)
class TiedByHooks(Untied):
    def tie(self):
        self.tok_emb.weight = self.out_head.weight
        self.register_load_state_dict_post_hook(lambda model, keys: model.share())

    def share(self):
        self.tok_emb.weight = self.out_head.weight

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.share()
        return self


@accepted(check_tied)
def a_function_that_builds(cfg):
    return OneModuleForBoth(dict(cfg))


refused(check_tied, "as it is built, head and embedding are two tensors: what changes")(Untied)


@refused(check_tied, "as it is built, head and embedding are two tensors with the same values")
class CopiedNotShared(Untied):
    def tie(self):
        self.out_head.weight = nn.Parameter(self.tok_emb.weight.detach().clone())


@refused(check_tied, "as it is built, head and embedding are two tensors with the same values")
class ValuesCopiedInto(Untied):
    def tie(self):
        with torch.no_grad():
            self.out_head.weight.copy_(self.tok_emb.weight)


@refused(check_tied, "two tensors with the same values, a copy")
class CopiedInEveryForward(Untied):
    def forward(self, in_idx):
        if not hasattr(self, "seen"):
            self.seen = True
            with torch.no_grad():
                self.out_head.weight.copy_(self.tok_emb.weight)
        return super().forward(in_idx)


@refused(check_tied, "Give the head the embedding's own Parameter")
class DeepcopiedWeight(Untied):
    def tie(self):
        self.out_head.weight = copy.deepcopy(self.tok_emb.weight)


@refused(check_tied, "out_head.weight is a second Parameter on the embedding's memory")
class TwoParametersOnOneMemory(Untied):
    def tie(self):
        self.out_head.weight = nn.Parameter(self.tok_emb.weight)


@refused(check_tied, "is a second Parameter on the embedding's memory: it is counted twice")
class DataShared(Untied):
    def tie(self):
        self.out_head.weight.data = self.tok_emb.weight.data


@refused(
    check_tied, "after load_state_dict(state, assign=True), head and embedding are two tensors"
)
class TiedOnceInTheConstructor(Untied):
    def tie(self):
        self.out_head.weight = self.tok_emb.weight


@refused(check_tied, "as it is built, head and embedding are two tensors")
class TiedBeforeTheHeadWasMade(Untied):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.out_head.weight = self.tok_emb.weight
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)


@refused(check_tied, "after .to(torch.bfloat16), head and embedding are two tensors")
class BrokenByTo(TiedOnceInTheConstructor):
    def _apply(self, fn, recurse=True):
        for module in (self.tok_emb, self.norm, self.out_head):
            module.weight = nn.Parameter(fn(module.weight.detach()))
        return self


@refused(check_tied, "after copy.deepcopy(model), head and embedding are two tensors")
class BrokenByDeepcopy(TiedOnceInTheConstructor):
    def __deepcopy__(self, memo):
        other = copy.copy(self)
        other._modules = {name: copy.deepcopy(part) for name, part in self._modules.items()}
        return other


@refused(check_tied, "after load_state_dict(state), head and embedding are two tensors")
class UntiedByLoading(TiedOnceInTheConstructor):
    def load_state_dict(self, state, strict=True, assign=False):
        self.tok_emb.weight = nn.Parameter(state["tok_emb.weight"])
        self.out_head.weight = nn.Parameter(state["out_head.weight"])
        self.norm.weight = nn.Parameter(state["norm.weight"])


@refused(check_tied, "moved from the meta device by to_empty, head and embedding are two tensors")
class TiedAfterLoadingOnly(TiedOnceInTheConstructor):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.register_load_state_dict_post_hook(lambda model, keys: model.tie())


@refused(check_tied, "no gradient reaches the embedding through the head")
class DetachedHead(HeadWithoutATensor):
    def forward(self, in_idx):
        return F.linear(self.norm(self.tok_emb(in_idx)), self.tok_emb.weight.detach())


@refused(check_tied, "the embedding does not hold the loaded values")
class LoadingForgotten(HeadWithoutATensor):
    def load_state_dict(self, state, strict=True, assign=False):
        return None


@refused(check_tied, "load_state_dict(state, assign=True) stopped with TypeError")
class LoadingWithoutAssign(HeadWithoutATensor):
    def load_state_dict(self, state):
        return super().load_state_dict(state)


@refused(check_tied, "has no tok_emb, an nn.Embedding")
class OtherName(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wte = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])

    def forward(self, in_idx):
        return self.wte(in_idx) @ self.wte.weight.T


@refused(check_tied, "model(ids) gives (1, 3, 16), expected logits of shape (1, 3, 31)")
class NoHead(HeadWithoutATensor):
    def forward(self, in_idx):
        return self.norm(self.tok_emb(in_idx))


@refused(check_tied, "this returns no model but something of type dict")
def returns_a_dict(cfg):
    return dict(cfg)
