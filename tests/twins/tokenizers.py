"""Twins of a byte-level BPE tokenizer and of Llama 3's chat format."""

import heapq
import math
import unicodedata
from itertools import pairwise

import regex
import tiktoken

from helpers.checks import check_chat_format, check_tokenizer
from helpers.tokenizers import (
    DATA,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    BPETokenizer,
    ChatFormat,
    GPT2Tokenizer,
    Llama3Tokenizer,
)
from twins.registry import accepted, proves, refused


def helpers_own(ranks, special):
    tokenizer = BPETokenizer("own", ranks, LLAMA3_PATTERN, special)
    tokenizer.bos_id = special["<|begin_of_text|>"]
    tokenizer.eos_id = None
    return tokenizer


WHOLE = (
    "tokenizer: right; texts come back, names stay text, three digits at most, one begin-of-text"
)
proves(
    check_tokenizer,
    helpers_own,
    "tokenizer: right; the ids of tiktoken for words, digits, whitespace, scripts and emoji, and "
    "back",
)
proves(
    check_chat_format,
    ChatFormat,
    "chat format: right; one begin-of-text, a header and an end for every turn",
)


# --- tokenizers, as classes of (ranks, special) ----------


@accepted(check_tokenizer)
class Small:
    """As a reader writes it; the wrong twins change one method."""

    pattern = LLAMA3_PATTERN

    def __init__(self, ranks, special):
        self.ranks, self.special = ranks, special
        self.tokens = {i: token for token, i in ranks.items()}
        self.names = {i: name for name, i in special.items()}

    def merge(self, piece):
        if piece in self.ranks:
            return [self.ranks[piece]]
        parts = [bytes([byte]) for byte in piece]
        while len(parts) > 1:
            found = [self.ranks.get(a + b, math.inf) for a, b in pairwise(parts)]
            at = self.choose(found)
            if found[at] == math.inf:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ranks[part] for part in parts]

    def choose(self, found):
        return found.index(min(found))

    def cut(self, text):
        return regex.findall(self.pattern, text)

    def encode(self, text, bos=False):
        ids = [i for piece in self.cut(text) for i in self.merge(piece.encode("utf-8"))]
        return [self.special["<|begin_of_text|>"]] * bos + ids

    def bytes_of(self, i):
        return self.tokens[i] if i in self.tokens else self.names[i].encode()

    def decode(self, ids):
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="replace")


@accepted(check_tokenizer)
class AllPlacesAtOnce(Small):
    """The pair with the lowest rank is merged wherever it stands, before the next pair."""

    def merge(self, piece):
        if piece in self.ranks:
            return (self.ranks[piece],)
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while best := min((p for p in map(b"".join, pairwise(parts)) if p in self.ranks),
                          key=self.ranks.get, default=None):  # fmt: skip
            new, i = [], 0
            while i < len(parts):
                step = 2 if b"".join(parts[i : i + 2]) == best and len(parts) > i + 1 else 1
                new.append(b"".join(parts[i : i + step]))
                i += step
            parts = new
        return tuple(map(self.ranks.get, parts))


@accepted(check_tokenizer)
class ByAHeap(Small):
    """A queue of pairs and a linked list, as fast tokenizers have it."""

    def merge(self, piece):
        if piece in self.ranks:
            return [self.ranks[piece]]
        end = {i: i + 1 for i in range(len(piece))}  # start of a part -> its end
        queue = []

        def offer(start):
            if start in end and end[start] in end:
                stop = end[end[start]]
                if (rank := self.ranks.get(piece[start:stop])) is not None:
                    heapq.heappush(queue, (rank, start, end[start], stop))

        for start in list(end):
            offer(start)
        while queue:
            _, start, middle, stop = heapq.heappop(queue)
            if end.get(start) != middle or end.get(middle) != stop:
                continue  # one of the two parts is gone
            end[start] = stop
            del end[middle]
            offer(start)
            for before in [s for s, e in end.items() if e == start]:
                offer(before)
        return [self.ranks[piece[start:stop]] for start, stop in sorted(end.items())]


