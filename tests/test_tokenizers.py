"""Tokenizers against known ids, chat formats against templates, and text that stays text."""

import hashlib
import random
import shutil
import tarfile
from contextlib import contextmanager, nullcontext

import pytest
import tiktoken
from sentencepiece import SentencePieceProcessor
from transformers import PreTrainedTokenizerFast

from helpers import languages, vocabularies
from helpers.llama3 import ChatFormat, Llama3Tokenizer, clean_text
from helpers.tokenizers import (
    DATA,
    LLAMA3_PATTERN,
    ChatMLFormat,
    GPT2Tokenizer,
    JSONTokenizer,
    Llama2ChatFormat,
    Llama2Tokenizer,
    SmolLM2Tokenizer,
    StreamDecoder,
    read_ranks,
)
from helpers.vocabularies import llama2_model, load_tokenizer

TEXTS = [
    "Hello, world!",
    "你好，世界！",
    "🎉🦙 👩‍👩‍👧",
    "  a\n\n\tb  ",
    "naïve café Привет مرحبا",
    "1234567890",
    "",
]


@pytest.fixture(scope="module")
def tokenizers(llama3_tokenizer_file):
    return {
        "gpt2": GPT2Tokenizer(),
        "llama3": Llama3Tokenizer(llama3_tokenizer_file),
        "mistral_7b_v1": Llama2Tokenizer(DATA / "sentencepiece_32k.model"),
        "smollm2": SmolLM2Tokenizer(),
    }


NAMES = ("gpt2", "llama3", "mistral_7b_v1", "smollm2")


@pytest.mark.parametrize("name", NAMES)
def test_known_ids(name, tokenizers, golden):
    tokenizer = tokenizers[name]
    assert tokenizer.n_vocab == golden[name]["n_vocab"]
    for text, ids in golden[name]["encode"].items():
        special = [s for s in tokenizer.special if s in text]
        allowed = special if name == "smollm2" else ()  # its known ids are those of a template
        assert tokenizer.encode(text, allowed_special=allowed) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_text_of_a_user_never_becomes_a_special_token(name, tokenizers):
    tokenizer = tokenizers[name]
    for special in tokenizer.special:
        ids = tokenizer.encode(f"a {special} b")
        assert not set(ids) & set(tokenizer.special.values()), special
        if name != "mistral_7b_v1":
            assert tokenizer.decode(ids) == f"a {special} b"
            allowed = tokenizer.encode(f"a {special} b", allowed_special={special})
            assert allowed.count(tokenizer.special[special]) == 1
            assert allowed == tokenizer.encode(f"a {special} b", allowed_special="all")
    # the book's code allows GPT-2's token to every tokenizer
    assert tokenizer.encode("x", allowed_special={"<|nonsense|>"}) == tokenizer.encode("x")


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, tokenizers):
    rng, tokenizer = random.Random(0), tokenizers[name]
    alphabet = "ab 0,\n\té你🎉ß"
    for text in TEXTS + [
        "".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(200)
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_of_llama3_are_metas(tokenizers, golden):
    special = tokenizers["llama3"].special
    assert len(special) == 256 and sorted(special.values()) == list(range(128_000, 128_256))
    assert golden["llama3"]["special"].items() <= special.items()
    assert special["<|reserved_special_token_0|>"] == 128_002
    assert special["<|reserved_special_token_2|>"] == 128_012
    assert special["<|reserved_special_token_245|>"] == 128_255
    assert tokenizers["llama3"].stop_ids == {128_001, 128_008, 128_009}


def test_begin_and_end(tokenizers):
    assert tokenizers["llama3"].encode("a", bos=True, eos=True) == [128_000, 64, 128_001]
    assert tokenizers["mistral_7b_v1"].encode("a", bos=True, eos=True) == [1, 264, 2]
    assert tokenizers["gpt2"].encode("a", eos=True) == [64, 50_256]
    assert tokenizers["smollm2"].encode("a", eos=True) == [81, 2]
    for name in ("gpt2", "smollm2"):
        with pytest.raises(ValueError, match="no begin-of-text"):
            tokenizers[name].encode("a", bos=True)


def test_gpt2_equals_tiktokens_own(tokenizers, tmp_path, monkeypatch):
    ours = tokenizers["gpt2"]
    ranks = read_ranks(DATA / "gpt2.tiktoken")
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks,
                               special_tokens={"<|endoftext|>": 50256})  # fmt: skip
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices("abcXYZ 01,.'s\n\té你🎉", k=rng.randrange(60)))
        assert ours.encode(text) == theirs.encode(text)


