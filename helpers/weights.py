"""Weights: one table of names per family, read left to right when saving and back when loading.

A `Layout` says where each of our tensors lives in one kind of file and how it is stored there.
Loading checks the whole file against the table first (nothing missing, nothing left over, every
shape right) and only then writes, one tensor at a time.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from helpers.positions import permute, unpermute


class Stored(NamedTuple):
    """Where and how a file keeps one of our tensors; `{n}` in a name is the block's number."""

    name: str
    transposed: bool = False  # (in, out) instead of nn.Linear's (out, in)
    third: int | None = None  # 0, 1, 2: queries, keys or values of a matrix that holds all three
    pairs: bool = False  # rows of a query or key matrix in interleaved RoPE pairs


@dataclass(frozen=True)
class Layout:
    """One file format of one family: our name -> Stored.

    ignored   patterns of tensors that are no weights (masks, RoPE frequencies)
    prefix    what some files write before every name
    """

    names: Mapping
    ignored: tuple = ()
    prefix: str = ""

    def find(self, our_name):
        """The Stored of one of our tensors, with its block's number filled in."""
        block = re.match(r"trf_blocks\.(\d+)\.", our_name)
        key = our_name.replace(f".{block[1]}.", ".{n}.", 1) if block else our_name
        if key not in self.names:
            raise ValueError(f"this file format has no place for {our_name}")
        stored = self.names[key]
        return stored._replace(name=stored.name.format(n=block[1])) if block else stored


def _columns(rows):
    """The layouts of Llama from one table: ours, Hugging Face, Meta, GGUF."""
    rope = ("trf_blocks.{n}.att.W_query.weight", "trf_blocks.{n}.att.W_key.weight")
    return {
        "huggingface": Layout(
            {ours: Stored(hf) for ours, hf, _, _ in rows},
            ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
        ),
        "meta": Layout(
            {ours: Stored(meta, pairs=ours in rope) for ours, _, meta, _ in rows},
            ignored=(r"rope\.freqs",),
        ),
        "gguf": Layout(
            {ours: Stored(gguf, pairs=ours in rope) for ours, _, _, gguf in rows},
            ignored=(r"rope_freqs\.weight",),
        ),
    }


layouts_of_llama = _columns(
    (
        (
            "tok_emb.weight",
            "model.embed_tokens.weight",
            "tok_embeddings.weight",
            "token_embd.weight",
        ),
        (
            "trf_blocks.{n}.norm1.weight",
            "model.layers.{n}.input_layernorm.weight",
            "layers.{n}.attention_norm.weight",
            "blk.{n}.attn_norm.weight",
        ),
        (
            "trf_blocks.{n}.att.W_query.weight",
            "model.layers.{n}.self_attn.q_proj.weight",
            "layers.{n}.attention.wq.weight",
            "blk.{n}.attn_q.weight",
        ),
        (
            "trf_blocks.{n}.att.W_key.weight",
            "model.layers.{n}.self_attn.k_proj.weight",
            "layers.{n}.attention.wk.weight",
            "blk.{n}.attn_k.weight",
        ),
        (
            "trf_blocks.{n}.att.W_value.weight",
            "model.layers.{n}.self_attn.v_proj.weight",
            "layers.{n}.attention.wv.weight",
            "blk.{n}.attn_v.weight",
        ),
        (
            "trf_blocks.{n}.att.out_proj.weight",
            "model.layers.{n}.self_attn.o_proj.weight",
            "layers.{n}.attention.wo.weight",
            "blk.{n}.attn_output.weight",
        ),
        # Hugging Face calls it after the attention that it follows;
        # it is the norm before the feed-forward
        (
            "trf_blocks.{n}.norm2.weight",
            "model.layers.{n}.post_attention_layernorm.weight",
            "layers.{n}.ffn_norm.weight",
            "blk.{n}.ffn_norm.weight",
        ),
        (
            "trf_blocks.{n}.ff.fc1.weight",
            "model.layers.{n}.mlp.gate_proj.weight",
            "layers.{n}.feed_forward.w1.weight",
            "blk.{n}.ffn_gate.weight",
        ),
        (
            "trf_blocks.{n}.ff.fc2.weight",
            "model.layers.{n}.mlp.up_proj.weight",
            "layers.{n}.feed_forward.w3.weight",
            "blk.{n}.ffn_up.weight",
        ),
        (
            "trf_blocks.{n}.ff.fc3.weight",
            "model.layers.{n}.mlp.down_proj.weight",
            "layers.{n}.feed_forward.w2.weight",
            "blk.{n}.ffn_down.weight",
        ),
        ("final_norm.weight", "model.norm.weight", "norm.weight", "output_norm.weight"),
        ("out_head.weight", "lm_head.weight", "output.weight", "output.weight"),
    )
)


class DictReader:
    """Tensors (or arrays) that the caller holds already. They are copied, never kept or changed."""

    owned = False  # may what `read` returns become the model's own memory?

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return list(self.tensors)

    def shape(self, name, wanted):
        return tuple(self.tensors[name].shape)

    def is_float(self, name):
        return self.read(name, None).is_floating_point()

    def read(self, name, wanted, dtype=None):
        return torch.as_tensor(self.tensors[name])

    def release(self):
        pass