@accepted(check_tokenizer)
def by_tiktoken(ranks, special):
    theirs = tiktoken.Encoding(
        "x", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )

    class Wrapped:
        def encode(self, text, bos=False):
            begin = [special["<|begin_of_text|>"]] if bos else []
            return begin + theirs.encode_ordinary(text)

        def decode(self, ids):
            return theirs.decode(ids)

    return Wrapped()


def whole(twin, name):
    """A finished tokenizer; twins are called by their names."""
    twin.__name__ = name
    return twin


accepted(check_tokenizer, WHOLE)(whole(Llama3Tokenizer(DATA / "gpt2.tiktoken"), "finished"))
accepted(check_tokenizer, WHOLE)(
    whole(Small(Llama3Tokenizer(DATA / "gpt2.tiktoken").model._mergeable_ranks,
                Llama3Tokenizer(DATA / "gpt2.tiktoken").special), "finished_in_python")
)  # fmt: skip


def pattern(name, text, hint):
    refused(check_tokenizer, hint)(type(name, (Small,), {"pattern": text}))


pattern("NoPattern", "(?s).+", "Nothing is cut before merging")
pattern("PatternOfGPT2", GPT2_PATTERN, "This is GPT-2's pattern")
pattern("DigitsOneByOne", LLAMA3_PATTERN.replace("{1,3}", ""), "Digits are cut one by one")
pattern("DigitsTogether", LLAMA3_PATTERN.replace("{1,3}", "+"), "Digits are not cut")
pattern("SpacesAlone", r"\s?\S+|\s", "The text is cut at spaces alone")


@refused(check_tokenizer, "Digits are grouped from the right")
class Thousands(Small):
    def cut(self, text):
        for piece in super().cut(regex.sub(r"(?<=\p{N})(?=(?:\p{N}{3})+(?!\p{N}))", "\0", text)):
            if piece != "\0":
                yield piece.replace("\0", "")


@refused(check_tokenizer, "Merges go by position")
class ByPosition(Small):
    def choose(self, found):
        return next((i for i, rank in enumerate(found) if rank < math.inf), 0)


@refused(check_tokenizer, "The pair with the highest rank is merged first")
class HighestFirst(Small):
    def choose(self, found):
        there = [-1 if rank == math.inf else rank for rank in found]
        return there.index(max(there))


@refused(check_tokenizer, "The longest token is taken from the left")
class Longest(Small):
    def merge(self, piece):
        ids = []
        while piece:
            n = max(n for n in range(1, len(piece) + 1) if piece[:n] in self.ranks)
            ids, piece = [*ids, self.ranks[piece[:n]]], piece[n:]
        return ids


@refused(check_tokenizer, "Only one pair of a piece is merged")
class OnePair(Small):
    def merge(self, piece):
        parts = [bytes([byte]) for byte in piece]
        found = [self.ranks.get(a + b, math.inf) for a, b in pairwise(parts)]
        if found and min(found) < math.inf:
            at = self.choose(found)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ranks[part] for part in parts]


@refused(check_tokenizer, "A piece that is a token already is not taken apart")
class NeverWhole(Small):
    def merge(self, piece):
        ends = super().merge(piece + b"\x00")  # no token holds this byte and another
        return ends[:-1]


@refused(check_tokenizer, "Nothing is merged")
class NoMerge(Small):
    def merge(self, piece):
        return [self.ranks[bytes([byte])] for byte in piece]


@refused(check_tokenizer, "These are the values of the bytes")
class BytesAsIds(Small):
    def encode(self, text, bos=False):
        return list(text.encode())


@refused(check_tokenizer, "your code stopped with KeyError")
class CharactersAsKeys(Small):
    def merge(self, piece):
        return [self.ranks[character] for character in piece.decode()]


