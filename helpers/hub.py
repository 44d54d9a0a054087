"""The model hub: fetch a repository's files into the hub's cache, each checked, or say why not.

The downloads are huggingface_hub's own, and so are the cache and its settings: HF_TOKEN,
HF_ENDPOINT for a mirror, HF_HUB_OFFLINE, HF_HOME.
"""

import fnmatch
import hashlib
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

from helpers.readers import looks_like_a_web_page, shards_of
from helpers.refusals import DISK_FULL, chain, without_token

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
SMALL_FILES = [
    *TOKENIZER_FILES,
    "tokenizer.model",
    "original/tokenizer.model",
    "generation_config.json",
]
INDEX = "model.safetensors.index.json"
PORTAL = (
    "is it a login page of your network (captive portal), or an HF_ENDPOINT that is no hub? "
    "Open a page in a browser, log in, and run this again"
)
RESTART = "and restart the kernel"  # after changing what huggingface_hub reads when it is imported
_answered = threading.Event()  # the hub has answered this process


def hub_reachable():
    """Does the hub (or the mirror in HF_ENDPOINT) answer?

    Asked until it has answered once, for at most three seconds each time.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False

    def ask():
        try:
            get_session().head(constants.ENDPOINT, timeout=3)  # any status is an answer
        except Exception:  # the library's, its HTTP client's or the system's
            return
        _answered.set()

    if not _answered.is_set():
        # in a thread, since a name look-up knows no time limit of its own
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(3)
    return _answered.is_set()


def may_download(repo):
    """Does the hub let this token read a gated repository?"""
    from huggingface_hub import auth_check
    from huggingface_hub.errors import HTTPError

    try:
        auth_check(repo)
    except (OSError, HTTPError):
        return False
    return True


def cached(repo):
    """The folder of a repository whose config and weights are all in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    def found(file):
        path = try_to_load_from_cache(repo, file)
        return Path(path) if isinstance(path, str) else None

    try:
        weights = shards_of(found(INDEX)) if found(INDEX) else {"model.safetensors"}
    except ValueError:
        return None
    config = found("config.json")
    return config.parent if config and all(found(file) for file in weights) else None


def download(repo, before_weights=lambda folder: None):
    """The folder of a repository in the hub's cache; files that are missing there are fetched.

    before_weights   called with the folder when it holds config.json and not yet the weights
    Errors           OSError or ValueError in one sentence; the cache then holds whole files only
    """
    from huggingface_hub import get_token, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if hub_reachable():
            return _fetch(repo, before_weights)
        hf_hub_download(repo, "config.json", local_files_only=True)
        if folder := cached(repo):
            return folder
        raise LocalEntryNotFoundError(f"only a part of {repo} is on this machine")
    except _Refused as refused:
        if isinstance(refused.error, ConnectionError) and (folder := cached(repo)):
            return folder
        raise refused.error from refused.__cause__
    except Exception as error:  # the library's, httpx's or the system's
        without_token(error, get_token())
        refusal = explain(error, repo)
        if not isinstance(refusal, ValueError) and (folder := cached(repo)):
            return folder  # whole, whatever the hub says today
        raise refusal from error


class _Refused(Exception):
    """Carries an error that is a sentence already."""

    def __init__(self, error):
        self.error = error


def _fetch(repo, before_weights):
    from huggingface_hub import try_to_load_from_cache

    sizes = _list_files(repo)
    with _cache_of(repo) as (home, held):
        if "config.json" not in sizes:
            raise _Refused(FileNotFoundError(f"{repo} has no config.json: it is no model"))
        folder = _fetch_file(repo, "config.json", home, held).parent
        try:
            before_weights(folder)
            index = INDEX in sizes and _fetch_file(repo, INDEX, home, held)
            weights = sorted(shards_of(index)) if index else ["model.safetensors"]
        except ValueError as error:
            raise _Refused(error) from error.__cause__
        if lost := [file for file in weights if file not in sizes]:
            what = f"{INDEX} names {lost[0]}, which" if index else lost[0]
            raise _Refused(
                FileNotFoundError(
                    f"{repo}: {what} is not in the repository; only safetensors are read from a hub"
                )
            )
        wanted = [*(file for file in SMALL_FILES if file in sizes), *weights]
        missing = [f for f in wanted if not isinstance(try_to_load_from_cache(repo, f), str)]
        try:
            need = sum(sizes[file] for file in missing)
            require_disk(home, need, repo, "HF_HOME", RESTART)
        except ValueError as error:
            raise _Refused(error) from None
        for file in wanted:  # one after another, so that an interruption stops at once
            _fetch_file(repo, file, home, held)
        return folder


