"""Proofs of a byte-level BPE tokenizer and of Llama 3's chat format."""

import functools
import math
import unicodedata
from itertools import pairwise

import regex
import tiktoken

from helpers.checks.judging import CheckFailed, StillOpen, in_words, proof, run, unwritten
from helpers.tokenizers import DATA, GPT2_PATTERN, LLAMA3_PATTERN, Llama3Tokenizer, read_ranks

WORDS = " strawberries undoubtedly tokenization, unhappiness! Llamas shouldn't"
TEXTS = {
    "words": WORDS,
    "digits": "1234567890 and 3.14159, 2024-01-02",
    "whitespace": "  two,   three   Zebras   (Quartz) \t\n\n  def f(x):\n    return 1\n\n ",
    "accents and quotes": "naïve café, and e\u0301 in two characters; DON'T I'LL'select'",
    "scripts and emoji": "Привет, мир! 你好，世界。 नमस्ते \U0001f999 \U0001f469\u200d\U0001f467",
}
NAMES = "a <|eot_id|> b<|begin_of_text|>"


@functools.cache
def _stand_in():
    """Llama 3's tokenizer, by tiktoken, with GPT-2's merges, which are stored with the course."""
    return Llama3Tokenizer(DATA / "gpt2.tiktoken")


@functools.cache
def _ranks():
    return read_ranks(DATA / "gpt2.tiktoken")


# --- ids and texts ----------


def judge_ids(what, got, wanted, mistakes=dict):
    """Compare two lists of ids, and where they differ name the mistake whose result this is.

    mistakes   called on failure: {hint: its ids, or several such lists}
    """
    if unwritten(got):
        raise StillOpen("nothing was returned yet")
    if not isinstance(got, list | tuple) or not all(isinstance(i, int) for i in got):
        raise CheckFailed(f"{what}: expected a list of ids, whole numbers, got {str(got)[:60]}")
    got = list(got)
    if got == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    at = min(len(got), len(wanted)) if at is None else at
    found = [hint for hint, wrong in mistakes().items() if _is(got, wrong)]
    here, there = (f"{ids[at : at + 4]}" if at < len(ids) else "the end" for ids in (got, wanted))
    apart = f"{len(got)} ids, expected {len(wanted)}; from place {at} on {here} instead of {there}"
    raise CheckFailed(in_words(f"{what}: {apart}", *found[:1]))


def _is(got, wrong):
    """Are these ids a mistake's, or one of several?"""
    return list(got) == wrong or list(got) in wrong


def _joined(lists):
    return [i for ids in lists for i in ids]


def _judge_text(what, got, wanted, mistakes=dict):
    if unwritten(got):
        raise StillOpen("nothing was returned yet")
    if got == wanted:
        return
    found = [hint for hint, wrong in mistakes().items() if got in wrong]
    raise CheckFailed(in_words(f"{what}: {got!r} instead of {wanted!r}", *found[:1]))


# --- the wrong ways to merge and to cut ----------


def _lowest(ranks):
    return min(range(len(ranks)), key=ranks.__getitem__)


def _leftmost(ranks):
    return next((i for i, rank in enumerate(ranks) if rank < math.inf), 0)


def _highest(ranks):
    return max(range(len(ranks)), key=lambda i: (ranks[i] < math.inf, ranks[i]))