def assign(left, right, tensor_name="unknown"):
    """Give the parameter `left` the values of `right` and return it.

    It stays the same Parameter object, with its own dtype. A parameter on the meta device becomes a
    real one on the device of `right`.

    Errors   ValueError for another shape, with the tensor's name and both shapes
    """
    right = torch.as_tensor(right)
    if left.shape != right.shape:
        raise ValueError(
            f"Shape mismatch in tensor '{tensor_name}'. Left: {tuple(left.shape)}, "
            f"Right: {tuple(right.shape)}"
        )
    with torch.no_grad():
        if left.is_meta:
            right = right.detach().to(left.dtype, copy=True)
            torch.utils.swap_tensors(left, nn.Parameter(right, requires_grad=left.requires_grad))
        else:
            left.copy_(right)
    return left


def load_weights(model, reader, layout, device=None):
    """Fill `model` from `reader` by the names of `layout`.

    Every tensor is used once, or nothing is written at all. A model on the meta device gets its
    memory here, on `device`; one that has memory keeps it. On a CPU, tensors of the right dtype
    stay mapped to the file instead of being copied.

    Errors   ValueError lists missing, unexpected and wrongly shaped tensors by their names in the
             file
    """
    plan = plan_loading(model, reader, layout)
    meta = any(p.is_meta for p in model.parameters())
    for our_name, (file_name, file_shape, stored) in plan.items():
        param, heads = model.get_parameter(our_name), heads_of(model, our_name)
        tensor = reader.read(file_name, file_shape, param.dtype)
        if not meta:
            assign(param, from_file(tensor, stored, heads), file_name)
            reader.release()
            continue
        device = torch.device(device or "cpu")
        if stored.pairs and reader.owned and tensor.dtype == param.dtype and device.type == "cpu":
            # into private pages of the map, not into the file
            values = tensor.copy_(permute(tensor, heads))
        else:
            values = from_file(tensor, stored, heads).to(device, param.dtype)
        if values.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            reader.release()
        elif not reader.owned:
            values = values.clone()
        torch.utils.swap_tensors(param, nn.Parameter(values, requires_grad=param.requires_grad))
    if "out_head.weight" not in plan:
        model.tie()
        model.cfg = replace(model.cfg, tie_embeddings=True)
    return model


def plan_loading(model, reader, layout):
    """Compare a file with a model before anything is written.

    Returns  our name -> (file's name, file's shape, Stored)
    """
    in_file, prefix = {}, layout.prefix
    for name in reader.names():
        plain = name.removeprefix(prefix)
        if not any(re.fullmatch(pattern, plain) for pattern in layout.ignored):
            if plain in in_file:
                raise ValueError(
                    f"the file holds {plain} twice, with and without {prefix!r} before its name"
                )
            in_file[plain] = name
    plan, problems = {}, []
    for our_name, param in model.named_parameters(remove_duplicate=False):
        stored = layout.find(our_name)
        if our_name == "out_head.weight" and use_embedding_as_head(model, reader, layout, in_file):
            continue
        if stored.name not in in_file:
            problems.append(f"missing: {stored.name}")
            continue
        name, wanted = in_file[stored.name], shape_in_file(tuple(param.shape), stored)
        shape = reader.shape(name, wanted)
        if shape != wanted:
            problems.append(
                f"wrong shape: {stored.name} is {shape} in the file, the model needs {wanted}"
            )
        elif not reader.is_float(name):
            problems.append(f"no floating-point numbers: {stored.name} (a quantised file?)")
        plan[our_name] = (name, wanted, stored)
    reader.release()
    used = {stored.name for _, _, stored in plan.values()}
    head = layout.find("out_head.weight").name
    problems += [f"unexpected: {name}" for name in in_file if name not in used and name != head]
    problems = list(dict.fromkeys(problems))
    if problems:
        more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise ValueError(
            "the weights do not fit this model; nothing was changed:\n  "
            + "\n  ".join(problems[:12])
            + more
        )
    return plan


def use_embedding_as_head(model, reader, layout, in_file):
    """Decide about the head: is it tied to the embedding?

    It is tied by the config, or by a file that has none unless the config forbids it. After such a
    file the model's config says that it is tied, and an optimizer made before holds an old head.
    """
    tie, head, table = (
        model.cfg.tie_embeddings,
        layout.find("out_head.weight").name,
        layout.find("tok_emb.weight").name,
    )
    if head not in in_file:
        if tie is False:
            raise ValueError(
                f"the file has no {head}, but tie_embeddings=False asks for a head of its own; "
                'with {**cfg, "tie_embeddings": None} the file decides'
            )
        return True
    if tie and table in in_file:
        shape = tuple(model.tok_emb.weight.shape)
        if not torch.equal(reader.read(in_file[head], shape), reader.read(in_file[table], shape)):
            raise ValueError(
                f"tie_embeddings=True, but the file's {head} differs from its {table}; "
                'with {**cfg, "tie_embeddings": False} both are kept'
            )
        reader.release()
    return bool(tie)


