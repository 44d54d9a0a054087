"""Tokenizers and chat formats: GPT-2, Llama 2, Llama 3, SmolLM2.

All have `encode(text, bos=False, eos=False)`, `decode(ids)`, `special` (name -> id), `bos_id`,
`stop_ids`, `n_vocab` and `files`. Text never becomes a special token unless the caller names that
token in `allowed_special`; chat formats add theirs by id.
"""

import base64
import binascii
import re
from pathlib import Path

import tiktoken

from helpers.readers import require_small

DATA = Path(__file__).parent / "data"
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = {  # Meta's names in the first 256 ids after the vocabulary
    0: "begin_of_text",
    1: "end_of_text",
    2: "reserved_special_token_0",
    3: "reserved_special_token_1",
    4: "finetune_right_pad_id",
    5: "step_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
    11: "image",
}


class BPETokenizer:
    """Byte-level BPE by tiktoken: text is cut by a pattern, then bytes are merged by rank.

    Source   Sennrich et al. 2015, arXiv:1508.07909, on bytes as in GPT-2
    """

    bos_id = None

    def __init__(self, name, ranks, pattern, special, files=()):
        self.special, self.files = special, tuple(files)
        self.model = tiktoken.Encoding(
            name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        self.n_vocab = self.model.n_vocab

    def encode(self, text, bos=False, eos=False, *, allowed_special=()):
        """Text -> list of ids. `allowed_special` is "all" or a collection of names."""
        allowed = allowed_names(self.special, allowed_special)
        ids = self.model.encode(text, allowed_special=allowed, disallowed_special=())
        if bos and self.bos_id is None:
            raise ValueError("this tokenizer has no begin-of-text token")
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def decode(self, ids):
        """Ids -> text, special tokens by name; bytes that are no whole character become U+FFFD."""
        return self.model.decode(list(map(int, ids)))


def allowed_names(special, allowed_special):
    """The special tokens that a caller allows in text: all, or those named.

    Names of other tokenizers are ignored: the book's code allows "<|endoftext|>" everywhere.
    """
    return set(special) if allowed_special == "all" else set(special) & set(allowed_special or ())


class GPT2Tokenizer(BPETokenizer):
    """GPT-2's 50,257 tokens, stored with the course (tiktoken would fetch them)."""

    def __init__(self):
        path = DATA / "gpt2.tiktoken"
        special = {"<|endoftext|>": 50_256}
        super().__init__("gpt2", read_ranks(path), GPT2_PATTERN, special, [path])
        self.eos_id, self.stop_ids = 50_256, {50_256}


class Llama3Tokenizer(BPETokenizer):
    """Llama 3's tokenizer.model: 128,000 tokens and 256 special ones, under Meta's names.

    Errors   FileNotFoundError; ValueError for a file that is no complete list of ranks
    Source   Meta's llama-models, tokenizer.py
    """

    def __init__(self, model_path):
        path = Path(model_path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{model_path}: no such file; Llama 3's tokenizer is called tokenizer.model"
            )
        ranks = read_ranks(path)
        names = dict(LLAMA3_NAMES)
        names |= {
            i: f"reserved_special_token_{i - len(LLAMA3_NAMES) + 2}" for i in range(len(names), 256)
        }
        special = {f"<|{name}|>": len(ranks) + i for i, name in names.items()}
        super().__init__(path.name, ranks, LLAMA3_PATTERN, special, [path])
        self.bos_id, self.eos_id = special["<|begin_of_text|>"], special["<|end_of_text|>"]
        self.stop_ids = {self.eos_id, special["<|eom_id|>"], special["<|eot_id|>"]}


def read_ranks(path):
    """A tiktoken file, one base64 token and its rank a line -> {bytes: rank}.

    Ranks must be 0, 1, 2, ... Not read through tiktoken, which remembers a file by its path and
    would return another file's ranks.
    """
    require_small(path)
    ranks = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                token, rank = base64.b64decode(token, validate=True), int(rank)
            except (ValueError, binascii.Error) as error:
                raise ValueError(
                    f"{path}, line {number} is not a base64 token and its rank: {line[:60]!r}"
                ) from error
            if rank != len(ranks) or token in ranks:
                raise ValueError(
                    f"{path}, line {number}: rank {rank} or its token is out of order or repeated; "
                    f"expected rank {len(ranks)}"
                )
            ranks[token] = rank
    if len(ranks) < 256:
        raise ValueError(
            f"{path} holds {len(ranks)} tokens; byte-level BPE needs at least the 256 bytes"
        )
    return ranks


class Llama2Tokenizer:
    """Llama 1 and 2: SentencePiece BPE with 32,000 pieces and bytes for what they do not cover.

    Errors   FileNotFoundError; ValueError for a file that is no SentencePiece model
    Source   Kudo and Richardson 2018, arXiv:1808.06226
    """

    def __init__(self, model_path):
        from sentencepiece import SentencePieceProcessor

        path = Path(model_path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{model_path}: no such file; Llama 2's tokenizer is called tokenizer.model"
            )
        require_small(path)
        try:
            self.model = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is no SentencePiece model") from error
        self.files, self.n_vocab = (path,), self.model.vocab_size()
        self.bos_id, self.eos_id = self.model.bos_id(), self.model.eos_id()
        self.special = {"<unk>": self.model.unk_id(), "<s>": self.bos_id, "</s>": self.eos_id}
        self.stop_ids = {self.eos_id}

    def encode(self, text, bos=False, eos=False, *, allowed_special=()):
        """Text -> list of ids; text holds no special tokens here, allowed or not."""
        return [self.bos_id] * bos + self.model.encode(text) + [self.eos_id] * eos

    def decode(self, ids):
        """Ids -> text; special tokens are left out."""
        return self.model.decode(list(map(int, ids)))


class JSONTokenizer:
    """Any tokenizer.json of Hugging Face, by its tokenizers library.

    It has a begin-of-text token if the file says that encoding begins with one.

    Errors   FileNotFoundError; ValueError for a file that is no tokenizer.json
    """

    ENDS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "</s>")

    def __init__(self, path):
        from tokenizers import Tokenizer

        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        require_small(path)
        try:
            self.model = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is no tokenizer.json: {error}") from error
        vocabulary = self.model.get_vocab(with_added_tokens=True)
        if len(set(vocabulary.values())) < len(vocabulary):
            raise ValueError(f"{path} gives one id to two tokens")
        self.model.encode_special_tokens = True  # the library's words for: a special name is text
        self.model.no_truncation()
        self.model.no_padding()
        self.n_vocab = self.model.get_vocab_size()
        added = self.model.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        beside = [path.with_name(name) for name in ("tokenizer_config.json", "chat_template.jinja")]
        self.files = (path, *(file for file in beside if file.is_file()))
        ends = [self.special[name] for name in self.ENDS if name in self.special]
        self.stop_ids, self.eos_id = set(ends), ends[0] if ends else None
        self.bos_id = next(iter(self.model.encode("", add_special_tokens=True).ids), None)

    def encode(self, text, bos=False, eos=False, *, allowed_special=()):
        """Text -> list of ids. `allowed_special` is "all" or a collection of names."""
        if bos and self.bos_id is None:
            raise ValueError("this tokenizer has no begin-of-text token")
        allowed = allowed_names(self.special, allowed_special)
        cut = "(" + "|".join(map(re.escape, allowed)) + ")"
        ids = [self.bos_id] * bos
        for piece in re.split(cut, text) if allowed else [text]:
            if piece in allowed:
                ids.append(self.special[piece])
            else:
                ids += self.model.encode(piece, add_special_tokens=False).ids
        if eos and self.eos_id is None:
            raise ValueError("this tokenizer has no end token that is known here")
        return ids + [self.eos_id] * eos

    def decode(self, ids):
        """Ids -> text, special tokens by their names."""
        return self.model.decode(list(map(int, ids)), skip_special_tokens=False)