@refused(check_tokenizer, "Whitespace at the ends is lost")
class Stripped(Small):
    def encode(self, text, bos=False):
        return super().encode(text.strip(), bos)


@refused(check_tokenizer, "Capitals are lost")
class Lowered(Small):
    def encode(self, text, bos=False):
        return super().encode(text.lower(), bos)


@refused(check_tokenizer, "Unicode is normalised")
class Normalised(Small):
    def encode(self, text, bos=False):
        return super().encode(unicodedata.normalize("NFC", text), bos)


@refused(check_tokenizer, "Text that a user typed becomes special tokens")
class NamesBecomeTokens(Small):
    def encode(self, text, bos=False):
        cut = "(" + "|".join(map(regex.escape, self.special)) + ")"
        ids = [self.special["<|begin_of_text|>"]] * bos
        for part in regex.split(cut, text):
            ids += [self.special[part]] if part in self.special else super().encode(part)
        return ids


@refused(check_tokenizer, "Begin-of-text is there without being asked for")
class AlwaysBegins(Small):
    def encode(self, text, bos=False):
        return super().encode(text, bos=True)


@refused(check_tokenizer, "There are two begin-of-text tokens")
class BeginsTwice(Small):
    def encode(self, text, bos=False):
        ids = super().encode(text, bos)
        return [self.special["<|begin_of_text|>"], *ids] if bos else ids


@refused(check_tokenizer, "Begin-of-text is missing")
class NeverBegins(Small):
    def encode(self, text, bos=False):
        return super().encode(text)


@refused(check_tokenizer, "Begin-of-text stands at the end")
class BeginsAtTheEnd(Small):
    def encode(self, text, bos=False):
        return super().encode(text) + [self.special["<|begin_of_text|>"]] * bos


@refused(check_tokenizer, "unexpected keyword argument 'bos'")
class WithoutBos(Small):
    def encode(self, text):
        return super().encode(text)


@refused(check_tokenizer, "expected a list of ids")
class StringsForIds(Small):
    def encode(self, text, bos=False):
        return [str(i) for i in super().encode(text, bos)]


@refused(check_tokenizer, "Each token is decoded alone")
class DecodedAlone(Small):
    def decode(self, ids):
        return "".join(self.bytes_of(i).decode("utf-8", errors="replace") for i in ids)


@refused(check_tokenizer, "Each token is decoded alone")
class DecodedAloneAndDropped(Small):
    def decode(self, ids):
        return "".join(self.bytes_of(i).decode("utf-8", errors="ignore") for i in ids)


@refused(check_tokenizer, "errors='ignore' does not")
class HalvesVanish(Small):
    def decode(self, ids):
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="ignore")


@refused(check_tokenizer, "Half a character stops the decoding")
class HalvesStop(Small):
    def decode(self, ids):
        return b"".join(map(self.bytes_of, ids)).decode("utf-8")


@refused(check_tokenizer, "A space stands between the tokens")
class Spaced(Small):
    def decode(self, ids):
        return " ".join(self.bytes_of(i).decode("utf-8", errors="replace") for i in ids)


@refused(check_tokenizer, "Whitespace at the ends is lost")
class DecodedAndStripped(Small):
    def decode(self, ids):
        return super().decode(ids).strip()


@refused(check_tokenizer, "Special tokens are left out")
class SpecialLeftOut(Small):
    def decode(self, ids):
        return super().decode([i for i in ids if i in self.tokens])


@refused(check_tokenizer, "an answer of Llama 3 may end with any of three tokens")
class OneStop(Small):
    @property
    def stop_ids(self):
        return {self.special["<|eot_id|>"]}


def finished(twin):
    stand_in = Llama3Tokenizer(DATA / "gpt2.tiktoken")
    return twin(stand_in.model._mergeable_ranks, stand_in.special)


