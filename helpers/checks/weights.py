"""Proofs of a table of weight names and of a tied head."""

import copy
import re
from collections.abc import Mapping
from difflib import get_close_matches

import torch
from torch import nn

from helpers.checks.judging import (
    CheckFailed,
    StillOpen,
    built,
    in_words,
    proof,
    randomised,
    run,
    seeded,
    unwritten,
)
from helpers.weights import Layout, Stored, from_file

# What is published: the names in Hugging Face's files, in Meta's and in GGUF, and what they are
_FORMATS = ("Hugging Face", "Meta", "GGUF")
_KEYS = {"huggingface": "Hugging Face", "meta": "Meta", "gguf": "GGUF"}
_OUTSIDE = {
    "tok_emb": ("model.embed_tokens", "tok_embeddings", "token_embd", "the embedding"),
    "final_norm": ("model.norm", "norm", "output_norm", "the final norm"),
    "out_head": ("lm_head", "output", "output", "the head"),
}
_INSIDE = {
    "norm1": ("input_layernorm", "attention_norm", "attn_norm", "the norm before attention"),
    "att.W_query": ("self_attn.q_proj", "attention.wq", "attn_q", "the queries"),
    "att.W_key": ("self_attn.k_proj", "attention.wk", "attn_k", "the keys"),
    "att.W_value": ("self_attn.v_proj", "attention.wv", "attn_v", "the values"),
    "att.out_proj": ("self_attn.o_proj", "attention.wo", "attn_output", "attention's way out"),
    "norm2": (
        "post_attention_layernorm",
        "ffn_norm",
        "ffn_norm",
        "the norm behind attention, before the feed-forward",
    ),
    "ff.fc1": ("mlp.gate_proj", "feed_forward.w1", "ffn_gate", "the gate, which passes SiLU"),
    "ff.fc2": ("mlp.up_proj", "feed_forward.w3", "ffn_up", "the value that is gated"),
    "ff.fc3": ("mlp.down_proj", "feed_forward.w2", "ffn_down", "the way back to the stream"),
}
_BLOCKS = ("model.layers.{n}.", "layers.{n}.", "blk.{n}.")
_PLACES = (
    {  # our name -> its names in the three formats, and what it is
        f"{ours}.weight": (*(f"{name}.weight" for name in names[:3]), names[3])
        for ours, names in _OUTSIDE.items()
    }
    | {
        f"trf_blocks.{{n}}.{ours}.weight": (
            *(f"{block}{name}.weight" for block, name in zip(_BLOCKS, names[:3], strict=True)),
            names[3],
        )
        for ours, names in _INSIDE.items()
    }
)
_ROTATED = ("att.W_query", "att.W_key")
_HEADS, _GROUPS, _LAYERS = 4, 2, 12  # twelve blocks: two digits, and 1 is the beginning of 10
_SHAPES = {  # emb_dim 16, heads of 4, hidden_dim 24, 40 tokens
    "tok_emb": (40, 16),
    "out_head": (40, 16),
    "att.W_key": (8, 16),
    "att.W_value": (8, 16),
    "ff.fc1": (24, 16),
    "ff.fc2": (24, 16),
    "ff.fc3": (16, 24),
} | dict.fromkeys(("norm1", "norm2", "final_norm"), (16,))


@proof
def check_weight_table(table):
    """Which tensor of a file is which of ours, against files with the published names.

    table   a Layout of helpers.weights; or a dict, our name -> the file's name, or -> a Stored
            where the file keeps the tensor otherwise; or {"huggingface": ..., "meta": ...,
            "gguf": ...} of these; or a function that returns one. `{n}` is the block's number
    """
    if callable(table):
        table = run(table)
    if isinstance(table, Mapping) and table and set(table) <= set(_KEYS):
        found = [
            _check_file(_layout(table[key]), name) for key, name in _KEYS.items() if key in table
        ]
    else:
        layout = _layout(table)
        found = [_check_file(layout, _format_of(layout))]
    print(f"table of weight names: right, for files of {', '.join(found)}")