class SmolLM2Tokenizer(JSONTokenizer):
    """SmolLM2's 49,152 tokens, from its tokenizer.json or from the copy stored with the course."""

    def __init__(self, path=DATA / "smollm2" / "tokenizer.json"):
        super().__init__(path)


class StreamDecoder:
    """Text from ids as they come, never half a character.

    `add(id)` returns what is new, `end()` the rest. `context` holds ids that came before, so that a
    first piece keeps the space that it begins with.
    """

    def __init__(self, tokenizer, context=()):
        self.tokenizer = tokenizer
        self.ids = list(context)[
            -8:
        ]  # the ids that the next decoding starts with; a character has at most 4 bytes
        self.shown = tokenizer.decode(self.ids)

    def add(self, token_id):
        self.ids.append(int(token_id))
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd"):  # perhaps the first bytes of a character
            return ""
        new = text[len(self.shown) :]
        self.ids = self.ids[-8:]
        self.shown = self.tokenizer.decode(self.ids)
        return new

    def end(self):
        return self.tokenizer.decode(self.ids)[len(self.shown) :]


class _Chat:
    """What chat formats share: making the prompt of one question or of several rounds.

    `encode(user, system)` is for one question, `encode_dialog(messages)` for several rounds.
    """

    default_system = None
    needs = ()  # special tokens without which it cannot be written

    def encode(self, user_message, system_message=None, allowed_special=None):
        """The prompt of one question: ids that end where the assistant's answer begins.

        `allowed_special` is accepted, as in the book, and not used: text never becomes a special
        token.
        """
        system = [] if system_message is None else [{"role": "system", "content": system_message}]
        return self.encode_dialog([*system, {"role": "user", "content": user_message}])

    def encode_dialog(self, messages):
        """The prompt of a conversation, a list of messages.

        messages   each {"role": "system" | "user" | "assistant", "content": text}
        Errors     ValueError unless system comes first (if at all), then user and assistant in
                   turn, user last
        """
        messages = list(messages)
        roles = [message.get("role") for message in messages]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if (
            not turns
            or len(turns) % 2 == 0
            or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns))
        ):
            raise ValueError(
                f"roles {roles} must be an optional system, then user and assistant in turn, "
                "user last"
            )
        if roles[0] != "system" and self.default_system is not None:
            messages.insert(0, {"role": "system", "content": self.default_system})
        return self._encode(messages)

    def decode(self, ids):
        return self.tok.decode(ids)


