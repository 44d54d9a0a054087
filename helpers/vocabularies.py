"""One family's tokenizer without its model, from wherever it can be had.

Meta's vocabularies are not stored with the course: they come from the hub or from public packages.
"""

import base64
import hashlib
import os
import re
import struct
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from helpers.hub import hub_file
from helpers.packages import cache_folder, fetch_npm, package_file, sha256_of
from helpers.tokenizers import DATA, GPT2Tokenizer, Llama2Tokenizer, Llama3Tokenizer

LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
# of what llama2_model writes
LLAMA2_SHA256 = "95137665adc7e8a40801cb672c089eaa477bf4a657273a93151ec5d24015f79a"


class Vocabulary(NamedTuple):
    """Where one of Meta's two vocabularies can be had: hub, package, or a stand-in for it."""

    kind: type
    hub: tuple  # (repository, file)
    package: str
    make: Any  # the package's bytes of tokenizer.model
    sha256: str
    stand_in: str  # a stored file
    in_words: str


def load_tokenizer(name):
    """One family's tokenizer, and in words where it came from.

    name     gpt2, llama2 or llama3. Meta's two vocabularies are not stored with the course. They
             come from the hub, if your token may read them there, else from a public package. With
             neither, a stored stand-in of the same kind takes their place, and the origin begins
             with the word "stand-in"
    Returns  (tokenizer, origin); a file of your own: Llama2Tokenizer(path), Llama3Tokenizer(path)
    """
    if name == "gpt2":
        return GPT2Tokenizer(), "OpenAI's vocabulary, stored with the course"
    if name not in VOCABULARIES:
        raise ValueError(f"{name!r} is no tokenizer known here: gpt2, {', '.join(VOCABULARIES)}")
    source = VOCABULARIES[name]
    try:
        return source.kind(hub_file(*source.hub)), f"hub, {source.hub[0]}"
    except (OSError, ValueError):
        pass  # the package needs no token
    path = cache_folder() / f"{name}-tokenizer.model"
    try:
        if not path.is_file() or sha256_of(path) != source.sha256:
            write_checked(path, source.make(), source.sha256)
        return source.kind(path), f"package {source.package}"
    except (OSError, ValueError) as error:
        why = str(error).partition(". ")[0]
        return source.kind(DATA / source.stand_in), f"stand-in, {source.in_words}, since {why}"


def write_checked(path, data, sha256):
    """Write a file whole or not at all, and only if it is the expected one."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"what was fetched for {path.name} is not the expected file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def llama3_package():
    """Meta's own tokenizer.model, out of Meta's PyPI package."""
    member = "llama_models/llama3/tokenizer.model"
    with package_file(
        "llama-models", "0.3.0", member, LLAMA3_SHA256, download_bytes=6_600_000
    ) as path:
        return path.read_bytes()


def llama2_package():
    """Llama 2's vocabulary out of an npm package, written as the SentencePiece model it was."""
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        archive = fetch_npm("llama-tokenizer-js", "1.2.2", Path(scratch), download_bytes=450_000)
        try:
            with tarfile.open(archive) as packed:  # extractfile gives None for a folder
                code = packed.extractfile("package/llama-tokenizer.js").read().decode()
        except (tarfile.TarError, KeyError, AttributeError, EOFError, zlib.error) as error:
            raise ValueError(f"the package llama-tokenizer-js is damaged: {error}") from error
    found = re.search(r"llama_vocab_base64\s*=\s*[`\"']([A-Za-z0-9+/=\s]+)[`\"']", code)
    if found is None:
        raise ValueError("the package llama-tokenizer-js holds no vocabulary")
    return llama2_model(base64.b64decode(found[1]).decode().split("\n"))


def llama2_model(pieces):
    """A SentencePiece BPE model of these pieces, which stand in the order of their merges.

    SentencePiece merges the pair with the highest score first, so a piece's score is minus its
    place. The file is protobuf: numbered fields, each with its type. What is left out here has the
    value that SentencePiece takes anyway: ids 0, 1 and 2 for <unk>, <s> and </s>, a space in front.

    Source   sentencepiece_model.proto in google/sentencepiece
    """
    unknown, control, byte, normal = 2, 3, 6, 1
    entries = []
    for i, piece in enumerate(pieces):
        score, kind = -float(i - 259), normal
        if i < 259:  # <unk>, <s>, </s>, then the 256 bytes
            score, kind = 0.0, unknown if i == 0 else control if i < 3 else byte
        elif len(piece) > 1 and set(piece) == {"\u2581"}:
            score = -1e9  # runs of spaces merge last
        entries.append(_field(1, piece.encode()) + _field(2, score) + _field(3, kind))
    bpe_with_bytes = _field(3, 2) + _field(35, 1)
    keep_every_space = _field(1, b"identity") + _field(4, 0)
    model = b"".join(_field(1, entry) for entry in entries)
    return model + _field(2, bpe_with_bytes) + _field(3, keep_every_space)


def _field(number, value):
    """One protobuf field: a whole number, a float, or bytes with their length in front."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value):
    """A whole number in groups of 7 bits, the lowest first; the high bit says that more follow."""
    groups = b""
    while value > 127:
        groups += bytes([value & 127 | 128])
        value >>= 7
    return groups + bytes([value])


VOCABULARIES = {
    "llama2": Vocabulary(
        Llama2Tokenizer,
        ("meta-llama/Llama-2-7b-hf", "tokenizer.model"),
        "llama-tokenizer-js 1.2.2 (npm)",
        llama2_package,
        LLAMA2_SHA256,
        "sentencepiece_32k.model",
        "a SentencePiece model of the same size with other pieces",
    ),
    "llama3": Vocabulary(
        Llama3Tokenizer,
        ("meta-llama/Llama-3.2-1B", "original/tokenizer.model"),
        "llama-models 0.3.0 (PyPI, Meta's)",
        llama3_package,
        LLAMA3_SHA256,
        "gpt2.tiktoken",
        "GPT-2's merges behind Llama 3's pattern and special tokens",
    ),
}
