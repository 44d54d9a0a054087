"""Speed only: the parts of a Llama again, computing the same with fewer and larger operations.

`prepare_for_decoding(model)` turns the parts of a finished model into these, in place. They are
taught in notebook 11; nothing else depends on them. Decoding reads every weight once per token, so
what counts is that weights are read at the memory's full speed, and that little else happens.
"""

import copy
import functools
import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.attention import GroupedQueryAttention, attend_plain, attend_sdpa
from helpers.feed_forward import FeedForward, SiLU
from helpers.kv_cache import KVCache
from helpers.norms import RMSNorm, check_width


def prepare_for_decoding(model, compiled=False):
    """Make a finished model ready to decode as fast as it can; returns the same model.

    The last step, after device and dtype. Parts become their fast subclasses, and the matrices that
    read the same input (queries, keys and values; gate and value) become rows of one matrix. Names,
    shapes, values and memory of the weights stay; weights that were mapped to a file are copied to
    memory, one block at a time. Training and changing weights still work. After `.to()`, deepcopy
    or other weights, and under autocast, the taught way computes, until this function is called
    again.

    compiled   compile the decode step as well, for `generate(..., fast=True)`: seconds on a CPU,
               where it needs a C++ compiler, a minute on a GPU; pays for hundreds of tokens.
               Model and step refer to each other: after `del model`, `gc.collect()` frees both
    """
    for module in model.modules():
        if type(module) in FAST:
            module.__class__ = FAST[type(module)]
        if isinstance(module, OneMatrix):
            module.fuse()
        if getattr(module, "attend", None) is attend_plain:
            module.attend = attend_sdpa
    made = model.__dict__.get("compiled")
    if made is not None and made.device != model.tok_emb.weight.device:
        model.compiled = made = None  # it was compiled for another device
    if compiled and made is None:
        model.compiled = CompiledDecoding(model)
    return model


class FastLinear(nn.Linear):
    """A matrix without bias that meets one token on a CPU as a matrix-vector product.

    Shapes   x (..., in) -> (..., out)
    """

    def forward(self, x):
        return multiply(x, self.weight) if self.bias is None else super().forward(x)


def multiply(x, weight):
    """`F.linear` without bias, the way that is fastest on a CPU.

    One row is a matrix-vector product: where a CPU multiplies bfloat16 itself, `torch.mv` reads
    the matrix faster than `F.linear`, elsewhere about as fast. Many rows of bfloat16 or float16, on
    a CPU that cannot multiply them, go through float32: converting the matrix costs one reading of
    it, multiplying without such instructions nine times more.

    Shapes   x (..., in), weight (out, in) -> (..., out)
    """
    if weight.device.type != "cpu" or x.dtype != weight.dtype or taught_way(x):
        return F.linear(x, weight)
    rows = x.numel() // x.shape[-1]
    if rows == 1 and torch.compiler.is_compiling():  # written out, the compiler reads it in one go
        products = weight.float() * x.reshape(-1).float()
        return products.sum(dim=-1).to(x.dtype).view(*x.shape[:-1], -1)
    if rows == 1:
        return torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], -1)
    if rows >= MANY_ROWS and not can_multiply(weight.dtype):
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


MANY_ROWS = 8  # from here on converting to float32 is cheaper, as measured with 2048 by 2048
HALF = {  # dtype -> what tells whether this CPU multiplies such matrices
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def can_multiply(dtype):
    """Does this CPU multiply matrices of this dtype itself? Yes where PyTorch does not say."""
    if dtype not in HALF or torch.compiler.is_compiling():
        return True
    supported = getattr(torch.ops.mkldnn, HALF[dtype], None)  # not in every build of PyTorch
    return supported is None or supported()


def taught_way(x):
    """Is this training or autocast, where the taught classes compute?"""
    return torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)