refused(check_tokenizer, "it is not Llama 3's")(whole(GPT2Tokenizer(), "finished_gpt2"))
for twin, hint in (
    (NamesBecomeTokens, "Text that a user typed becomes special tokens"),
    (BeginsTwice, "There are two begin-of-text tokens"),
    (NeverBegins, "Begin-of-text is missing"),
    (Thousands, "Digits are grouped from the right"),
    (type("NoCut", (Small,), {"pattern": GPT2_PATTERN}), "'1234567890'"),
    (HalvesVanish, "errors='ignore' does not"),
    (OneStop, "an answer of Llama 3 may end with any of three tokens"),
):
    refused(check_tokenizer, hint)(whole(finished(twin), f"finished_{twin.__name__}"))


# --- chat formats, as classes of a tokenizer ----------


@accepted(check_chat_format)
class Chat:
    """As a reader writes it; the wrong twins change one method."""

    gap, last = "\n\n", "assistant"

    def __init__(self, tokenizer):
        self.tokenizer, self.special = tokenizer, tokenizer.special

    def begin(self):
        return [self.special["<|begin_of_text|>"]]

    def header(self, role):
        start, end = self.special["<|start_header_id|>"], self.special["<|end_header_id|>"]
        return [start, *self.tokenizer.encode(role), end, *self.tokenizer.encode(self.gap)]

    def text(self, text):
        return self.tokenizer.encode(text.strip())

    def end(self, message):
        return [self.special["<|eot_id|>"]]

    def turn(self, message):
        return self.header(message["role"]) + self.text(message["content"]) + self.end(message)

    def encode_dialog(self, messages):
        ids = self.begin()
        for message in messages:
            ids += self.turn(message)
        return ids + self.header(self.last)


@accepted(check_chat_format)
class TextBehindTheHeader(Chat):
    """Line breaks and text in one go: the pattern parts them in the same place."""

    def turn(self, message):
        *header, _ = super().header(message["role"])
        text = self.tokenizer.encode(f"\n\n{message['content'].strip()}")
        return [*header, *text, self.special["<|eot_id|>"]]