def _merged(piece, ranks, choose=_lowest, steps=math.inf):
    """Bytes -> tokens; `choose` takes the ranks of all pairs, infinite where there is none."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1 and steps > 0:
        of_pairs = [ranks.get(a + b, math.inf) for a, b in pairwise(parts)]
        at = choose(of_pairs)
        if of_pairs[at] == math.inf:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        steps -= 1
    return parts


def _longest(piece, ranks):
    parts = []
    while piece:
        end = next(end for end in range(len(piece), 0, -1) if piece[:end] in ranks)
        parts, piece = [*parts, piece[:end]], piece[end:]
    return parts


def _encoded(text, ranks, merge=_merged, pattern=LLAMA3_PATTERN):
    """Ids of `text`, merged or cut in another way."""
    pieces = regex.findall(pattern, text)
    return [ranks[part] for piece in pieces for part in merge(piece.encode(), ranks)]


def _wrong_encodings(text, ranks, special):
    """{hint: ids} of the mistakes that people make, also those that do no harm to this text."""
    by_id = _encoded(text, ranks)
    begin = special["<|begin_of_text|>"]
    in_ones, any_number = (LLAMA3_PATTERN.replace("{1,3}", n) for n in ("", "+"))
    from_the_right = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))")

    def again(change):
        return _encoded(change(text), ranks)

    names = "(" + "|".join(map(regex.escape, special)) + ")"
    parts = regex.split(names, text)
    by_name = [[special[p]] if p in special else _encoded(p, ranks) for p in parts if p]
    return {
        "A piece that is a token already is not taken apart: look it up before merging": by_id,
        "Nothing is cut before merging: apply the pattern, then merge inside each piece": (
            _encoded(text, ranks, pattern="(?s).+")
        ),
        "Merges go by position, the leftmost possible pair first: of all pairs the one with the "
        "lowest rank comes first, wherever it stands": (
            _encoded(text, ranks, functools.partial(_merged, choose=_leftmost))
        ),
        "The longest token is taken from the left: BPE merges pairs by rank": (
            _encoded(text, ranks, _longest)
        ),
        "The pair with the highest rank is merged first: a low rank was learned early": (
            _encoded(text, ranks, functools.partial(_merged, choose=_highest))
        ),
        "Only one pair of a piece is merged: go on until no pair has a rank": (
            _encoded(text, ranks, functools.partial(_merged, steps=1))
        ),
        "Nothing is merged: these are the ids of the bytes": (
            [ranks[bytes([byte])] for byte in text.encode()]
        ),
        "These are the values of the bytes: a byte's id is its rank": list(text.encode()),
        "Digits are cut one by one: Llama 3 takes up to three together": (
            _encoded(text, ranks, pattern=in_ones)
        ),
        "Digits are not cut: Llama 3 takes up to three together": (
            _encoded(text, ranks, pattern=any_number)
        ),
        "Digits are grouped from the right, 1 and 234: the pattern takes 123 first": (
            _encoded(text, ranks, pattern=from_the_right)
        ),
        "This is GPT-2's pattern: Llama 3's cuts digits, line breaks and capitals differently": (
            _encoded(text, ranks, pattern=GPT2_PATTERN)
        ),
        "The text is cut at spaces alone: the pattern also parts letters, digits and signs": (
            _encoded(text, ranks, pattern=r"\s?\S+|\s")
        ),
        "Whitespace at the ends is lost: nothing is stripped": again(str.strip),
        "Capitals are lost: nothing is lowered": again(str.lower),
        "Unicode is normalised: the bytes stay as they were typed": [
            again(functools.partial(unicodedata.normalize, form)) for form in ("NFC", "NFKC")
        ],
        "Text that a user typed becomes special tokens: they are added by id, never by name": (
            _joined(by_name)
        ),
        "Begin-of-text is there without being asked for": [begin, *by_id],
    }


# --- the tokenizer ----------


@proof
def check_tokenizer(answer):
    """A class of (ranks, special), or a finished tokenizer with encode, decode and special.

    ranks     {bytes: rank}, the rank is the id
    special   {name: id}, <|begin_of_text|> among them
    encode(text, bos=False) gives a list of ids, decode(ids) a text with the special names in it.
    A class is compared with tiktoken. A finished tokenizer, whose merges are not known here, is
    compared with itself: what it does with the parts of a text.
    """
    if finished(answer, "encode", "decode"):
        _judge_whole(answer)
        what = "texts come back, names stay text, three digits at most, one begin-of-text"
    else:
        _judge_tiny(answer)
        tokenizer = run(answer, dict(_ranks()), dict(_stand_in().special))
        _judge_encode(tokenizer)
        _judge_decode(tokenizer, _stand_in().special)
        what = "the ids of tiktoken for words, digits, whitespace, scripts and emoji, and back"
    print(f"tokenizer: right; {what}")


def finished(answer, *names):
    return not isinstance(answer, type) and all(hasattr(answer, name) for name in names)


def _method(thing, name):
    if not hasattr(thing, name):
        raise CheckFailed(f"{type(thing).__name__} needs a method {name}")
    return getattr(thing, name)


def _judge_tiny(answer):
    """256 bytes and six tokens by hand: one of them is a piece, but no merges lead to it."""
    tokens = [*list(_ranks())[:256], b"bc", b"ab", b"cd", b"er", b"her", b"abce"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {"<|begin_of_text|>": len(ranks), "<|eot_id|>": len(ranks) + 1}
    theirs = tiktoken.Encoding(
        "tiny", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    texts = {f"{t!r} with 262 tokens": t for t in ("abc", "bcd", "herb", "abced", "abce")}
    encode = _method(run(answer, dict(ranks), dict(special)), "encode")
    _judge_encodings(encode, texts, ranks, special, theirs.encode)


def _judge_encode(tokenizer):
    theirs, encode = _stand_in(), _method(tokenizer, "encode")
    texts = {**TEXTS, "names of special tokens": NAMES, "an empty text": ""}
    _judge_encodings(encode, texts, _ranks(), theirs.special, theirs.encode)
    _judge_begin(encode, theirs.special, theirs.encode("Hi"))


def _judge_encodings(encode, texts, ranks, special, right):
    """All texts against `right`; a failure names the mistake that fits most of them."""
    got = {name: run(encode, text) for name, text in texts.items()}

    def mistakes(failed):
        wrong = {name: _wrong_encodings(text, ranks, special) for name, text in texts.items()}

        def fits(hint):
            return sum(_is(got[name], wrong[name][hint]) for name in texts)

        hints = sorted(wrong[failed], key=fits, reverse=True)
        return {hint: wrong[failed][hint] for hint in hints}

    for name, text in texts.items():
        judge_ids(name, got[name], right(text), lambda: mistakes(name))


def _judge_begin(encode, special, plain):
    begin = special["<|begin_of_text|>"]
    judge_ids(
        "'Hi' with bos=True", run(encode, "Hi", bos=True), [begin, *plain],
        lambda: {
            "Begin-of-text is missing": plain,
            "There are two begin-of-text tokens": [begin, begin, *plain],
            "Begin-of-text stands at the end": [*plain, begin],
        },
    )  # fmt: skip


def _judge_decode(tokenizer, special, encode=None):
    """Back to text: whole characters, halves of one, special tokens; then the stop tokens."""
    encode, decode = encode or _stand_in().encode, _method(tokenizer, "decode")
    halved = encode("ok \U0001f999")[:-1]  # the last byte of the llama is missing
    try:
        run(decode, halved)
    except CheckFailed as failure:
        if isinstance(failure.__cause__, UnicodeDecodeError):
            hint = "Half a character stops the decoding: errors='replace' puts U+FFFD there"
            raise CheckFailed(in_words(str(failure), hint)) from failure.__cause__
        raise
    for name, text in TEXTS.items():
        _judge_text(
            f"{name}, encoded and decoded", run(decode, encode(text)), text,
            lambda: _wrong_texts(encode(text), decode, text),
        )  # fmt: skip
    back = run(decode, halved)
    if "\ufffd" not in back:
        hint = "Half a character vanishes: errors='replace' shows it, errors='ignore' does not"
        raise CheckFailed(f"'ok' and half a character: {back!r} without U+FFFD. {hint}")
    ids = [special["<|begin_of_text|>"], *encode("Hi"), special["<|eot_id|>"]]
    _judge_text(
        "special tokens", run(decode, ids), "<|begin_of_text|>Hi<|eot_id|>",
        lambda: {"Special tokens are left out: their names let a prompt be read": ["Hi"]},
    )  # fmt: skip
    stops = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    if hasattr(tokenizer, "stop_ids") and set(tokenizer.stop_ids) != {special[s] for s in stops}:
        raise CheckFailed(
            f"stop_ids are {sorted(tokenizer.stop_ids)}: an answer of Llama 3 may end with any of "
            "three tokens, <|end_of_text|>, <|eom_id|> and <|eot_id|>"
        )


def _wrong_texts(ids, decode, text):
    one_by_one = [decode([i]) for i in ids]
    return {
        "Each token is decoded alone, but the bytes of one character may be spread over several "
        "tokens: join all bytes, then decode": [
            "".join(one_by_one), "".join(t.replace("\ufffd", "") for t in one_by_one),
        ],
        "Whitespace at the ends is lost: nothing is stripped": [text.strip()],
        "A space stands between the tokens: a token holds its own space": [
            " ".join(one_by_one), " ".join(one_by_one).strip(),
        ],
    }  # fmt: skip


def _judge_whole(tokenizer):
    """A finished tokenizer: its merges are not known here."""
    special = getattr(tokenizer, "special", {})
    if missing := [n for n in ("<|begin_of_text|>", "<|eot_id|>") if n not in special]:
        raise CheckFailed(f"this tokenizer has no {' and no '.join(missing)}: it is not Llama 3's")
    encode = tokenizer.encode
    pieces = _joined(run(encode, piece) for piece in ("123", "456", "789", "0"))
    judge_ids(
        "'1234567890'", run(encode, "1234567890"), pieces,
        lambda: {
            "Digits are grouped from the right, 1 and 234: the pattern takes 123 first": (
                _joined(map(encode, ("1", "234", "567", "890")))
            )
        },
    )  # fmt: skip
    for name in special:
        if named := set(run(encode, f"a {name} b")) & set(special.values()):
            raise CheckFailed(
                f"the text {name!r} becomes {sorted(named)}. Text that a user typed becomes "
                "special tokens: they are added by id, never by name"
            )
    _judge_begin(encode, special, run(encode, "Hi"))
    _judge_decode(tokenizer, special, encode)


# --- the chat format ----------

BEGIN, END, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
HEADER = ("<|start_header_id|>", "<|end_header_id|>")
CHATS = {
    "one question": [{"role": "user", "content": "What do llamas eat?"}],
    "a conversation": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What do llamas eat?\n"},
        {"role": "assistant", "content": "Grass."},
        {"role": "user", "content": "And <|eot_id|> for dessert?"},
    ],
}


def written(tokenizer, messages, *, begin=(BEGIN,), header=HEADER, gap="\n\n", text=str.strip,
            end=(TURN,), answer="assistant", role=str, ids=True):  # fmt: skip
    """A prompt, as ids or as one string; every argument after the messages is one mistake.

    answer   the role whose header comes last; None for no such header
    """
    turns = [(role(m["role"]), text(m["content"])) for m in messages]
    pieces = [(name, True) for name in begin]
    for who, content in [*turns, (answer, None)]:
        if who is not None:
            pieces += [(name, True) for name in header[:1]] + [(who, False)]
            pieces += [(name, True) for name in header[1:]] + [(gap, False)]
        if content is not None:
            pieces += [(content, False)] + [(name, True) for name in end]
    if not ids:
        return "".join(piece for piece, _ in pieces)
    return [
        i
        for piece, is_special in pieces
        for i in ([tokenizer.special[piece]] if is_special else tokenizer.encode(piece))
    ]


def _wrong_chats(tokenizer, messages):
    other = {"user": "assistant", "assistant": "user"}
    write = functools.partial(written, tokenizer, messages)
    begin, turn = tokenizer.special[BEGIN], tokenizer.special[TURN]
    each = [written(tokenizer, [m], answer=None) for m in messages]
    inside = []  # turns whose content was encoded with a begin-of-text
    for m in messages:
        whole, empty = (
            written(tokenizer, [{**m, "content": content}], begin=(), answer=None)
            for content in (m["content"], "")
        )
        inside += [*whole[: len(empty) - 1], begin, *whole[len(empty) - 1 :]]
    inside += written(tokenizer, [], begin=())
    both = "\n\n".join(m["content"].strip() for m in messages[:2])
    first = {"role": "user", "content": both}
    return {
        "There are two begin-of-text tokens: either the template has it or the tokenizer adds it": [
            write(begin=(BEGIN, BEGIN)),
            [begin, *tokenizer.encode(write(ids=False), allowed_special="all")],
        ],
        "Begin-of-text stands inside the turns: encode the contents without bos": [
            [begin, *inside],
            inside,
        ],
        "Begin-of-text is missing": write(begin=()),
        "Begin-of-text stands before every turn: a prompt has one": (
            _joined(each) + written(tokenizer, [], begin=())
        ),
        "Text that a user typed becomes special tokens: encode the contents without them": (
            tokenizer.encode(write(ids=False), allowed_special="all")
        ),
        "The template's own special tokens are written as text: add them by id": (
            tokenizer.encode(write(ids=False))
        ),
        "The roles are exchanged": (
            write(role=lambda r: other.get(r, r))
        ),
        "One line break follows a header: there are two": write(gap="\n"),
        "No line breaks follow a header: there are two": write(gap=""),
        "<|end_header_id|> is missing": write(header=HEADER[:1]),
        "<|eot_id|> is missing at the end of a turn": [
            write(end=()),
            [i for i in write(answer=None) if i != turn] + written(tokenizer, [], begin=()),
            written(tokenizer, messages, answer=None)[:-1] + written(tokenizer, [], begin=()),
        ],
        "A turn ends with <|end_of_text|>: it ends with <|eot_id|>": write(end=(END,)),
        "The header of the answer is missing: the model would write it, or another question": (
            write(answer=None)
        ),
        "The answer's turn is closed already: the prompt ends after its header": [*write(), turn],
        "The last header is the user's: the assistant answers": write(answer="user"),
        "Whitespace around a text is kept: contents are stripped": write(text=str),
        "The system turn is missing": (
            written(tokenizer, [m for m in messages if m["role"] != "system"])
        ),
        "The system text stands in the first question, as in Llama 2: it is a turn of its own": (
            written(tokenizer, [first, *messages[2:]])
        ),
        "Only the last message is there": written(tokenizer, messages[-1:]),
    }  # fmt: skip


@proof
def check_chat_format(answer):
    """A class of a tokenizer, or a finished chat format with that tokenizer as `tok`.

    encode_dialog(messages) gives the ids of a prompt of Llama 3's instruct models. The tokenizer
    has encode(text), without begin-of-text unless asked for, and special, {name: id}.
    """
    if finished(answer, "encode_dialog", "tok"):
        chat, tokenizer = answer, answer.tok
    else:
        tokenizer = _stand_in()
        chat = run(answer, tokenizer)
    encode_dialog = _method(chat, "encode_dialog")
    chats = {**CHATS, "system and question": CHATS["a conversation"][:2]}
    for name, messages in chats.items():
        copies = [dict(message) for message in messages]
        default = getattr(chat, "default_system", None)
        if default is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": default}, *messages]
        judge_ids(
            name, run(encode_dialog, copies), written(tokenizer, messages),
            lambda: _wrong_chats(tokenizer, messages),
        )  # fmt: skip
    print("chat format: right; one begin-of-text, a header and an end for every turn")