def _layout(table):
    """The reader's table as a Layout."""
    if isinstance(table, Layout):
        return _layout(dict(table.names)) and table
    if unwritten(table):
        raise StillOpen("a table is still to be written")
    if not isinstance(table, Mapping):
        raise CheckFailed(
            "a table is a dict, our name -> the file's name, or a Layout of such a dict; "
            f"this is of type {type(table).__name__}"
        )
    if not table or any(unwritten(entry) for entry in table.values()):
        raise StillOpen("the table still has empty places")
    for ours, entry in table.items():
        if not isinstance(entry, str | Stored):
            raise CheckFailed(
                f"{ours} has an entry of type {type(entry).__name__}: write the file's name, or "
                "Stored(name, ...)"
            )
    return Layout({k: Stored(v) if isinstance(v, str) else v for k, v in table.items()})


def _format_of(layout):
    """The format whose published names the table has most of."""
    names = {layout.prefix + stored.name for stored in layout.names.values()}
    known = [names & {places[i] for places in _PLACES.values()} for i in range(3)]
    best = max(range(3), key=lambda i: len(known[i]))
    if not known[best]:
        raise CheckFailed(
            "no name in the table is one of a published file. In Hugging Face's the embedding is "
            "model.embed_tokens.weight, in Meta's tok_embeddings.weight, in GGUF token_embd.weight"
        )
    return _FORMATS[best]


def _check_file(layout, kind):
    """Take every tensor out of a file of this format by the table, and compare."""
    column = _FORMATS.index(kind)
    published = {o: names[column].removeprefix(layout.prefix) for o, names in _PLACES.items()}
    _same_names(layout, kind, published)
    wanted, file = {}, {}
    generator = seeded(7)
    for ours, name in published.items():
        shape = _SHAPES.get(_short(ours), (16, 16))
        for n in range(_LAYERS if "{n}" in ours else 1):
            tensor = torch.randn(shape, generator=generator)
            wanted[ours.format(n=n)] = tensor
            file[name.format(n=n)] = _as_stored(tensor, ours, kind)
    _places_exist(layout, kind, published, file)
    _nothing_twice(layout, published)
    _right_tensors(layout, kind, published)
    for full, tensor in wanted.items():
        stored = layout.find(full)
        given = from_file(file[stored.name], stored, _heads(full))
        if given.shape != tensor.shape or not torch.equal(given, tensor):
            raise CheckFailed(_why_not(stored, full, kind))
    for name in file:
        if any(re.fullmatch(pattern, name) for pattern in layout.ignored):
            raise CheckFailed(f"`ignored` of the Layout hides {name}, which is a weight")
    return kind


def _short(ours):
    """trf_blocks.{n}.att.W_query.weight, or the same with a number -> att.W_query."""
    return re.sub(r"^trf_blocks\.[^.]+\.", "", ours).removesuffix(".weight")


def _heads(ours):
    return {"att.W_query": _HEADS}.get(_short(ours), _GROUPS if ".att." in ours else None)