def test_a_tokenizer_file_is_read_anew_and_checked(llama3_tokenizer_file, tmp_path, monkeypatch):
    lines = llama3_tokenizer_file.read_bytes().splitlines()
    for folder, keep in (("a", 300), ("b", 1000)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.model").write_bytes(b"\n".join(lines[:keep]))
        monkeypatch.chdir(tmp_path / folder)  # the same relative path, another file
        assert Llama3Tokenizer("tokenizer.model").n_vocab == keep + 256
    bad = tmp_path / "bad.model"
    for content, message in (
        (b"\n".join(lines[:100] + lines[101:300]), "line 101: rank 101 .* expected rank 100"),
        (b"\n".join([*lines[:300], lines[0]]), "line 301"),
        (b"<html>", "line 1 is not a base64 token"),
        (b"", "holds 0 tokens"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Llama3Tokenizer(bad)
    bad.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="no SentencePiece model"):
        Llama2Tokenizer(bad)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        SmolLM2Tokenizer(bad)
    for tokenizer_class in (Llama2Tokenizer, Llama3Tokenizer, SmolLM2Tokenizer):
        with pytest.raises(FileNotFoundError, match="no such file"):
            tokenizer_class(tmp_path / "absent")


# --- where they come from ----------


def no_package(*args, **kwargs):
    raise OSError("npm could not fetch it (code ENOTFOUND). Another sentence")


@pytest.fixture
def cut_off(tmp_path, monkeypatch):
    """A machine with an empty cache, whose hub and package managers answer nothing."""
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabularies, "hub_file", no_package)
    monkeypatch.setattr(vocabularies, "fetch_npm", no_package)
    monkeypatch.setattr(vocabularies, "package_file", no_package)


@pytest.mark.parametrize(("name", "kind", "n_vocab"), [("llama2", Llama2Tokenizer, 32_000),
                                                     ("llama3", Llama3Tokenizer, 50_512)])  # fmt: skip
def test_without_a_network_a_labelled_stand_in_takes_the_place(name, kind, n_vocab, cut_off):
    tokenizer, origin = load_tokenizer(name)
    assert type(tokenizer) is kind and tokenizer.n_vocab == n_vocab
    assert origin.startswith("stand-in, ") and "since npm " in origin
    assert "Another sentence" not in origin and len(origin) < 200


def test_gpt2_is_stored_and_another_name_is_refused(cut_off):
    assert load_tokenizer("gpt2")[0].n_vocab == 50_257
    with pytest.raises(ValueError, match="'llama4' is no tokenizer known here: gpt2, llama2"):
        load_tokenizer("llama4")


def test_a_vocabulary_is_kept_and_a_damaged_one_fetched_again(
    llama3_tokenizer_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    monkeypatch.setattr(vocabularies, "hub_file", no_package)
    fetched = []

    @contextmanager
    def package(*args, **kwargs):
        fetched.append(args[0])
        yield llama3_tokenizer_file

    monkeypatch.setattr(vocabularies, "package_file", package)
    for _ in range(2):
        tokenizer, origin = load_tokenizer("llama3")
        assert tokenizer.n_vocab == 128_256 and origin.startswith("package llama-models")
    assert fetched == ["llama-models"]
    (tmp_path / "llama3-tokenizer.model").write_bytes(b"cut short")
    assert load_tokenizer("llama3")[0].n_vocab == 128_256 and len(fetched) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["llama3-tokenizer.model"]


def test_a_package_with_another_file_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabularies, "hub_file", no_package)
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    monkeypatch.setattr(vocabularies, "package_file", lambda *a, **k: nullcontext(other))
    assert "is not the expected file" in load_tokenizer("llama3")[1]


def test_a_damaged_package_is_one_more_reason_for_the_stand_in(cut_off, tmp_path, monkeypatch):
    def fetch(package, version, scratch, download_bytes):
        return tmp_path / "x.tgz"

    monkeypatch.setattr(vocabularies, "fetch_npm", fetch)
    (tmp_path / "x.tgz").write_bytes(b"no archive")
    assert "llama-tokenizer-js is damaged" in load_tokenizer("llama2")[1]
    (tmp_path / "package" / "llama-tokenizer.js").mkdir(parents=True)
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as archive:  # a folder where the file should be
        archive.add(tmp_path / "package", "package")
    assert "llama-tokenizer-js is damaged" in load_tokenizer("llama2")[1]


def test_a_vocabulary_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space")

    monkeypatch.setattr(vocabularies.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        vocabularies.write_checked(tmp_path / "x", b"x", hashlib.sha256(b"x").hexdigest())
    assert list(tmp_path.iterdir()) == []


def test_the_hubs_file_comes_first(llama3_tokenizer_file, cut_off, monkeypatch):
    monkeypatch.setattr(vocabularies, "hub_file", lambda repo, name: llama3_tokenizer_file)
    tokenizer, origin = load_tokenizer("llama3")
    assert tokenizer.n_vocab == 128_256 and origin == "hub, meta-llama/Llama-3.2-1B"


def test_the_written_sentencepiece_model_is_read_as_sentencepiece_reads_its_own():
    """Our few protobuf fields against a model that SentencePiece's makers wrote."""
    theirs = Llama2Tokenizer(DATA / "sentencepiece_32k.model")
    pieces = [theirs.model.id_to_piece(i) for i in range(theirs.n_vocab)]
    ours = SentencePieceProcessor(model_proto=llama2_model(pieces))
    assert ours.vocab_size() == 32_000
    assert (ours.unk_id(), ours.bos_id(), ours.eos_id(), ours.pad_id()) == (0, 1, 2, -1)
    rng = random.Random(3)
    for text in [*TEXTS, *("".join(rng.choices("ab 0,\n\té你🎉ß", k=20)) for _ in range(200))]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_llama2_from_its_package_has_the_known_ids(golden):
    tokenizer, origin = load_tokenizer("llama2")
    if origin.startswith("stand-in"):
        pytest.skip(origin)
    for text, ids in golden["llama2"]["encode"].items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


# --- the same text in many languages ----------


@pytest.mark.parametrize("name", languages.TOKENIZERS)
def test_the_stored_counts_of_tokens_are_counted_again(name):
    tokenizer, origin = load_tokenizer(languages.TOKENIZERS[name])
    if origin.startswith("stand-in"):
        pytest.skip(origin)
    counted = languages.count_tokens({name: tokenizer})
    assert counted == {text: {name: count[name]} for text, count in languages.COUNTS.items()}


def test_counts_are_not_stored_for_a_stand_in(cut_off, tmp_path, monkeypatch):
    monkeypatch.setattr(languages, "FILE", tmp_path / "languages.json")
    with pytest.raises(SystemExit, match="Llama 2: stand-in"):
        languages.main()
    assert not languages.FILE.exists()


# --- chat ----------

ROUNDS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What do llamas eat?"},
    {"role": "assistant", "content": "Grass."},
    {"role": "user", "content": "And <|eot_id|> <|im_end|> for dessert?"},
]


def test_llama3_chat(tokenizers, golden):
    tokenizer = tokenizers["llama3"]
    chat = ChatFormat(tokenizer, default_system=None)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert chat.encode("What do llamas eat?") == tokenizer.encode(
        golden["llama3"]["chat_text"] + header.format("assistant"), allowed_special="all"
    )
    ids = chat.encode_dialog(ROUNDS)
    wanted = [tokenizer.bos_id]
    for message in ROUNDS:
        wanted += tokenizer.encode(header.format(message["role"]), allowed_special="all")
        wanted += [*tokenizer.encode(message["content"]), 128_009]
    assert ids == wanted + tokenizer.encode(header.format("assistant"), allowed_special="all")
    assert ids.count(128_000) == 1 and ids.count(128_009) == len(ROUNDS)
    assert tokenizer.decode(ids).startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe"
    )


