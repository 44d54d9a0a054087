"""The setup cell: finds the course, fetches it, installs only what is missing; and `--repo`."""

import json
import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from helpers import notebooks, setup
from helpers.notebooks import FOLDER, ROOT, notebook_files, setup_cell

# A kernel on Colab: its module is there, and pip only writes down what it was asked for.
COLAB = """
import json, subprocess, sys, types
from importlib import util
for name in ("google", "google.colab"):
    sys.modules[name] = types.ModuleType(name)
missing, real = set(sys.argv[2].split(",")) - {""}, util.find_spec
util.find_spec = lambda name, *rest: None if name in missing else real(name, *rest)
run_really = subprocess.run
def run(command, **more):
    if command[0] == "git":
        return run_really(command, **more)
    constraints = open(command[command.index("-c") + 1]).read().split()
    json.dump({"command": command, "constraints": constraints}, open("asked.json", "w"))
    return subprocess.CompletedProcess(command, 0, "", "")
subprocess.run = run
exec(open(sys.argv[1]).read())
import helpers.norms
print(helpers.norms.__file__)
"""


def run_cell(folder, cell, missing="", **env):
    (folder / "cell.py").write_text(cell)
    run = subprocess.run([sys.executable, "-c", COLAB, "cell.py", missing], cwd=folder, capture_output=True,
                         text=True, env={**os.environ, "PYTHONPATH": "", **env})  # fmt: skip
    asked = folder / "asked.json"
    return run, json.loads(asked.read_text()) if asked.exists() else None