class OneMatrix:
    """Several matrices of one part that are rows of one; the named weights are views of it.

    `.to()`, deepcopy and another weight break such views. So the one matrix is used only while
    every named weight still lies where its rows are; otherwise, for training and in a compilation
    that cannot ask, the taught class computes.
    """

    names = ()  # of the matrices, in order
    one = None  # (sum of their rows, in)

    @torch.inference_mode(False)  # a matrix made there could not be changed or trained later
    @torch.no_grad()
    def fuse(self):
        """Make the named weights rows of one matrix, unless they are or one is not plain."""
        linears = [getattr(self, name) for name in self.names]
        if self.together() is not None:
            return
        self.one = None
        if not all(plain(linear) for linear in linears):
            return
        weights = [linear.weight.data for linear in linears]
        self.one = side_by_side(weights)
        if self.one is None:
            self.one = torch.cat(weights)
        rows = self.one.split([linear.out_features for linear in linears])
        for linear, own in zip(linears, rows, strict=True):
            linear.weight.data = own

    def together(self):
        """The one matrix, or None where it is not what the named weights are."""
        if self.one is None or torch.compiler.is_compiling():  # a compilation cannot compare
            return self.one if OWN_STEP else None  # addresses; CompiledDecoding did it before
        at = self.one.data_ptr()
        for name in self.names:
            linear = self._modules[name]
            if not plain(linear) or linear._parameters["weight"].data_ptr() != at:
                return None
            at += linear._parameters["weight"].nbytes
        return self.one

    def _apply(self, fn, recurse=True):
        self.one = None  # or the old matrix would stay in memory beside the new ones
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return {**self.__dict__, "one": None}  # a copy has weights of its own


OWN_STEP = False  # is a CompiledDecoding running its step?


def side_by_side(weights):
    """The matrix whose rows these matrices already are, as a view, or None."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and weight.is_contiguous() and weight.storage_offset() == end):
            return None
        end += weight.numel()
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def plain(linear):
    """Is it what the taught class built: no bias, no adapter around it, nobody listening?"""
    return untouched(linear, nn.Linear, FastLinear) and linear.bias is None


def untouched(module, *classes):
    """Is it of one of these classes, with no hook and no forward of its own?"""
    return (
        type(module) in classes
        and not (module._forward_hooks or module._forward_pre_hooks)
        and "forward" not in module.__dict__
    )


class FastAttention(OneMatrix, GroupedQueryAttention):
    """Grouped-query attention that reads one matrix and never repeats keys or values.

    One new token needs no causal mask, since it sees everything. Then the query heads of a group
    are nothing but several queries to one key/value head.

    Shapes   as GroupedQueryAttention
    """

    names = ("W_query", "W_key", "W_value")

    def forward(self, x, mask=None, cos=None, sin=None, cache=None):
        one = self.together()
        if one is None or taught_way(x):
            return super().forward(x, mask, cos, sin, cache)
        B, T, _ = x.shape
        H, G = self.num_heads, self.num_kv_groups
        heads = multiply(x, one).view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)
        turned, values = heads[:, : H + G], heads[:, H + G :]  # queries and keys turn together
        if cos is not None:
            turned = rotate(turned, cos, sin)
        queries, keys = turned[:, :H], turned[:, H:]
        if cache is not None:
            keys, values = cache.append(keys, values)
        if T == 1 and self.attend is attend_sdpa:
            queries = queries.reshape(B, G, H // G, self.head_dim)
            seen = None if mask is None else ~mask[..., :T, : keys.shape[2]]
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        else:
            mixed = self.attend(queries, keys, values, mask).transpose(1, 2)
        return self.out_proj(mixed.reshape(B, T, -1))


def rotate(x, cos, sin):
    """apply_rope with nothing copied but the result: each half gets the other half's share.

    Shapes   x (B, heads, T, E); cos, sin (T, E) or (B, T, E) -> (B, heads, T, E)
    """
    half = x.shape[-1] // 2
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second, sin = x[..., :half], x[..., half:], sin[..., :half]
    turned = x * cos
    turned[..., :half].addcmul_(second, sin, value=-1)
    turned[..., half:].addcmul_(first, sin)
    return turned.to(x.dtype)


class FastFeedForward(OneMatrix, FeedForward):
    """SwiGLU that makes gate and value with one matrix.

    Shapes   x (B, T, D) -> (B, T, D)
    """

    names = ("fc1", "fc2")

    def forward(self, x):
        one = self.together()
        if one is None or taught_way(x) or not untouched(self.silu, SiLU):
            return super().forward(x)
        gate, value = multiply(x, one).chunk(2, dim=-1)
        return self.fc3(F.silu(gate) * value)


class FastRMSNorm(RMSNorm):
    """RMSNorm through PyTorch's own function, one call instead of six.

    Shapes   x (B, T, D) -> (B, T, D) in the dtype of x
    """

    def forward(self, x):
        check_width(x, self.weight)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


FAST = {
    nn.Linear: FastLinear,
    GroupedQueryAttention: FastAttention,
    FeedForward: FastFeedForward,
    RMSNorm: FastRMSNorm,
}


# --- which kernel attends ----------


def attention_backend(device, dtype, capability=None):
    """The fused attention kernel for this device: FlashAttention where it can run.

    On CUDA that takes bfloat16 or float16 and compute capability 8.0 (A100, L4 and later; a T4 has
    7.5). Elsewhere on CUDA the memory-efficient kernel runs, on a CPU PyTorch's own FlashAttention,
    on Apple's GPUs what PyTorch has there.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return SDPBackend.FLASH_ATTENTION
    if device.type != "cuda":
        return SDPBackend.MATH
    capability = capability or torch.cuda.get_device_capability(device)
    if dtype in HALF and capability >= (8, 0):
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.EFFICIENT_ATTENTION


