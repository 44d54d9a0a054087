"""The hub, played by a small server on this machine: every fault is one sentence, and heals."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from conftest import logits_of, reference, token_ids
from fake_hub import INDEX, FakeHub

from helpers.checkpoints import load_model
from helpers.hub import explain, hash_like
from helpers.notebooks import ROOT

TOKENS = {
    f"hf_{kind.replace(' ', '')}{'x7Kq' * 8}": kind for kind in ("good", "no licence", "no scope")
}
GOOD, NO_LICENCE, NO_SCOPE = TOKENS
REVOKED = "hf_revoked" + "x7Kq" * 8

# A reader's kernel: cells come in as lines of JSON, what the reader would see goes out.
KERNEL = """
import contextlib, io, json, os, resource, signal, sys, time
from IPython.core.interactiveshell import InteractiveShell
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 2**16  # else these small files come in one piece
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
time.sleep = lambda seconds: None  # the library's pauses between tries; its time limits stay
shell = InteractiveShell.instance(colors="nocolor")
for line in sys.stdin:
    cell = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ.update(cell["env"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (cell["largest_file"] or hard, hard))
    with contextlib.redirect_stdout(io.StringIO()) as seen:
        shell.run_cell(cell["code"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(json.dumps(seen.getvalue()), flush=True)
"""
LOAD = """
import torch
from helpers import load_model
loaded = load_model({source!r})
with torch.no_grad():
    logits = loaded.model(torch.load({ids!r}))
print(loaded.name, "|", loaded.origin, "|", (logits - torch.load({wanted!r})).abs().max().item() < 1e-4)
"""


class Kernel:
    """One process with a cache of its own, talking to the fake hub."""

    seen = []  # what all of them have shown

    def __init__(self, hub, home, **env):
        env = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1",
               "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "5", "HF_DEBUG": "1", **env}  # fmt: skip
        env.pop("HF_TOKEN", None)
        self.hub, self.home = hub, home
        with open(home / "stderr.txt", "a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, cwd=ROOT, env=env)  # fmt: skip

    def send(self, source, token=None, largest_file=0, code=LOAD):
        ids, wanted = str(self.home / "ids.pt"), str(self.home / "wanted.pt")
        code = code.format(source=source, ids=ids, wanted=wanted)
        cell = {
            "code": code,
            "env": {"HF_TOKEN": token} if token else {},
            "largest_file": largest_file,
        }
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()

    def answer(self):
        if not select.select([self.process.stdout], [], [], 120)[0]:
            self.process.kill()
            raise AssertionError("the kernel did not answer")
        self.seen.append(json.loads(self.process.stdout.readline()))
        return self.seen[-1]

    def load(self, source, **more):
        self.send(source, **more)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

    def damaged(self):
        """Files of the cache that are half-written, lead nowhere or are not what their hash says."""
        found = list((self.home / "hf").rglob("*.incomplete"))
        for path in (self.home / "hf").rglob("snapshots/*/*"):
            if not path.exists() or hash_like(path, path.resolve().name) != path.resolve().name:
                found.append(path)
        return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    theirs = reference("llama3_2")
    theirs.save_pretrained(folder, max_shard_size="300KB")
    (folder / "README.md").write_text("not needed")
    hub = FakeHub(folder)
    hub.model, hub.tokens = theirs, TOKENS
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def home(hub, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    ids = token_ids("llama3_2")
    torch.save(ids, home / "ids.pt")
    torch.save(logits_of(hub.model, ids), home / "wanted.pt")
    yield home
    no_token_was_shown_logged_or_saved(home)  # when all kernels have ended


def no_token_was_shown_logged_or_saved(home):
    written = [p for p in home.rglob("*") if p.is_file() and not p.is_symlink()]
    assert Kernel.seen and home / "stderr.txt" in written
    for token in (*TOKENS, REVOKED):
        assert not any(token in seen for seen in Kernel.seen)
        assert not [path for path in written if token.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def kernel(hub, home):
    kernel = Kernel(hub, home)
    yield kernel
    kernel.end()


def test_a_repository_of_a_mirror_is_fetched_once_and_then_offline(hub, kernel):
    assert kernel.load("tiny/llama") == "tiny/llama | hub, tiny/llama | True\n"
    fetched = hub.fetched("tiny/llama")
    assert not any("README" in path for path in fetched) and len(fetched) == len(set(fetched)) > 3
    assert kernel.load("tiny/llama") == "tiny/llama | hub, tiny/llama | True\n"
    assert hub.fetched("tiny/llama") == fetched  # asked for what is new, and nothing was
    seen = len(hub.requests)
    offline = Kernel(hub, kernel.home, HF_HUB_OFFLINE="1")
    assert offline.load("tiny/llama") == "tiny/llama | hub, tiny/llama | True\n"
    assert "ConnectionError: tiny/other is not on this machine" in offline.load("tiny/other")
    offline.end()
    assert len(hub.requests) == seen


FAULTS = {  # what the server does -> what the reader sees
    "login page": r"ConnectionError: http://127.0.0.1:\d+ answers, but not as a hub does: is it a login page",
    "web page": r"ConnectionError: fetching tiny/web-page broke off: Consistency check failed",
    "web page of the right length": r"ConnectionError: tiny/\S+: instead of model-\S+ came a web page: is it a login page",
    "flipped byte": r"ConnectionError: tiny/flipped-byte: model-\S+ arrived damaged \(hash [0-9a-f]{12}\.\.\., expected",
    "cut at once": r"ConnectionError: fetching tiny/cut-at-once broke off: .*Run it again: finished files are kept",
    "stall": r"ConnectionError: the hub is too slow: nothing came for 2 s while tiny/stall was fetched",
    "429": r"ConnectionError: the hub has had too many requests from here \(429\) while tiny/429",
    "503": r"ConnectionError: the hub failed \(503\) while tiny/503 was fetched",
    "no config": r"FileNotFoundError: tiny/no-config has no config.json: it is no model",
    "only pickles": r"FileNotFoundError: tiny/only-pickles: model.safetensors is not in the repository; only safetensors",
    "lists a file too many": r"FileNotFoundError: tiny/\S+ lists a file that the hub does not have: tokenizer.json",
    "lost shard": r"FileNotFoundError: tiny/lost-shard: model.safetensors.index.json names lost.safetensors, which is not in",
    "shard outside": r"ValueError: .*model.safetensors.index.json names '../../evil.safetensors', which is not a file of its own",
    "fills any disk": r"ValueError: tiny/fills-any-disk needs 10000000\.\d+ GB on the disk of .*are free; set HF_HOME",
    "fills any memory": r"ValueError: tiny/fills-any-memory needs \d+\.\d GB of memory in float32, and \d+\.\d GB are free on cpu",
}  # fmt: skip


def is_one_sentence(seen):
    return "Traceback" not in seen and "site-packages" not in seen and seen.count("\n") <= 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence_and_the_next_try_succeeds(fault, hub, kernel):
    repo = f"tiny/{fault.replace(' ', '-')}"
    hub.faults = {repo: fault}
    seen = kernel.load(repo)
    assert re.search(FAULTS[fault], seen), seen
    assert is_one_sentence(seen), seen
    assert not kernel.damaged()
    if fault in ("lost shard", "shard outside", "fills any disk", "fills any memory"):
        assert not any("model-" in path for path in hub.fetched(repo))  # known before the download
    hub.faults = {}
    hub.go_on.set()
    assert kernel.load(repo) == f"{repo} | hub, {repo} | True\n"
    hub.go_on.clear()


def test_a_body_that_is_cut_is_resumed(hub, kernel):
    hub.faults = {"tiny/cut-once": "cut once"}
    seen = kernel.load("tiny/cut-once")
    assert not kernel.damaged()
    if tuple(map(int, huggingface_hub.__version__.split(".")[:2])) < (1, 27):
        assert "broke off" in seen  # the library gave up at once then
        hub.faults = {}
        assert kernel.load("tiny/cut-once").endswith("True\n")
        return
    assert seen == "tiny/cut-once | hub, tiny/cut-once | True\n"
    assert len([p for p in hub.fetched("tiny/cut-once") if hub.big in p]) == 2
    assert hub.resumed == ["tiny/cut-once"]  # from where it broke off, not from the start


@pytest.mark.parametrize(
    ("source", "token", "message"),
    [
        ("gated/model", None, r"PermissionError: gated/model is gated: accept its licence on its page \(\S+/gated/model\)"),
        ("gated/model", NO_LICENCE, r"PermissionError: the licence of gated/model is not accepted with this token: visit \S+/gated/model"),
        ("gated/model", NO_SCOPE, r"PermissionError: your token may not read gated/model: give it read access .*settings/tokens"),
        ("gated/model", REVOKED, r"PermissionError: the hub does not accept your token: make a new one \(\S+/settings/tokens\)"),
        ("tiny/open", REVOKED, r"PermissionError: the hub does not accept your token: .*open models need none"),
        ("nobody/nothing", None, r"FileNotFoundError: the hub has no repository nobody/nothing, or it is private"),
        ("nobody/nothing", GOOD, r"FileNotFoundError: the hub has no repository nobody/nothing"),
        ("a--b/..", None, r"ValueError: 'a--b/..' is no name of a hub repository: owner/name"),
        ("gated/model", GOOD, r"^gated/model \| hub, gated/model \| True"),
    ],
)  # fmt: skip
def test_a_refusal_says_whose_it_is_and_where_to_go(source, token, message, hub, kernel):
    seen = kernel.load(source, token=token)
    assert re.search(message, seen), seen
    assert is_one_sentence(seen) and not kernel.damaged()


def test_a_full_disk_is_said_and_left_clean(hub, kernel):
    seen = kernel.load(
        "tiny/full", largest_file=200_000
    )  # a real limit: the system refuses to write
    assert "OSError: the disk of" in seen and "is full: what tiny/full had begun" in seen, seen
    assert is_one_sentence(seen) and not kernel.damaged()
    assert kernel.load("tiny/full").endswith("True\n")


def test_an_interrupted_download_stops_at_once_and_is_left_clean(hub, kernel):
    hub.faults = {"tiny/interrupted": "stall"}
    hub.stalled.clear()
    kernel.send("tiny/interrupted")
    assert hub.stalled.wait(20)
    kernel.process.send_signal(signal.SIGINT)
    seen = kernel.answer()
    assert seen == "KeyboardInterrupt: stopped; nothing half-written is left\n", seen
    assert not kernel.damaged()
    hub.faults = {}
    assert kernel.load("tiny/interrupted").endswith("True\n")


def test_what_a_killed_process_left_is_removed_by_the_next(hub, kernel):
    hub.faults = {"tiny/killed": "stall"}
    hub.stalled.clear()
    killed = Kernel(hub, kernel.home)
    killed.send("tiny/killed")
    assert hub.stalled.wait(30)
    killed.process.kill()
    killed.process.wait()
    killed.process.stdin.close()
    killed.process.stdout.close()
    assert len(kernel.damaged()) == 1
    hub.faults = {}
    assert kernel.load("tiny/killed").endswith("True\n")
    assert not kernel.damaged()


@pytest.mark.parametrize("fault", ["login page", "503"])
def test_a_whole_copy_is_used_whatever_the_hub_says(fault, hub, kernel):
    hub.faults = {}
    wanted = "tiny/kept | hub, tiny/kept | True\n"
    assert kernel.load("tiny/kept") == wanted
    hub.faults = {"tiny/kept": fault}
    assert kernel.load("tiny/kept") == wanted
    hub.faults = {}


def test_a_file_that_went_bad_is_named_and_fetched_again(hub, kernel):
    wanted = "tiny/rotten | hub, tiny/rotten | True\n"
    assert kernel.load("tiny/rotten") == wanted
    link = next(kernel.home.glob("hf/hub/models--tiny--rotten/snapshots/*/model-*"))
    data = link.read_bytes()
    link.resolve().write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    seen = kernel.load(
        "tiny/rotten", code="from helpers.inventory import verify\nlist(verify({source!r}))"
    )
    bad = Path(re.search(r"delete (\S+), the file behind the link", seen)[1])
    assert bad == link.resolve()
    bad.unlink()
    assert kernel.load("tiny/rotten") == wanted and not kernel.damaged()


def test_one_file_is_checked_as_all_are(hub, kernel):
    """What it says of a token is searched when this module ends."""
    code = f"from helpers.hub import hub_file\nprint(hub_file({{source!r}}, {hub.big!r}).name)"
    hub.faults = {"tiny/one-file": "flipped byte"}
    assert f"tiny/one-file: {hub.big} arrived damaged" in kernel.load("tiny/one-file", code=code)
    assert not kernel.damaged()
    hub.faults = {}
    assert kernel.load("tiny/one-file", code=code) == hub.big + "\n"
    seen = kernel.load("gated/one-file", token=NO_SCOPE, code=code)
    assert "PermissionError: your token may not read gated/one-file" in seen, seen


@pytest.mark.parametrize("status", [401, 403])
def test_without_a_token_no_token_is_blamed(status, monkeypatch):
    error = OSError("refused")
    error.response = SimpleNamespace(status_code=status, url="x")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    said = str(explain(error, "tiny/llama"))
    assert f"does not give tiny/llama without a token ({status})" in said
    assert "your token" not in said
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: GOOD)
    assert "your token" in str(explain(error, "tiny/llama"))


def test_the_whole_story_is_kept_without_the_token(monkeypatch):
    from helpers.refusals import in_one_sentence, without_token

    @in_one_sentence
    def refuse():
        try:
            raise OSError(f"refused: {GOOD}")
        except OSError as error:
            error.server_message = f"token {GOOD}"
            without_token(error, GOOD)
            raise PermissionError("one sentence") from error

    with pytest.raises(PermissionError) as caught:
        refuse()
    assert caught.value._render_traceback_() == ["PermissionError: one sentence"]
    behind = caught.value.__cause__
    assert str(behind) == "refused: (token)" and behind.server_message == "token (token)"


def test_a_hub_that_is_not_there_is_noticed_in_seconds(hub, home):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nowhere = Kernel(hub, home, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    seen = nowhere.load("tiny/nowhere")
    assert "ConnectionError: tiny/nowhere is not on this machine and no hub can be reached" in seen
    assert is_one_sentence(seen) and "and restart the kernel" in seen
    late = FakeHub(hub.folder, port)  # the network is back
    assert nowhere.load("tiny/nowhere") == "tiny/nowhere | hub, tiny/nowhere | True\n"
    nowhere.end()
    late.close()
    with pytest.raises(ConnectionError):
        load_model("tiny/llama")  # this process is offline


def test_no_file_of_the_repository_holds_a_token():
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("not a git checkout")
    for name in run.stdout.splitlines():
        if (ROOT / name).is_file():
            assert not re.search(rb"\bhf_[A-Za-z0-9]{30,}", (ROOT / name).read_bytes()), name


def test_an_index_is_among_the_files(hub):
    assert INDEX in hub.files and len([f for f in hub.files if f.startswith("model-")]) > 2
