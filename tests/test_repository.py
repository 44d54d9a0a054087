"""The repository itself: commands, layout, tidy notebooks, nothing that does not belong."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.families import format_table, parts_table
from helpers.notebooks import ROOT, notebook_files, problems

README = (ROOT / "README.md").read_text(encoding="utf-8")


def tracked():
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("not a git checkout")
    return [f for f in run.stdout.splitlines() if (ROOT / f).is_file()]


def test_the_readme_shows_the_two_commands_one_line_each():
    commands = re.findall(r"^python3 -m venv .*$", README, re.M)
    assert len(commands) == 2
    run, test = commands
    assert "-r requirements.txt" in run and "jupyter lab" in run
    assert "-r requirements.txt -r tests/requirements.txt" in test and test.endswith("-m pytest")


def test_the_readmes_parts_table_is_the_printed_one():
    assert f"<!-- parts table -->\n{format_table(parts_table())}\n<!-- end -->" in README, (
        "run python -m helpers.notebooks"
    )


def test_the_top_level_is_the_fixed_one():
    top = {f.split("/")[0] for f in tracked()}
    assert {t for t in top if not t.startswith(".")} <= {
        "notebooks", "helpers", "requirements.txt", "README.md", "images", "tests", "LICENSE", "pyproject.toml",
    }  # fmt: skip


def test_nothing_generated_or_heavy_is_tracked():
    files = tracked()
    assert sum((ROOT / f).stat().st_size for f in files) < 30e6
    wrong = [
        f for f in files if re.search(r"\.(pth|pt|bin|ckpt|gguf|pyc)$|__pycache__|checkpoints/", f)
    ]
    assert not wrong


def test_links_of_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link


@pytest.mark.parametrize("path", notebook_files(), ids=lambda p: p.stem)
def test_a_notebook_is_tidy_and_was_run_from_top_to_bottom(path):
    assert not problems(path)


def test_code_is_clean():
    run = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    run = subprocess.run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "helpers", "tests"],
                         cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "helpers").rglob("*.py")), ids=lambda p: p.stem)
def test_public_names_have_docstrings_and_models_stay_plain_pytorch(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name}"
    imported = {
        n.name.split(".")[0] for x in ast.walk(tree) if isinstance(x, ast.Import) for n in x.names
    }
    imported |= {
        x.module.split(".")[0] for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.module
    }
    assert "transformers" not in imported  # a reference for tests, no part of the course


def test_importing_the_package_is_cheap():
    code = "import sys, helpers; assert 'torch' not in sys.modules; helpers.GPTModel; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_requirements_are_lower_bounds_and_constraints_are_exact():
    for file in ("requirements.txt", "tests/requirements.txt"):
        for line in (ROOT / file).read_text().split():
            assert re.fullmatch(r"[A-Za-z_]+>=[0-9.]+", line), line
    exact = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    assert all(
        re.fullmatch(r"[A-Za-z0-9._-]+==[0-9a-z.]+", line)
        for line in exact
        if not line.startswith("#")
    )
    assert Path(ROOT / ".ci" / "run").stat().st_mode & 0o100
