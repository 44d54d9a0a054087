"""The hub, played by a small server on this machine that speaks its routes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import logits_of, reference, token_ids

from helpers.checkpoints import load_model
from helpers.notebooks import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub with one open repository, tiny/llama, and a gated one; yields (address, requests, model)."""
    folder = tmp_path_factory.mktemp("hub")
    theirs = reference("llama3_2")
    theirs.save_pretrained(folder, max_shard_size="300KB")
    (folder / "README.md").write_text("not needed")
    requests = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = self.path.split("?")[0].strip("/")
            requests.append((self.command, path))
            if "gated/model" in path:
                return self.send(401, b"", body, {"X-Error-Code": "GatedRepo"})
            if path.startswith("api/models/tiny/llama"):
                files = [{"rfilename": p.name} for p in folder.iterdir()]
                info = {"id": "tiny/llama", "sha": COMMIT, "siblings": files, "tags": []}
                tree = [
                    {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                    for p in folder.iterdir()
                ]
                return self.send(200, json.dumps(tree if "/tree/" in path else info).encode(), body)
            file = folder / path.rpartition("/")[2]
            if path.startswith("tiny/llama/resolve/") and file.is_file():
                data = file.read_bytes()
                etag = hashlib.sha256(data).hexdigest()
                return self.send(200, data, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            return self.send(
                404,
                b"",
                body,
                {"X-Error-Code": "RepoNotFound" if "tiny" not in path else "EntryNotFound"},
            )

        def send(self, status, data, body, headers=()):
            self.send_response(status)
            for name, value in dict(headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests, theirs
    server.shutdown()


def load_in_a_process(source, hub, home, **env):
    """Load in a new process (the hub's address is read at import) and save the logits."""
    code = """
import sys, torch
from helpers.checkpoints import load_model
try:
    loaded = load_model(sys.argv[1])
except (OSError, ValueError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(loaded.name, "|", loaded.origin)
torch.save(loaded.model(torch.load(sys.argv[2])), sys.argv[2])
"""
    torch.save(token_ids("llama3_2"), home / "io.pt")
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1",
           "HF_HUB_DISABLE_TELEMETRY": "1", **env}  # fmt: skip
    command = [sys.executable, "-c", code, source, str(home / "io.pt")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    return run, torch.load(home / "io.pt")


def test_a_repository_of_a_mirror_is_fetched_once_and_then_offline(hub, tmp_path):
    address, requests, theirs = hub
    run, logits = load_in_a_process("tiny/llama", address, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "tiny/llama | hub, tiny/llama\n"
    wanted = logits_of(theirs, token_ids("llama3_2"))
    assert (logits - wanted).abs().max() < 1e-4
    fetched = [path for command, path in requests if command == "GET" and "/resolve/" in path]
    assert not any("README" in path for path in fetched) and len(fetched) == len(set(fetched))
    seen = len(requests)
    run, logits = load_in_a_process("tiny/llama", address, tmp_path, HF_HUB_OFFLINE="1")
    assert run.returncode == 0 and (logits - wanted).abs().max() < 1e-4 and len(requests) == seen


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gated/model", "PermissionError: gated/model is gated: accept its licence"),
        ("nobody/nothing", "FileNotFoundError: the hub has no repository nobody/nothing"),
        ("a--b/..", "ValueError: 'a--b/..' is no name of a hub repository"),
    ],
)
def test_a_fault_of_the_hub_is_one_sentence(source, message, hub, tmp_path):
    run, _ = load_in_a_process(source, hub[0], tmp_path)
    assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr


def test_a_hub_that_is_not_there_is_noticed_in_seconds(hub, tmp_path):
    run, _ = load_in_a_process("tiny/llama", "http://127.0.0.1:9", tmp_path)
    assert (
        "ConnectionError: tiny/llama is not on this machine and no hub can be reached" in run.stderr
    )
    with pytest.raises(ConnectionError):
        load_model("tiny/llama")  # this process is offline
