"""A small server on this machine that speaks the hub's routes, and misbehaves when it is told to."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMITS = {True: "0123456789abcdef0123456789abcdef01234567", False: "f" * 40}
WEB_PAGE = b"<!DOCTYPE html><html><body>Welcome to our network. Please log in.</body></html>"
INDEX = "model.safetensors.index.json"


class FakeHub:
    """Every repository of owner `tiny` and `gated` has the files of one folder.

    faults    repository -> what goes wrong with it; empty means nothing does
    tokens    token -> "good", "no licence", "no scope"; any other is refused as unknown
    stalled   set when the server has stopped in the middle of a body
    """

    def __init__(self, folder, port=0):
        self.folder = folder
        self.files = {p.name: p.read_bytes() for p in folder.iterdir()}
        self.big = max(self.files, key=lambda name: len(self.files[name]))
        self.faults, self.tokens, self.requests, self.resumed = {}, {}, [], []
        self.stalled, self.go_on = threading.Event(), threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()

    def fetched(self, repo):
        return [p for method, p in self.requests if method == "GET" and f"{repo}/resolve" in p]

    def answer(self, http, body):
        path = http.path.split("?")[0].strip("/")
        self.requests.append((http.command, path))
        repo = "/".join(path.removeprefix("api/models/").split("/")[:2])
        fault = self.faults.get(repo)
        if fault == "login page":
            return self.send(http, 200, WEB_PAGE, body, {"Content-Type": "text/html"})
        token = http.headers.get("Authorization", "").removeprefix("Bearer ")
        refused = self.refuse(http, repo, token, body)
        if refused:
            return None
        if fault == "429":
            return self.send(http, 429, b"", body, {"Retry-After": "1"})
        if fault == "503":
            return self.send(http, 503, b"", body)
        if not repo.startswith(("tiny/", "gated/")):
            return self.send(http, 404, b"", body, {"X-Error-Code": "RepoNotFound"})
        if path.startswith("api/models/"):
            return self.send(http, 200, self.information(repo, fault), body)
        name = path.rpartition("/")[2]
        data = self.file(name, fault)
        if data is None:
            return self.send(http, 404, b"", body, {"X-Error-Code": "EntryNotFound"})
        if "Range" in http.headers and fault == "cut once":
            self.resumed.append(repo)
        return self.send_file(http, name, data, fault, body)

    def refuse(self, http, repo, token, body):
        """401 and 403 as the hub gives them; its own words even repeat the token."""
        kind = self.tokens.get(token)
        said = {"X-Error-Message": f"Invalid credentials in Authorization header {token}"}
        if token and kind is None:
            said = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self.send(http, 401, b'{"error": "bad token %s"}' % token.encode(), body, said)
        elif repo.startswith("gated/") and not token:
            self.send(http, 401, b"", body, {"X-Error-Code": "GatedRepo"})
        elif repo.startswith("gated/") and kind == "no licence":
            self.send(http, 403, b"", body, {"X-Error-Code": "GatedRepo", **said})
        elif repo.startswith("gated/") and kind == "no scope":
            said = {"X-Error-Message": f"Please enable access to gated repositories for {token}"}
            self.send(http, 403, b"", body, said)
        else:
            return False
        return True

    @staticmethod
    def commit(fault):
        """A repository with other contents is another commit."""
        return COMMITS[fault not in ("lost shard", "shard outside", "fills any memory")]

    def information(self, repo, fault):
        sizes = {name: len(data) for name, data in self.files.items()}
        if fault == "no config":
            del sizes["config.json"]
        if fault == "only pickles":
            sizes = {"config.json": sizes["config.json"], "pytorch_model.bin": 10}
        if fault == "lists a file too many":
            sizes["tokenizer.json"] = 10
        if fault == "fills any disk":
            sizes[self.big] = 10**16
        files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return json.dumps(
            {"id": repo, "sha": self.commit(fault), "siblings": files, "tags": []}
        ).encode()

    def file(self, name, fault):
        data = self.files.get(name)
        if name == INDEX and fault in ("lost shard", "shard outside"):
            index = json.loads(data)
            shard = "lost.safetensors" if fault == "lost shard" else "../../evil.safetensors"
            index["weight_map"][next(iter(index["weight_map"]))] = shard
            return json.dumps(index).encode()
        if name == "config.json" and fault == "fills any memory":
            return json.dumps({**json.loads(data), "vocab_size": 10**9}).encode()
        return data

    def send_file(self, http, name, data, fault, body):
        etag = hashlib.sha256(data).hexdigest()
        headers = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": self.commit(fault),
            "Accept-Ranges": "bytes",
        }
        begin = int((http.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        status, part = 200, data
        if begin:
            status, part = 206, data[begin:]
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if not body or name != self.big:
            return self.send(http, status, part, body, headers)
        if fault == "flipped byte":
            part = part[:-1] + bytes([part[-1] ^ 1])
        if fault == "web page of the right length":
            part = WEB_PAGE.ljust(len(part))
        if fault == "web page":
            part = WEB_PAGE
        if (fault == "cut once" and not begin) or fault in ("cut at once", "stall"):
            http.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(part))}.items():
                http.send_header(key, value)
            http.end_headers()
            http.wfile.write(part[: 0 if fault == "cut at once" else len(part) // 2])
            http.wfile.flush()
            if fault == "stall":
                self.stalled.set()
                self.go_on.wait(20)
            http.close_connection = True
            return None
        return self.send(http, status, part, body, headers)

    def send(self, http, status, data, body, headers=()):
        http.send_response(status)
        for name, value in dict(headers).items():
            http.send_header(name, value)
        http.send_header("Content-Length", str(len(data)))
        http.end_headers()
        if body:
            http.wfile.write(data)