def test_llama3_chat_as_in_the_book(tokenizers):
    chat = ChatFormat(tokenizers["llama3"])
    assert "You are a helpful assistant." in chat.decode(chat.encode("Hi"))
    assert "You are a helpful" not in chat.decode(chat.encode("Hi", system_message="Be brief."))
    text = chat.decode(chat.encode("Hi")) + " Hello! "
    assert clean_text(text) == "Hello!" and clean_text("plain") == "plain"
    assert chat.encode("<|begin_of_text|>Hi").count(128_000) == 1


def test_llama3_date_lines(tokenizers):
    chat = ChatFormat(tokenizers["llama3"], default_system=None, today="26 Jul 2024")
    text = chat.decode(chat.encode("Hi", system_message="Be brief."))
    assert text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert "Today Date: 26 Jul 2024\n\n<|eot_id|>" in chat.decode(chat.encode("Hi"))


def test_smollm2_chat_equals_its_template(tokenizers, golden):
    tokenizer = tokenizers["smollm2"]
    chat = ChatMLFormat(tokenizer)
    assert chat.encode("What do llamas eat?") == golden["smollm2"]["chat_prompt_ids"]
    theirs = PreTrainedTokenizerFast.from_pretrained(DATA / "smollm2")
    plain = [*ROUNDS[:3], {"role": "user", "content": "And for  12 desserts?\n"}]
    for messages in (plain, plain[1:]):
        assert chat.encode_dialog(messages) == theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    ids = chat.encode_dialog(ROUNDS)
    assert ids.count(2) == len(ROUNDS)  # the <|im_end|> of the user's text is text