@pytest.fixture
def copied(tmp_path):
    """An empty folder, and the course unpacked in it under another name, as a zip file would."""
    shutil.copytree(ROOT / "helpers", tmp_path / "course-main" / "helpers", ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    return tmp_path


def test_the_setup_cell_is_short_and_silent():
    for cell in (setup_cell(""), setup_cell("owner/name")):
        lines = [
            x for x in cell.splitlines() if x.strip() and not x.startswith(("#", "import", "from"))
        ]
        assert len(lines) < 10 and max(map(len, cell.splitlines())) <= 100 and "print" not in cell


def test_without_a_repository_the_cell_says_how_to_upload(tmp_path):
    run, asked = run_cell(tmp_path, setup_cell(""))
    assert run.returncode == 1 and asked is None
    assert (
        "ModuleNotFoundError: no folder with `helpers` here. On Colab: upload the course as a zip"
        in run.stderr
    )


def test_an_uploaded_course_is_found_and_nothing_is_installed_that_is_there(copied):
    run, asked = run_cell(copied, setup_cell(""))
    assert run.returncode == 0, run.stderr
    assert (
        run.stdout.strip() == str(copied / "course-main" / "helpers" / "norms.py") and asked is None
    )


def test_only_what_is_missing_is_installed_and_the_kernel_stays(copied):
    run, asked = run_cell(copied, setup_cell(""), missing="gguf,sentencepiece")
    assert run.returncode == 0, run.stderr
    command = asked["command"]
    assert command[1:4] == ["-m", "pip", "install"] and command[-2:] == ["gguf", "sentencepiece"]
    kept = dict(line.split("==") for line in asked["constraints"])
    assert kept.keys() == set(setup.KEPT) >= {"torch", "numpy", "ipykernel", "jupyter_client"}


def test_with_a_repository_the_cell_fetches_the_course(tmp_path):
    """github.com is a folder of this machine here."""
    origin = tmp_path / "github" / "owner" / "name"
    shutil.copytree(ROOT / "helpers", origin / "helpers", ignore=shutil.ignore_patterns("__pycache__", "data"))  # fmt: skip
    git = ["git", "-C", str(origin), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(git + words, check=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    env = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{tmp_path}/github/.insteadOf",
           "GIT_CONFIG_VALUE_0": "https://github.com/"}  # fmt: skip
    for _ in range(2):  # the second time it is there already
        run, asked = run_cell(alone, setup_cell("owner/name"), **env)
        assert run.returncode == 0, run.stderr
        assert (
            run.stdout.strip() == str(alone / "course" / "helpers" / "norms.py") and asked is None
        )


def test_elsewhere_nothing_is_installed(monkeypatch):
    monkeypatch.setattr(setup, "find_spec", lambda name: None if name == "gguf" else True)
    monkeypatch.setattr(setup.subprocess, "run", None)
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=r"lacks gguf. Choose the kernel .*requirements.txt"
    ):
        setup.install_missing()


def test_everything_that_the_helpers_import_is_looked_for():
    asked = {line.split(">=")[0] for line in (ROOT / "requirements.txt").read_text().split()}
    assert set(setup.NEEDED) == asked - {"jupyterlab", "nbval"}


def test_one_command_writes_the_repository_everywhere(tmp_path):
    shutil.copytree(
        ROOT / "helpers", tmp_path / "helpers", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "notebooks").mkdir()
    shutil.copy(notebook_files()[1], tmp_path / "notebooks")
    command = [sys.executable, "-m", "helpers.notebooks", "--repo"]
    for name, fetched in (("own-er/na.me", True), ("", False)):
        run = subprocess.run([*command, name], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert f'REPOSITORY = "{name}"' in (tmp_path / "helpers" / "notebooks.py").read_text()
        for path in (tmp_path / "notebooks").iterdir():
            cells = nbformat.read(path, as_version=4).cells
            cell = next(c for c in cells if "setup" in c.metadata.get("tags", []))
            assert ('url = "https://github.com/own-er/na.me"' in cell.source) == fetched
            link = f"colab.research.google.com/github/own-er/na.me/blob/main/notebooks/{path.name}"
            assert any(link in c.source for c in cells) == fetched
            if not fetched:
                old = nbformat.read(FOLDER / path.name, as_version=4)
                assert [c.get("outputs") for c in old.cells] == [c.get("outputs") for c in cells]
    run = subprocess.run([*command, "no repository"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and "is no repository on GitHub: OWNER/NAME" in run.stderr


# Colab's secrets, as huggingface_hub asks for them.
SECRETS = """
import builtins, sys, types

class Shell:
    __module__ = "google.colab._shell"

class SecretNotFoundError(Exception):
    pass

def get(name):
    if name in sys.argv[1:]:
        return "hf_" + name
    raise SecretNotFoundError(name)

builtins.get_ipython = Shell
modules = {name: types.ModuleType(name) for name in
           ("google", "google.colab", "google.colab.userdata", "google.colab.errors")}
sys.modules |= modules
google, colab, userdata, errors = modules.values()
google.colab, colab.userdata, colab.errors, errors.Error = colab, userdata, errors, Exception
userdata.get, userdata.SecretNotFoundError = get, SecretNotFoundError
userdata.NotebookAccessError = type("NotebookAccessError", (Exception,), {})
import torch
from helpers import checkpoints
checkpoints.available_memory = lambda: 8e9
print(checkpoints.pick_model(torch.device("cpu"), torch.float32)[1])
"""


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        (["HF_TOKEN"], "no hub can be reached for llama-3.2-1b-instruct"),
        ([], "llama-3.2-1b-instruct is gated and no token is set (HF_TOKEN)"),
    ],
)
def test_the_token_comes_from_colabs_secrets(secrets, said, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "COURSE_MODEL")}
    run = subprocess.run([sys.executable, "-c", SECRETS, *secrets], cwd=ROOT, capture_output=True,
                         text=True, env={**env, "HF_HOME": str(tmp_path)})  # fmt: skip
    assert run.stdout == said + "\n", run.stderr


# --- VS Code and GitHub ----------


@pytest.mark.parametrize("path", notebook_files(), ids=lambda p: p.stem)
def test_github_and_vs_code_show_a_notebook(path):
    """Valid nbformat 4.5, small, no widgets' state, no metadata of Colab; images are there."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(raw)
    assert (raw["nbformat"], raw["nbformat_minor"]) == (4, 5)
    assert path.stat().st_size < 1e6
    assert set(raw["metadata"]) == {"kernelspec", "language_info"}
    assert len({cell["id"] for cell in raw["cells"]}) == len(raw["cells"])
    assert all(set(cell["metadata"]) <= {"tags"} for cell in raw["cells"])
    for cell in raw["cells"]:
        for output in cell.get("outputs", []):
            assert not any(
                "widget" in kind or "javascript" in kind for kind in output.get("data", {})
            )


def test_the_repository_is_not_set_by_a_run_of_these_tests():
    assert notebooks.REPOSITORY == notebooks.REPOSITORY.strip() and "own-er" not in setup_cell()