@contextmanager
def _cache_of(repo):
    """A repository's folder in the cache and the hashes it holds; no leftovers, before or after."""
    from huggingface_hub import constants

    home = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    _remove_leftovers(home)
    try:
        yield home, {path.name for path in home.glob("blobs/*")}
    finally:
        _remove_leftovers(home)


def _list_files(repo):
    """The repository's files that a model may need: name -> bytes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        found = HfApi().model_info(repo, files_metadata=True, timeout=10).siblings
        sizes = {file.rfilename: int(file.size or 0) for file in found}
    except HFValidationError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # no JSON, or another's
        from huggingface_hub import constants

        answer = ConnectionError(f"{constants.ENDPOINT} answers, but not as a hub does: {PORTAL}")
        raise _Refused(answer) from error
    patterns = [*SMALL_FILES, "config.json", INDEX, "*.safetensors"]
    return {
        name: size
        for name, size in sizes.items()
        if any(fnmatch.fnmatch(name, p) for p in patterns) and ".." not in name.split("/")
    }


def _fetch_file(repo, file, home, held):
    """One file's path in the cache. What is new there is compared with the hash in its name."""
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(repo, file))
    name = blob_name(path)
    if name is None or name in held:
        return path
    web_page = looks_like_a_web_page(path)
    digest = hash_like(path, name)
    if digest in (None, name) and not (web_page and path.suffix in (".json", ".safetensors")):
        return path
    path.unlink()
    (home / "blobs" / name).unlink(missing_ok=True)
    if web_page:
        answer = f"{repo}: instead of {file} came a web page: {PORTAL}"
    else:
        answer = (
            f"{repo}: {file} arrived damaged (hash {digest[:12]}..., expected {name[:12]}...) and "
            "was removed. Run it again; if it happens again, the mirror or the network changes it"
        )
    raise _Refused(ConnectionError(answer))


def blob_name(path):
    """The name under which the hub's cache keeps a file's bytes: its hash; None elsewhere."""
    if not path.is_symlink():
        return None
    target = Path(os.readlink(path))
    return target.name if target.parent.name == "blobs" else None


def hash_like(path, name):
    """The file's hash of the kind that `name` is: sha256, git's sha1; None for other names."""
    if len(name) == 64:
        digest = hashlib.sha256()
    elif len(name) == 40:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    else:
        return None
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _remove_leftovers(home):
    """Remove what killed downloads left in a repository's cache, unless one is still at work."""
    from filelock import FileLock, Timeout

    for path in home.glob("blobs/*.incomplete"):
        lock = home.parent / ".locks" / home.name / f"{path.name.split('.')[0]}.lock"
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock, timeout=0):
                path.unlink(missing_ok=True)
        except (Timeout, OSError):
            pass