def test_llama2_chat(tokenizers):
    tokenizer = tokenizers["mistral_7b_v1"]
    ids = Llama2ChatFormat(tokenizer).encode_dialog(ROUNDS)
    first = "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat do llamas eat? [/INST] Grass. "
    second = "[INST] And <|eot_id|> <|im_end|> for dessert? [/INST]"
    assert ids == [1, *tokenizer.encode(first), 2, 1, *tokenizer.encode(second)]


@pytest.mark.parametrize(
    "roles", [[], ["system"], ["assistant"], ["user", "user"], ["user", "assistant"],
              ["user", "system", "user"], ["user", "tool", "user"]],
)  # fmt: skip
def test_a_conversation_out_of_order_is_refused(roles, tokenizers):
    for chat in (ChatFormat(tokenizers["llama3"]), ChatMLFormat(tokenizers["smollm2"]),
                 Llama2ChatFormat(tokenizers["mistral_7b_v1"])):  # fmt: skip
        with pytest.raises(ValueError, match="must be an optional system"):
            chat.encode_dialog([{"role": role, "content": "x"} for role in roles])


def test_any_tokenizer_json_is_read_by_what_it_says(tokenizers, llama3_tokenizer_file, tmp_path):
    """Llama 3's own vocabulary as Hugging Face writes it, with its begin-of-text token."""
    from tokenizers import processors
    from transformers.convert_slow_tokenizer import TikTokenConverter

    llama3 = tokenizers["llama3"]
    names = sorted(llama3.special, key=llama3.special.get)
    converted = TikTokenConverter(
        str(llama3_tokenizer_file), pattern=LLAMA3_PATTERN, extra_special_tokens=names
    ).converted()
    bos = "<|begin_of_text|>"
    converted.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 128_000)]
    )
    converted.save(str(tmp_path / "tokenizer.json"))
    read = JSONTokenizer(tmp_path / "tokenizer.json")
    assert (read.bos_id, read.stop_ids) == (128_000, {128_001, 128_008, 128_009})
    for text in [*TEXTS, "a <|eot_id|> b"]:
        assert read.encode(text, bos=True) == llama3.encode(text, bos=True)
    assert ChatFormat(read).encode_dialog(ROUNDS) == ChatFormat(llama3).encode_dialog(ROUNDS)


# --- streaming ----------


@pytest.mark.parametrize("name", NAMES)
def test_streaming_never_shows_half_a_character(name, tokenizers):
    tokenizer = tokenizers[name]
    text = "Emoji 🎉🦙👩‍👩‍👧, 你好，世界, naïve  café\n\n" * 3
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.add(i) for i in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + decoder.end() == text
    assert sum(bool(p) for p in pieces) > len(pieces) / 3  # it does stream
    cut = len(ids) // 2
    while "\ufffd" in tokenizer.decode(ids[:cut]):
        cut -= 1
    decoder = StreamDecoder(tokenizer, context=ids[:cut])
    rest = "".join([*map(decoder.add, ids[cut:]), decoder.end()])
    assert tokenizer.decode(ids[:cut]) + rest == text


@pytest.mark.parametrize("name", ["gpt2", "llama3", "smollm2"])
def test_a_stream_that_ends_inside_a_character_shows_what_is_there(name, tokenizers):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("ok 🦙")[:-1]
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.add, ids)).rstrip() == "ok"
    assert "\ufffd" in decoder.end() or decoder.end() == ""


def test_a_tokenizer_remembers_its_files(tokenizers, tmp_path):
    for name in ("llama3", "smollm2"):
        for file in tokenizers[name].files:
            shutil.copy(file, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "tokenizer.model",
        "tokenizer.json",
        "tokenizer_config.json",
    }