class ChatFormat(_Chat):
    """Llama 3's chat: each turn behind its role's header, closed by <|eot_id|>; one begin-of-text.

    default_system   system text where a conversation brings none; None leaves the turn out
    today            such as "26 Jul 2024": begins the system turn with the two date lines of 3.1
                     and 3.2
    Source           Meta's llama-models, chat_format.py; date lines: the model card of Llama 3.1
    """

    needs = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

    def __init__(self, tokenizer, *, default_system="You are a helpful assistant.", today=None):
        self.tok, self.default_system, self.today = tokenizer, default_system, today

    def _encode(self, messages):
        special = self.tok.special
        if self.today is not None:
            dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.today}\n\n"
            has_system = messages[0]["role"] == "system"
            system = messages[0]["content"].strip() if has_system else ""
            messages = [{"role": "system", "content": dates + system}, *messages[has_system:]]
        ids = [special["<|begin_of_text|>"]]
        for message in messages:
            text = (
                message["content"]
                if message["role"] == "system" and self.today
                else message["content"].strip()
            )
            ids += self._header(message["role"]) + self.tok.encode(text) + [special["<|eot_id|>"]]
        return ids + self._header("assistant")

    def _header(self, role):
        special = self.tok.special
        return [
            special["<|start_header_id|>"],
            *self.tok.encode(role),
            special["<|end_header_id|>"],
            *self.tok.encode("\n\n"),
        ]


def clean_text(text, header_end="assistant<|end_header_id|>\n\n"):
    """What follows the (first) assistant's header in a decoded chat; text without one as it is."""
    _, header, answer = text.partition(header_end)
    return answer.strip() if header else text


class ChatMLFormat(_Chat):
    """SmolLM2's chat: <|im_start|>role, a line break, the text, <|im_end|>, a line break.

    Source   the chat template in SmolLM2-Instruct's tokenizer_config.json
    """

    needs = ("<|im_start|>", "<|im_end|>")
    smollm2_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

    def __init__(self, tokenizer, *, default_system=smollm2_system):
        self.tok, self.default_system = tokenizer, default_system

    def _encode(self, messages):
        start, end = self.tok.special["<|im_start|>"], self.tok.special["<|im_end|>"]
        ids = []
        for message in messages:
            ids += [
                start,
                *self.tok.encode(f"{message['role']}\n{message['content']}"),
                end,
                *self.tok.encode("\n"),
            ]
        return [*ids, start, *self.tok.encode("assistant\n")]


class Llama2ChatFormat(_Chat):
    """Llama 2's chat: [INST] and [/INST] around each question, the system text inside the first.

    Source   Meta's llama, generation.py
    """

    def __init__(self, tokenizer, *, default_system=None):
        self.tok, self.default_system = tokenizer, default_system

    def _encode(self, messages):
        if messages[0]["role"] == "system":
            system, first, *rest = messages
            text = f"<<SYS>>\n{system['content']}\n<</SYS>>\n\n{first['content']}"
            messages = [{"role": "user", "content": text}, *rest]
        ids = []
        for i in range(0, len(messages), 2):
            question = f"[INST] {messages[i]['content'].strip()} [/INST]"
            if i + 1 < len(messages):
                ids += self.tok.encode(
                    f"{question} {messages[i + 1]['content'].strip()} ", bos=True, eos=True
                )
            else:
                ids += self.tok.encode(question, bos=True)
        return ids