def require_disk(folder, need, what, setting, then=""):
    """Refuse with ValueError what has more bytes than the disk of `folder` has free.

    setting   the variable that moves the folder; `then` is what must follow its change
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need > free:
        raise ValueError(
            f"{what} needs {need / 1e9:.2f} GB on the disk of {folder}, where {free / 1e9:.2f} GB "
            f"are free; set {setting} to a folder on a larger disk {then}".rstrip()
        )


def explain(error, repo):
    """What a failed fetch means for the reader: an error of Python's own, in a sentence or two."""
    from huggingface_hub import constants, errors, get_token

    behind = chain(error)
    statuses = [getattr(getattr(e, "response", None), "status_code", None) for e in behind]
    status = next((s for s in statuses if s), None)
    no_token = get_token() is None
    page, tokens = f"{constants.ENDPOINT}/{repo}", f"{constants.ENDPOINT}/settings/tokens"
    if isinstance(error, errors.HFValidationError):
        return ValueError(f"{repo!r} is no name of a hub repository: owner/name")
    if isinstance(error, errors.GatedRepoError):
        if no_token or status == 401:
            return PermissionError(
                f"{repo} is gated: accept its licence on its page ({page}), make a token that may "
                f"read it ({tokens}), and set HF_TOKEN (or run: hf auth login; on Colab: a secret "
                "of that name). smollm2-135m-instruct needs neither"
            )
        return PermissionError(
            f"the licence of {repo} is not accepted with this token: visit {page} with the "
            "token's account, accept it, and run this again when access is granted"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        whose = "needs a token (HF_TOKEN)" if no_token else "your token may not see it"
        return FileNotFoundError(f"the hub has no repository {repo}, or it is private and {whose}")
    if isinstance(error, errors.EntryNotFoundError) and status == 404:
        return FileNotFoundError(f"{repo} lists a file that the hub does not have: {_file(behind)}")
    if any(getattr(e, "errno", None) in DISK_FULL for e in behind):
        return OSError(
            f"the disk of {constants.HF_HUB_CACHE} is full: what {repo} had begun to write was "
            f"removed. Make room, or set HF_HOME to a folder on a larger disk {RESTART}"
        )
    if status in (401, 403) and no_token:
        return PermissionError(
            f"{constants.ENDPOINT} does not give {repo} without a token ({status}): make one "
            f"({tokens}) and set HF_TOKEN"
        )
    if status == 401:
        return PermissionError(
            f"the hub does not accept your token: make a new one ({tokens}) for HF_TOKEN, or unset "
            "it, since open models need none"
        )
    if status == 403:
        return PermissionError(
            f"your token may not read {repo}: give it read access to (gated) repositories in its "
            f"settings ({tokens})"
        )
    if status == 429:
        return ConnectionError(
            f"the hub has had too many requests from here (429) while {repo} was fetched: wait "
            "some minutes and run it again; with a token (HF_TOKEN) more are allowed"
        )
    if status is not None and status >= 500:
        return ConnectionError(
            f"the hub failed ({status}) while {repo} was fetched: it is its own fault; try later"
        )
    if any(isinstance(e, errors.FileMetadataError) for e in behind):
        return ConnectionError(f"{constants.ENDPOINT} answers, but not as a hub does: {PORTAL}")
    if any("Timeout" in type(e).__name__ for e in behind):
        return ConnectionError(
            f"the hub is too slow: nothing came for {constants.HF_HUB_DOWNLOAD_TIMEOUT} s while "
            f"{repo} was fetched. Run it again: finished files are kept. For a longer wait set "
            f"HF_HUB_DOWNLOAD_TIMEOUT (seconds) {RESTART}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ConnectionError(
            f"{repo} is not on this machine and no hub can be reached. With a network, run it "
            f"again, or unset HF_HUB_OFFLINE or set HF_ENDPOINT to a mirror {RESTART}; without "
            "one, smollm2-135m-instruct comes from a PyPI package"
        )
    said = str(error).strip().splitlines() or [type(error).__name__]
    return ConnectionError(
        f"fetching {repo} broke off: {said[0]}. Run it again: finished files are kept"
    )


def _file(behind):
    """The file that a failed request asked for."""
    urls = [str(e.response.url) for e in behind if getattr(e, "response", None) is not None]
    return urls[0].rpartition("/")[2] if urls else "unknown"


def hub_file(repo, name):
    """The path of one file of a repository in the hub's cache; fetched and checked if need be.

    Errors   OSError or ValueError in one sentence if it cannot be had
    """
    from huggingface_hub import get_token, hf_hub_download

    try:
        if not hub_reachable():
            return Path(hf_hub_download(repo, name, local_files_only=True))
        with _cache_of(repo) as (home, held):
            return _fetch_file(repo, name, home, held)
    except _Refused as refused:
        raise refused.error from refused.__cause__
    except Exception as error:
        without_token(error, get_token())
        raise explain(error, repo) from error