def _as_stored(tensor, ours, kind):
    """Half-split rows -> interleaved pairs in the files that keep them so."""
    if kind == "Hugging Face" or _short(ours) not in _ROTATED:
        return tensor
    return tensor.unflatten(0, (_heads(ours), 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _same_names(layout, kind, published):
    """The table has an entry for each of our tensors and for nothing else."""
    for ours in layout.names:
        if ours not in published:
            hint = ""
            if f"{ours}.weight" in published:
                hint = "Our names end in .weight, as in model.state_dict()"
            elif (near := re.sub(r"\.\d+\.", ".{n}.", ours, count=1)) in published:
                hint = f"The block's number is written {{n}}: {near}"
            elif f"trf_blocks.{{n}}.{ours}" in published:
                hint = f"A tensor of a block has the block in its name: trf_blocks.{{n}}.{ours}"
            elif ours in {name for places in _PLACES.values() for name in places}:
                hint = "Our name comes first, then the file's"
            raise CheckFailed(in_words(f"{ours!r} is no tensor of our Llama", hint))
    for ours, name in published.items():
        if ours not in layout.names:
            hint = ""
            if ours == "out_head.weight":
                hint = (
                    "Files of Llama 3.2 1B and 3B have no head, since theirs is tied; those of "
                    f"all other Llamas have {name}"
                )
            raise CheckFailed(in_words(f"{ours} has no entry", hint))


def _places_exist(layout, kind, published, file):
    """Every name in the table is one of the file's, and names of a block carry its number."""
    for ours, stored in layout.names.items():
        name = stored.name
        if "{n}" in ours and "{n}" not in name:
            raise CheckFailed(
                f"{ours} is read from {name} in every block: the block's number is missing. "
                "Write {n} where it stands"
            )
        try:
            there = name.format(n=1)
        except (LookupError, ValueError) as error:
            raise CheckFailed(f"{name}: only {{n}} may stand in braces") from error
        if there not in file:
            near = get_close_matches(name, [*published.values()], n=1)
            hint = f"Did you mean {near[0]}?" if near else ""
            raise CheckFailed(
                in_words(f"a file of {kind} has no {name}, the place of {ours}", hint)
            )


def _nothing_twice(layout, published):
    places = {}
    for ours, stored in layout.names.items():
        if stored.name in places:
            lost = set(published.values()) - {s.name for s in layout.names.values()}
            raise CheckFailed(
                f"{stored.name} is used twice, for {places[stored.name]} and "
                f"{ours}, and {', '.join(sorted(lost))} not at all"
            )
        places[stored.name] = ours


def _right_tensors(layout, kind, published):
    """Each of ours comes from the tensor that does its work."""
    owner = {name: ours for ours, name in published.items()}
    for ours, stored in layout.names.items():
        other = owner[stored.name]
        if other != ours:
            exchanged = owner[layout.names[other].name] == ours
            raise CheckFailed(
                (f"{_short(ours)} and {_short(other)} are exchanged: " if exchanged else "")
                + f"{_short(ours)} is {_PLACES[ours][3]}, but {stored.name} holds "
                f"{_PLACES[other][3]}. In files of {kind} it is {published[ours]}"
            )


def _why_not(stored, full, kind):
    """What an entry does to a tensor that its file keeps otherwise."""
    name, rotated = _short(full), _short(full) in _ROTATED
    if stored.third is not None:
        return (
            f"{name} is taken as a third of a matrix (third={stored.third}): GPT-2's files hold "
            "queries, keys and values in one, a Llama's never do"
        )
    if stored.transposed:
        return (
            f"{name} is transposed: files of {kind} keep (out, in), as nn.Linear does. Only "
            "GPT-2's are the other way round, and a square matrix does not show it"
        )
    if rotated and not stored.pairs:
        return (
            f"the rows of {name} stay in interleaved pairs: files of {kind} keep them so, and our "
            "RoPE is half-split. Reorder them with permute: Stored(name, pairs=True)"
        )
    if rotated:
        return f"the rows of {name} are reordered, but files of {kind} are half-split already"
    return f"the rows of {name} are reordered: only queries and keys are rotated, so only they are"


# --- a tied head ----------

TINY = {
    "vocab_size": 31,
    "context_length": 16,
    "emb_dim": 16,
    "n_heads": 2,
    "n_layers": 1,
    "hidden_dim": 24,
    "n_kv_groups": 1,
    "tie_embeddings": True,
    "dtype": torch.float32,
}
_ONE = "head and embedding: one tensor"
_SHARE = "Give the head the embedding's own Parameter: out_head.weight = tok_emb.weight"
_AGAIN = (
    "Tie again there, or let the head have no tensor of its own and use the embedding's in forward"
)


@proof
def check_tied(answer):
    """The head of a model is its embedding: one tensor, in all that happens to a model.

    answer   a model, which is proved as it is now; or its class (or a function) that builds it from
             a config with tie_embeddings=True: then it is also copied, converted, moved and loaded.
             The embedding is called tok_emb, and model(ids) gives logits
    """
    if isinstance(answer, nn.Module):
        _tied(answer, "here")
        print(_ONE)
        return
    if not callable(answer):
        raise CheckFailed(f"give a model or its class, not {type(answer).__name__}")

    def make(seed=0):
        return randomised(_model(answer), seed)

    _tied(_model(answer), "as it is built")
    _trained_through_the_head(make())
    _tied(_after("deepcopy", copy.deepcopy, make()), "after copy.deepcopy(model)", _AGAIN)
    half = _after(".to(torch.bfloat16)", lambda model: model.to(torch.bfloat16), make())
    _tied(half, "after .to(torch.bfloat16)", _AGAIN)
    _loaded(make(), make(1), "load_state_dict(state)", _AGAIN)
    each = "assign=True makes a Parameter of every name in the dict"
    _loaded(
        make(), make(1), "load_state_dict(state, assign=True)", f"{each}. {_AGAIN}", assign=True
    )
    with torch.device("meta"):
        empty = _model(answer)
    filled = randomised(_after("to_empty", lambda model: model.to_empty(device="cpu"), empty))
    each = "to_empty makes a Parameter for every name"
    _tied(filled, "moved from the meta device by to_empty", f"{each}. {_AGAIN}")
    print(f"{_ONE}, also after deepcopy, .to(), to_empty and loading")


def _model(answer):
    if isinstance(answer, type):
        return built(answer, TINY)
    model = run(answer, TINY)
    if not isinstance(model, nn.Module):
        raise CheckFailed(f"this returns no model but something of type {type(model).__name__}")
    return model.eval()


def _after(what, action, model):
    """What is left of the model after one of PyTorch's own operations on it."""
    try:
        return action(model)
    except Exception as error:
        raise CheckFailed(f"{what} stopped with {type(error).__name__}: {error}") from error


def _loaded(model, other, call, fix, **how):
    """The model with the other's values is tied, and has them."""
    state = {name: values.clone() for name, values in other.state_dict().items()}
    _after(call, lambda model: model.load_state_dict(state, **how), model)
    _tied(model, f"after {call}", fix)
    if not torch.equal(model.tok_emb.weight, other.tok_emb.weight):
        raise CheckFailed(f"after {call} the embedding does not hold the loaded values")


def _tied(model, when, fix=_SHARE):
    """A change in one row of the embedding shows in that token's logit, and nothing is doubled."""
    weight, ids, last = _embedding(model)
    before = _logits(model, ids, last)
    row = weight[last].clone()
    weight[last] *= 2  # a token that is not in the input: only a tied head can notice
    try:
        after = _logits(model, ids, last)
    finally:
        weight[last] = row
    if not torch.allclose(after, 2 * before, atol=1e-3 * before.abs().max().item()):
        head = getattr(getattr(model, "out_head", None), "weight", None)
        if head is not None and head.shape == weight.shape and torch.equal(head, weight):
            cause = "two tensors with the same values, a copy, which training drives apart"
        else:
            cause = "two tensors: what changes in the embedding does not change the head"
        raise CheckFailed(f"{when}, head and embedding are {cause}. {fix}")
    for name, parameter in model.named_parameters():
        if parameter is not weight and parameter.data_ptr() == weight.data_ptr():
            raise CheckFailed(
                f"{when}, {name} is a second Parameter on the embedding's memory: it is counted "
                f"twice, and an optimizer moves it twice. {_SHARE}"
            )


def _embedding(model):
    """The embedding's weight, ids without its last token, and that token."""
    ids = torch.tensor([[1, 2, 3]])
    weight = getattr(getattr(model, "tok_emb", None), "weight", None)
    if weight is None:
        run(model, ids)  # a stub says that it is one
        raise CheckFailed(f"{type(model).__name__} has no tok_emb, an nn.Embedding")
    return weight, ids.to(weight.device), weight.shape[0] - 1


def _logits(model, ids, token):
    """The token's logits at every position, in float32."""
    logits, shape = run(model, ids), (*ids.shape, model.tok_emb.weight.shape[0])
    if not isinstance(logits, torch.Tensor) or logits.shape != shape:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise CheckFailed(f"model(ids) gives {got}, expected logits of shape {shape}")
    return logits[..., token].float()


def _trained_through_the_head(model):
    weight, ids, last = _embedding(model)
    with torch.enable_grad():
        logits = run(model, ids)
        if logits.requires_grad:
            logits[..., last].sum().backward()
    if weight.grad is None or not weight.grad[last].any():
        raise CheckFailed(
            "no gradient reaches the embedding through the head, so it is not trained as one: "
            "use the Parameter itself, without .detach() or .data"
        )