def pinned(backend):
    """attend_sdpa with one kernel allowed: where that cannot run it is an error, no slower kernel.

    Shapes   as attend_plain; the memory-efficient kernel gets keys and values repeated per head
    """

    def attend_pinned(queries, keys, values, mask=None, dropout=0.0):
        if backend == SDPBackend.EFFICIENT_ATTENTION:
            share = queries.shape[1] // keys.shape[1]
            keys, values = (t.repeat_interleave(share, dim=1) for t in (keys, values))
        with sdpa_kernel(backend):
            return attend_sdpa(queries, keys, values, mask, dropout)

    return attend_pinned


# --- a decode step of constant shape, for torch.compile and CUDA graphs ----------


class StaticLayer(NamedTuple):
    """One layer's cache as a compiled step sees it: whole, with the position on the device."""

    keys: torch.Tensor  # (B, G, capacity, E)
    values: torch.Tensor
    at: torch.Tensor  # (1,) where the new token stands

    def append(self, keys, values):
        self.keys.index_copy_(2, self.at, keys)
        self.values.index_copy_(2, self.at, values)
        return self.keys, self.values


def decode_step(model, token, at, keys, values, padding=None):
    """One token on, for every row: nothing in it depends on the position but the tensor `at`.

    Shapes   token (B, 1), at (1,), keys and values (B, G, capacity, E) per layer -> (B, 1, V)
    """
    places, positions = torch.arange(keys[0].shape[2], device=at.device), at
    hidden = places > at  # (capacity,)
    if padding is not None:
        hidden = (hidden | (places < padding[:, None]))[:, None, None]  # (B, 1, 1, capacity)
        positions = (at - padding[:, None]).clamp(min=0)
    else:
        hidden = hidden[None, None, None]
    cache = [StaticLayer(k, v, at) for k, v in zip(keys, values, strict=True)]
    if not on_cuda(model):
        return model.at(token, positions, hidden, cache, last_only=True)
    with sdpa_kernel(SDPBackend.MATH):  # so that the compiler writes the attention itself
        return model.at(token, positions, hidden, cache, last_only=True)


def fastest(model):
    """The fastest way to decode that this device has: (what to call, what makes its caches).

    The model is prepared in place. On a CUDA device the decode step is compiled as well; on a CPU
    only after `prepare_for_decoding(model, compiled=True)`, since it would keep short answers
    waiting.
    """
    prepare_for_decoding(model, compiled=on_cuda(model))
    if model.__dict__.get("compiled") is None:
        return model, functools.partial(KVCache, model)
    return model.compiled, model.compiled.cache


