"""Generating: choose the next token, keep the cache, stop in time; and the terminal command.

python -m helpers.generate "What do llamas eat?"
"""

import argparse
import functools
import itertools
import operator
import os
import sys
import time
from contextlib import redirect_stdout

import torch

from helpers.fast import fastest, on_cuda
from helpers.kv_cache import KVCache
from helpers.tokenizers import StreamDecoder

STOP_TEST_EVERY = (
    8  # tokens between two looks at a GPU's results: each look waits for all work in flight
)


def next_token(logits, temperature=0.0, top_k=None, top_p=None, generator=None):
    """Choose one token for every row: the likeliest at temperature 0, else a draw.

    The draw is from softmax(logits / temperature), cut first to the `top_k` likeliest tokens, then
    to the fewest whose probabilities add up to `top_p`. A top_k above the vocabulary keeps every
    token.

    Shapes   logits (B, V) -> (B,)
    Errors   ValueError: temperature below 0, top_k below 1, top_p outside (0, 1]
    Source   top-k: Fan et al. 2018, arXiv:1805.04833; top-p: Holtzman et al. 2019, arXiv:1904.09751
    """
    refuse_out_of_range(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0: no overflow
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        chances = ordered.softmax(dim=-1)
        likelier = chances.cumsum(dim=-1) - chances  # the sum of those before it
        ordered = ordered.masked_fill(likelier >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def refuse_out_of_range(temperature, top_k, top_p, max_new_tokens=0, seed=None):
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must be a whole number from 0 to 2**63 - 1")
    if not temperature >= 0 or temperature == float("inf"):
        raise ValueError(
            f"temperature={temperature} must be at least 0 and finite; 0 takes the likeliest token"
        )
    if top_k is not None and (top_k < 1 or top_k != int(top_k)):
        raise ValueError(
            f"top_k={top_k} must be a whole number of at least 1; None switches it off"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1; None switches it off")


def generate_batch(
    model,
    prompts,
    max_new_tokens,
    temperature=0.0,
    top_k=None,
    top_p=None,
    eos_id=None,
    seed=None,
    use_cache=True,
    fast=False,
):
    """Continue prompts of different lengths together; each row ends on its own.

    Shorter prompts are padded at the left, which the model hides, so that every row gets the same
    logits as alone. Draws of several rows come from one generator: a row's sample depends on its
    neighbours, its greedy tokens do not.

    prompts  lists of ids, one per row
    eos_id   one stop token or a collection of them
    fast     decode as fast as this device can: see `fast.fastest`, which prepares the model
    Returns  a list of new ids per row, without the prompt and without the stop token
    Errors   ValueError before the first token: an empty prompt or batch, ids outside the
             vocabulary, max_new_tokens below 0 (0 gives empty lists), more tokens than the context,
             sampling out of range
    """
    prompts = [list(map(int, prompt)) for prompt in prompts]
    check_request(model, prompts, max_new_tokens, temperature, top_k, top_p)
    longest = max(map(len, prompts))
    device = model.tok_emb.weight.device
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    idx = torch.tensor(
        [[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device
    )
    steps = _steps(
        model,
        idx,
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        seed,
        use_cache,
        fast,
        padding if len(set(map(len, prompts))) > 1 else None,
    )
    tokens, lengths = _collect(steps, len(prompts), eos_id, device)
    return [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]


def generate(
    model,
    idx,
    max_new_tokens,
    context_size=None,
    temperature=0.0,
    top_k=None,
    eos_id=None,
    *,
    top_p=None,
    seed=None,
    use_cache=True,
    fast=False,
):
    """Continue (B, T) ids, as in the book; returns (B, T + new) ids.

    With `context_size` the prompt is cropped to its last tokens and nothing is cached, as the book
    does it; without, everything must fit into the model's context. A stop token is not part of the
    result; in a batch a row that ends early is filled up with the stop token that ended it.

    Errors   as generate_batch
    """
    check_request(model, idx.tolist(), max_new_tokens, temperature, top_k, top_p, context_size)
    idx = idx.to(model.tok_emb.weight.device)
    settings = (temperature, top_k, top_p, seed, use_cache, fast, None, context_size)
    steps = _steps(model, idx, max_new_tokens, *settings)
    tokens, lengths = _collect(steps, len(idx), eos_id, idx.device)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = row[length : length + 1]  # nothing to fill where the row goes to the end
    return torch.cat([idx, tokens[:, : max(lengths)]], dim=1)


def generate_text_simple(model, idx, max_new_tokens, context_size=None):
    """Append the likeliest token max_new_tokens times to (B, T) ids; see `generate`."""
    return generate(model, idx, max_new_tokens, context_size)


def generate_text_simple_stream(
    model, token_ids, max_new_tokens, eos_token_id=None, context_size=None
):
    """Yield the likeliest next tokens of (B, T) ids one by one, (B, 1) each.

    It ends when all rows are at a stop token.
    """
    check_request(model, token_ids.tolist(), max_new_tokens, context_size=context_size)
    stops = _stop_tensor(eos_token_id, token_ids.device)
    done = torch.zeros(len(token_ids), dtype=torch.bool, device=token_ids.device)
    for token in _steps(model, token_ids, max_new_tokens, context_size=context_size):
        done |= torch.isin(token, stops)
        if done.all():
            return
        yield token[:, None]


def stream_ids(
    model,
    prompt_ids,
    max_new_tokens,
    temperature=0.0,
    top_k=None,
    top_p=None,
    eos_id=None,
    seed=None,
    use_cache=True,
    fast=False,
):
    """Yield the new ids of one prompt as they are chosen, ending before the first stop token.

    Errors   as generate_batch, before the first id
    """
    prompt_ids = list(map(int, prompt_ids))
    check_request(model, [prompt_ids], max_new_tokens, temperature, top_k, top_p)
    stops = set(_stop_tensor(eos_id, "cpu").tolist())
    idx = torch.tensor([prompt_ids], device=model.tok_emb.weight.device)
    steps = _steps(model, idx, max_new_tokens, temperature, top_k, top_p, seed, use_cache, fast)
    return itertools.takewhile(lambda token: token not in stops, (token.item() for token in steps))


def stream(
    model,
    tokenizer,
    prompt_ids,
    max_new_tokens,
    temperature=0.0,
    top_k=None,
    top_p=None,
    eos_id=None,
    seed=None,
    use_cache=True,
    fast=False,
):
    """Yield the answer to one prompt as text, piece by piece, never half a character.

    Without an eos_id it ends at the tokenizer's `stop_ids`.
    """
    stops = tokenizer.stop_ids if eos_id is None else eos_id
    settings = (temperature, top_k, top_p, stops, seed, use_cache, fast)
    ids = stream_ids(model, prompt_ids, max_new_tokens, *settings)
    return decode_stream(ids, StreamDecoder(tokenizer, context=prompt_ids))


def decode_stream(ids, decoder):
    """Yield the text of ids as they come."""
    for token in ids:
        if text := decoder.add(token):
            yield text
    if text := decoder.end():
        yield text


def _steps(
    model,
    idx,
    max_new_tokens,
    temperature=0.0,
    top_k=None,
    top_p=None,
    seed=None,
    use_cache=True,
    fast=False,
    padding=None,
    context_size=None,
):
    """Yield (B,) new tokens, max_new_tokens times.

    There is one prefill, then one decode call per further token.
    """
    generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
    B, T = idx.shape
    run, new_cache = model, functools.partial(KVCache, model)
    was_training = any(module.training for module in model.modules())
    if fast:
        run, new_cache = fastest(model)
    cache = None
    if use_cache and context_size is None and max_new_tokens:
        cache = new_cache(B, T + max_new_tokens)
    crop = min(context_size or model.cfg["context_length"], model.cfg["context_length"])
    new = idx
    for _ in range(max_new_tokens):
        with torch.no_grad(), _evaluating(model, was_training):
            if cache is not None:
                logits = run(new, cache, padding=padding, last_only=True)[:, -1]
            else:
                logits = model(idx[:, -crop:], padding=padding, last_only=True)[:, -1]
            token = next_token(logits, temperature, top_k, top_p, generator)  # (B,)
        new = token[:, None]
        if cache is None:
            idx = torch.cat([idx, new], dim=1)
        yield token


class _evaluating:
    """Dropout off inside, and the model's mode afterwards as it was."""

    def __init__(self, model, was_training):
        looked_at = model.modules() if was_training or model.training else ()
        self.model, self.training = model, [m for m in looked_at if m.training]

    def __enter__(self):
        if self.training:
            self.model.eval()

    def __exit__(self, *error):
        for module in self.training:
            module.training = True


def _collect(steps, B, eos_id, device):
    """Run the steps until every row has met a stop token.

    Returns (B, n) tokens and each row's number of tokens before its stop token. The test stays on
    the device; a GPU is asked every few tokens, and the surplus is cut off.
    """
    stops, tokens = _stop_tensor(eos_id, device), []
    done = torch.zeros(B, dtype=torch.bool, device=device)
    every = 1 if device.type == "cpu" else STOP_TEST_EVERY
    for number, token in enumerate(steps, 1):
        tokens.append(token)
        if len(stops):
            done |= torch.isin(token, stops)
            if number % every == 0 and done.all():
                break
    if not tokens:
        return torch.empty(B, 0, dtype=torch.long, device=device), [0] * B
    tokens = torch.stack(tokens, dim=1)
    before_stop = (torch.isin(tokens, stops).cumsum(dim=1) == 0).sum(dim=1)
    return tokens, before_stop.tolist()


def _stop_tensor(eos_id, device):
    """None, one id (an int of any library) or a collection of ids -> (n,) tensor."""
    if eos_id is None:
        ids = []
    elif hasattr(eos_id, "__index__") and not getattr(eos_id, "ndim", 0):
        ids = [operator.index(eos_id)]
    else:
        ids = sorted(map(int, eos_id))
    return torch.tensor(ids, dtype=torch.long, device=device)


def check_request(
    model, prompts, max_new_tokens, temperature=0.0, top_k=None, top_p=None, context_size=None
):
    """Refuse what cannot be continued, before anything is computed."""
    refuse_out_of_range(temperature, top_k, top_p, max_new_tokens)
    if not all(isinstance(prompt, list) for prompt in prompts):
        raise ValueError("ids must have two axes, (B, T): idx[None] makes a batch of one row")
    if not prompts or not all(prompts):
        raise ValueError(
            "a prompt is empty: give at least one token (a begin-of-text token, for instance)"
        )
    vocab_size, context = model.cfg["vocab_size"], model.cfg["context_length"]
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(
                f"token {wrong} is outside the vocabulary of 0 to {vocab_size - 1}: "
                "was the prompt made by another model's tokenizer?"
            )
    longest = max(map(len, prompts))
    if context_size is None and longest + max_new_tokens > context:
        raise ValueError(
            f"{longest} prompt tokens and max_new_tokens={max_new_tokens} exceed the context of "
            f"{context}: at most {max(context - longest, 0)} new tokens fit"
        )
    if context_size is not None and context_size < 1:
        raise ValueError(f"context_size={context_size} must be at least 1")


def main(arguments=None):
    """The terminal command: stream an answer on stdout, the speed on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers.generate", description="Ask a model and watch it answer."
    )
    parser.add_argument("prompt", help="the question, or with --raw the text to continue")
    parser.add_argument(
        "--model",
        default="auto",
        help="a known name, a hub repository, a folder; auto: the best one here",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token"
    )
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        help="draw among the likeliest tokens that add up to this probability",
    )
    parser.add_argument(
        "--seed", type=int, help="for the draws; the same seed gives the same answer"
    )
    parser.add_argument("--device", help="cpu, cuda, mps; default: the best one here")
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16; default: what suits the device"
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="on a GPU: compile the decode step, a minute that pays for long answers "
        "(a CPU always takes its fast way)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="no chat template: continue the text as it stands"
    )
    args = parser.parse_args(arguments)
    try:
        refuse_out_of_range(
            args.temperature, args.top_k, args.top_p, args.max_new_tokens, args.seed
        )
        return _answer(args)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone (| head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _answer(args):
    from helpers.checkpoints import load_model

    with redirect_stdout(sys.stderr):  # what auto chose is no part of the answer
        loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    model, tokenizer, chat_format = loaded[:3]
    print(f"{loaded.name}: {loaded.origin}", file=sys.stderr)
    if tokenizer is None:
        raise ValueError(f"{loaded.name} came without a tokenizer, so it cannot read text")
    if args.raw or chat_format is None:
        ids = tokenizer.encode(args.prompt, bos=tokenizer.bos_id is not None)
    else:
        ids = chat_format.encode(args.prompt)
    times = []

    def timed(tokens):
        for token in tokens:
            times.append(time.perf_counter())
            yield token

    start = time.perf_counter()
    tokens = timed(
        stream_ids(
            model,
            ids,
            args.max_new_tokens,
            args.temperature,
            args.top_k,
            args.top_p,
            loaded.stop_ids,
            args.seed,
            fast=args.fast or not on_cuda(model),
        )
    )
    for text in decode_stream(tokens, StreamDecoder(tokenizer, context=ids)):
        print(text, end="", flush=True)
    print(flush=True)
    if len(times) > 1:
        print(
            f"{len(times)} tokens; first after {times[0] - start:.2f} s (prompt of {len(ids)}), "
            f"then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens per second",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