def heads_of(model, our_name):
    """How many heads the rows of a query or key matrix belong to."""
    if ".att." not in our_name:
        return None
    att = model.get_submodule(our_name.rsplit(".", 2)[0])
    return att.num_kv_groups if ".W_key." in our_name else att.num_heads


def shape_in_file(shape, stored):
    if stored.third is not None:
        shape = (3 * shape[0], *shape[1:])
    return shape[::-1] if stored.transposed else shape


def from_file(tensor, stored, n_heads):
    """A tensor as a file keeps it -> as our modules keep it."""
    if stored.transposed:
        tensor = tensor.T
    if stored.third is not None:
        tensor = tensor.chunk(3)[stored.third]
    if stored.pairs:
        tensor = permute(tensor, n_heads)
    return tensor.contiguous()


def export_weights(model, layout):
    """The model's tensors as a file of this layout keeps them: name -> tensor, no tied head."""
    tensors, thirds, ours = {}, {}, dict(model.named_parameters(remove_duplicate=False))
    if model.out_head.weight.data_ptr() == model.tok_emb.weight.data_ptr():
        del ours["out_head.weight"]
    for our_name in [n for n in ours if n.endswith(".weight")]:  # files always have these biases
        bias = our_name.removesuffix("weight") + "bias"
        if bias not in ours and re.sub(r"\.\d+\.", ".{n}.", bias, count=1) in layout.names:
            ours[bias] = torch.zeros_like(ours[our_name][:, 0])
    for our_name, param in ours.items():
        stored, tensor = layout.find(our_name), param.detach()
        if stored.pairs:
            tensor = unpermute(tensor, heads_of(model, our_name))
        if stored.third is not None:
            parts = thirds.setdefault(stored.name, {})
            parts[stored.third] = tensor
            if len(parts) < 3:
                continue
            tensor = torch.cat([parts[i] for i in range(3)])
        tensors[stored.name] = (tensor.T if stored.transposed else tensor).contiguous()
    return tensors


def save_model(model, folder, tokenizer=None):
    """Write config.json and model.safetensors as Hugging Face lays them out.

    If a tokenizer is given, its files and its stop tokens are written too. The folder appears whole
    or not at all: it is written beside its place and then renamed. transformers, vLLM and
    llama.cpp's converter read it.

    Errors   FileExistsError if the folder exists and is not empty; ValueError for a model whose
             weights are no longer those of its config (another head, LoRA)
    """
    from helpers.model_config import write_config

    with torch.device("meta"):
        fresh = type(model)({**model.cfg, "context_length": 1})
    wanted = {name: p.shape for name, p in fresh.named_parameters(remove_duplicate=False)}
    wanted |= {"pos_emb.weight": model.pos_emb.weight.shape} if "pos_emb.weight" in wanted else {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if wanted.pop(name, None) != p.shape:
            raise ValueError(f"{name} {tuple(p.shape)} is not what this model's config builds")
    if wanted:
        raise ValueError(f"the model lacks {next(iter(wanted))}, which its config builds")

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists: choose another name, or delete it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(
            export_weights(model, model.layouts["huggingface"]),
            scratch / "model.safetensors",
            {"format": "pt"},
        )
        ids = {"bos_token_id": None, "eos_token_id": None}  # not transformers' 1 and 2
        if tokenizer is not None:
            ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.stop_ids)}
            (scratch / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
            for file in tokenizer.files:
                shutil.copy(file, scratch)
        raw = {**write_config(model), **ids}
        (scratch / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        for file in scratch.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner alone
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        scratch.chmod(0o755)
        try:
            scratch.replace(folder)
        except OSError as error:
            if folder.exists():
                raise FileExistsError(f"{folder} came into being meanwhile") from error
            raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return folder


def load_weights_into_llama(model, param_config, params):
    """Copy a dict of tensors into a Llama, by Hugging Face's names or by Meta's.

    Meta's rows are then reordered. `param_config` is not read, since the model knows its own sizes;
    it is there because code written for the book passes it. Without a head among `params`, the head
    is tied to the embedding.
    """
    layout = "meta" if "tok_embeddings.weight" in params else "huggingface"
    load_weights(model, DictReader(params), model.layouts[layout])


def load_weights_into_gpt(gpt, params):
    """Copy GPT-2's weights into a GPTModel.

    `params` is a flat dict in Hugging Face's names, or the book's nested arrays.
    """
    if "blocks" in params:
        flat = {
            "wte.weight": params["wte"],
            "wpe.weight": params["wpe"],
            "ln_f.weight": params["g"],
            "ln_f.bias": params["b"],
        }
        leaves = {"w": "weight", "b": "bias", "g": "weight"}
        for n, block in enumerate(params["blocks"]):
            for part in ("ln_1", "ln_2"):
                flat.update({f"h.{n}.{part}.{leaves[k]}": v for k, v in block[part].items()})
            for part in ("attn", "mlp"):
                for matrix, values in block[part].items():
                    flat.update(
                        {f"h.{n}.{part}.{matrix}.{leaves[k]}": v for k, v in values.items()}
                    )
        params = flat
    load_weights(gpt, DictReader(params), gpt.layouts["huggingface"])