def on_cuda(model):
    """Are this model's weights on a CUDA device?"""
    return model.tok_emb.weight.is_cuda


GRAPHS = {  # as mode "reduce-overhead" does it, with a search for the best kernels
    "triton.cudagraphs": True,
    "coordinate_descent_tuning": True,
}


KEPT_CACHES = 4  # that nobody holds


class CompiledDecoding:
    """A prepared model whose decode step is compiled; called like the model itself.

    Prompts go to the model as they are. A cache that nobody holds any more is used again, since a
    CUDA graph knows its tensors by their address; capacities are rounded up to a power of two, so
    that prompts of many lengths share one graph. Changes of the model count from the next cache on.

    whole     compile the step as one graph, else one block for all; None: what suits the device,
              for a CPU gains little from one graph and waits long for it
    backend   of torch.compile
    """

    def __init__(self, model, whole=None, backend="inductor"):
        self.model, self.backend, self.device = model, backend, model.tok_emb.weight.device
        self.whole = on_cuda(model) if whole is None else whole
        self.step, self.lent = decode_step, []  # (kind, cache, weak reference to who has it)
        if self.whole:
            options = GRAPHS if backend == "inductor" and on_cuda(model) else None
            self.step = torch.compile(
                decode_step, fullgraph=True, dynamic=False, backend=backend, options=options
            )
        self.look()

    def look(self):
        """See what the model is made of now."""
        for module in self.model.modules():
            if isinstance(module, OneMatrix):
                module.one = module.together()
        self.stepping = self.model  # what the step runs on
        if not self.whole:
            self.stepping = copy.copy(self.model)  # the same weights, prompts stay uncompiled
            blocks = [
                torch.compile(block, fullgraph=True, dynamic=False, backend=self.backend)
                for block in self.model.trf_blocks
            ]
            self.stepping._modules = {**self.model._modules, "trf_blocks": nn.ModuleList(blocks)}

    @torch.inference_mode(False)  # caches made there could not be filled elsewhere
    @torch.no_grad()
    def cache(self, batch_size, capacity):
        """An empty cache of at least this capacity, for one text or batch at a time."""
        self.look()
        context, weight = self.model.cfg["context_length"], self.model.tok_emb.weight
        capacity = min(max(256, 1 << (capacity - 1).bit_length()), context)
        kind = (batch_size, capacity, weight.device, weight.dtype)
        free = [entry for entry in self.lent if entry[2]() is None]
        entry = next((entry for entry in free if entry[0] == kind), None)
        if entry is not None:
            self.lent.remove(entry)
            cache = entry[1]
        else:
            cache = KVCache(self.model, batch_size, capacity)
            for tensor in (*cache.keys, *cache.values):
                torch._dynamo.mark_static_address(tensor)
            self.lent = [entry for entry in self.lent if entry not in free[: 1 - KEPT_CACHES]]
        for tensor in (*cache.keys, *cache.values):
            tensor.zero_()  # a hidden NaN would still be a NaN after the product with zero
        given = copy.copy(cache)
        self.lent.append((kind, cache, weakref.ref(given)))
        return given

    def __call__(self, in_idx, cache, *, padding=None, last_only=True):
        global OWN_STEP
        if in_idx.shape[1] > 1:
            return self.model(in_idx, cache, padding=padding, last_only=last_only)
        at = torch.full((1,), cache.position, device=in_idx.device)
        torch.compiler.cudagraph_mark_step_begin()
        given = (self.stepping, in_idx, at, cache.keys, cache.values, padding)
        OWN_STEP = True
        try:
            logits = self.step(*given)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # sizes and models add up
            with torch._dynamo.config.patch(recompile_limit=2**16):
                logits = self.step(*given)
        finally:
            OWN_STEP = False
        cache.position += 1
        return logits.clone() if logits.is_cuda else logits  # the graph writes there again

    def __deepcopy__(self, memo):
        return None  # a copied model compiles anew

    def __reduce__(self):
        return type(None), ()