@accepted(check_chat_format)
class FrameAsText(Chat):
    """The template's own text with its special tokens allowed, the contents without."""

    def frame(self, text):
        return self.tokenizer.encode(text, allowed_special="all")

    def encode_dialog(self, messages):
        ids = self.frame("<|begin_of_text|>")
        for m in messages:
            ids += self.frame(f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n")
            ids += self.tokenizer.encode(m["content"].strip()) + self.frame("<|eot_id|>")
        return ids + self.frame("<|start_header_id|>assistant<|end_header_id|>\n\n")


@accepted(check_chat_format)
def without_a_default(tokenizer):
    return ChatFormat(tokenizer, default_system=None)


accepted(check_chat_format)(
    whole(ChatFormat(Llama3Tokenizer(DATA / "gpt2.tiktoken")), "finished_chat")
)


def rendered(messages, begin="<|begin_of_text|>"):
    turns = [
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>"
        for m in messages
    ]
    return begin + "".join(turns) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


@refused(check_chat_format, "Text that a user typed becomes special tokens")
class OneString(Chat):
    def encode_dialog(self, messages):
        return self.tokenizer.encode(rendered(messages), allowed_special="all")


@refused(check_chat_format, "The template's own special tokens are written as text")
class NothingAllowed(Chat):
    def encode_dialog(self, messages):
        return self.tokenizer.encode(rendered(messages))


@refused(check_chat_format, "There are two begin-of-text tokens")
class TemplateAndTokenizerBegin(Chat):
    def encode_dialog(self, messages):
        return self.tokenizer.encode(rendered(messages), bos=True, allowed_special="all")


@refused(check_chat_format, "There are two begin-of-text tokens")
class BeginTwice(Chat):
    def begin(self):
        return super().begin() * 2


@refused(check_chat_format, "Begin-of-text is missing")
class NoBegin(Chat):
    def begin(self):
        return []


@refused(check_chat_format, "Begin-of-text stands before every turn")
class BeginEveryTurn(Chat):
    def encode_dialog(self, messages):
        ids = [i for m in messages for i in self.begin() + self.turn(m)]
        return ids + self.header(self.last)


@refused(check_chat_format, "The roles are exchanged")
class RolesExchanged(Chat):
    def turn(self, message):
        other = {"user": "assistant", "assistant": "user", "system": "system"}
        return super().turn({**message, "role": other[message["role"]]})


@refused(check_chat_format, "One line break follows a header")
class OneBreak(Chat):
    gap = "\n"


@refused(check_chat_format, "No line breaks follow a header")
class NoBreak(Chat):
    gap = ""


@refused(check_chat_format, "<|end_header_id|> is missing")
class HeaderLeftOpen(Chat):
    def header(self, role):
        return [i for i in super().header(role) if i != self.special["<|end_header_id|>"]]


@refused(check_chat_format, "<|eot_id|> is missing")
class NoEnd(Chat):
    def end(self, message):
        return []


@refused(check_chat_format, "<|eot_id|> is missing")
class LastQuestionLeftOpen(Chat):
    def encode_dialog(self, messages):
        ids = self.begin() + [i for m in messages for i in self.turn(m)]
        return ids[:-1] + self.header(self.last)


@refused(check_chat_format, "A turn ends with <|end_of_text|>")
class EndOfText(Chat):
    def end(self, message):
        return [self.special["<|end_of_text|>"]]


@refused(check_chat_format, "The header of the answer is missing")
class NoHeaderForTheAnswer(Chat):
    def encode_dialog(self, messages):
        return self.begin() + [i for m in messages for i in self.turn(m)]


@refused(check_chat_format, "The answer's turn is closed already")
class AnswerClosed(Chat):
    def encode_dialog(self, messages):
        return super().encode_dialog(messages) + self.end(messages[-1])


@refused(check_chat_format, "The last header is the user's")
class UserAnswers(Chat):
    last = "user"


@refused(check_chat_format, "Whitespace around a text is kept")
class NotStripped(Chat):
    def text(self, text):
        return self.tokenizer.encode(text)


@refused(check_chat_format, "The system turn is missing")
class NoSystem(Chat):
    def encode_dialog(self, messages):
        return super().encode_dialog([m for m in messages if m["role"] != "system"])


@refused(check_chat_format, "The system text stands in the first question")
class SystemInTheQuestion(Chat):
    def encode_dialog(self, messages):
        if messages[0]["role"] == "system":
            system, first, *rest = messages
            text = f"{system['content']}\n\n{first['content'].strip()}"
            messages = [{"role": "user", "content": text}, *rest]
        return super().encode_dialog(messages)


@refused(check_chat_format, "Begin-of-text stands inside the turns")
class BeginInTheContents(Chat):
    def encode_dialog(self, messages):
        ids = [self.special["<|begin_of_text|>"]]
        for message in messages:
            ids += self.header(message["role"])
            ids += self.tokenizer.encode(message["content"].strip(), bos=True)
            ids.append(self.special["<|eot_id|>"])
        return ids + self.header("assistant")


@refused(check_chat_format, "Only the last message is there")
class Forgetful(Chat):
    def encode_dialog(self, messages):
        return super().encode_dialog(messages[-1:])


@refused(check_chat_format, "expected a list of ids")
class OnlyText(Chat):
    def encode_dialog(self, messages):
        return rendered(messages)


@refused(check_chat_format, "needs a method encode_dialog")
class OtherName:
    def __init__(self, tokenizer):
        pass


@refused(check_chat_format, "Begin-of-text is missing")
class WithADefault(NoBegin):
    default_system = "You are a helpful assistant."

    def encode_dialog(self, messages):
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        return super().encode_dialog(messages)
