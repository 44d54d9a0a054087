"""Lesson and helper stay in step: tagged cells, solutions, links, pictures, goals."""

import ast
import re
import textwrap

import nbformat
import pytest

from helpers import checks
from helpers.notebooks import ROOT, notebook_files, tidied

LESSONS = [p for p in notebook_files() if p.parent.name == "notebooks"]
PLUMBING = {
    "from_config",
    "label",
    "_load_from_state_dict",
}  # what the skeleton needs, no part of a lesson
PARTS = {
    "norms": ("LayerNorm", "RMSNorm"),
    "feed_forward": ("GELU", "SiLU", "GELUFeedForward", "FeedForward"),
    "positions": (
        "LearnedPositions",
        "RoPE",
        "compute_rope_params",
        "apply_rope",
        "permute",
        "unpermute",
        "rescale",
    ),
    "attention": (
        "causal_mask",
        "MultiHeadAttention",
        "attend_plain",
        "GroupedQueryAttention",
        "attend_sdpa",
    ),
    "skeleton": ("PreNormBlock", "padding_mask"),
    "kv_cache": ("KVCache", "LayerCache"),
    "generate": ("next_token",),
}


def cells(path, kind):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


def claims():
    """(notebook, name of the helper, source of the cell) for every cell tagged same-as:helpers...."""
    for path in LESSONS:
        for cell in cells(path, "code"):
            for tag in cell.metadata.get("tags", []):
                if tag.startswith("same-as:"):
                    yield path, tag.removeprefix("same-as:helpers."), cell.source


def plain(node):
    """A definition as text, without docstrings and plumbing."""
    node = ast.parse(ast.unparse(node)).body[0]
    for part in ast.walk(node):
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(part) is not None:
                part.body = part.body[1:] or [ast.Pass()]
            part.body = [n for n in part.body if getattr(n, "name", None) not in PLUMBING]
    return ast.unparse(node)


def definition(source, name):
    found = [n for n in ast.parse(source).body if getattr(n, "name", None) == name]
    assert len(found) == 1, f"the cell or file must define {name} once"
    return found[0]


@pytest.mark.parametrize("claim", list(claims()), ids=lambda c: f"{c[0].stem}-{c[1]}")
def test_a_tagged_cell_is_the_helper(claim):
    _, name, source = claim
    module, _, thing = name.partition(".")
    helper = definition((ROOT / "helpers" / f"{module}.py").read_text(), thing)
    assert plain(definition(source, thing)) == plain(helper)


def test_every_part_is_built_by_exactly_one_notebook():
    claimed = [name for _, name, _ in claims()]
    assert len(claimed) == len(set(claimed))
    wanted = {f"{module}.{name}" for module, names in PARTS.items() for name in names}
    assert set(claimed) == wanted


# --- exercises ----------


def exercises(path):
    """(check, name of the answer, source of the stub, sources of the solutions) of a notebook's exercises."""
    everything = nbformat.read(path, as_version=4).cells
    for at, cell in enumerate(everything):
        if cell.cell_type == "code" and (
            m := re.search(r"^exercise\((\w+), (\w+)\)", cell.source, re.M)
        ):
            solution = next(
                (c for c in everything[at:] if "<summary>Solution</summary>" in c.source), None
            )
            yield m[1], m[2], cell, solution


@pytest.mark.parametrize("path", [p for p in LESSONS if p.name[:2] < "11"], ids=lambda p: p.stem)
def test_exercises_are_open_and_their_solutions_pass(path, capsys):
    found = list(exercises(path))
    assert found, "at least one exercise asks for code and is judged by a check"
    for check, name, cell, solution in found:
        assert [o.text for o in cell.outputs] == ["still open\n"]
        code = re.findall(r"```python\n(.*?)```", solution.source, re.S)
        assert code, "the solution holds a python block"
        space = {}
        exec(
            textwrap.dedent(
                "import math\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
            ),
            space,
        )
        exec("\n".join(code), space)
        getattr(checks, check)(space[name])


@pytest.mark.parametrize("path", [p for p in LESSONS if p.name[:2] < "11"], ids=lambda p: p.stem)
def test_a_lesson_has_what_a_reader_expects(path):
    text = "\n".join(c.source for c in cells(path, "markdown"))
    assert text.count("<details><summary>Solution</summary>") >= 3
    assert text.count("<details>") == text.count("</details>")
    assert re.search(r"[Pp]redict", text) and "## Recap" in text
    tags = [t for c in nbformat.read(path, as_version=4).cells for t in c.metadata.get("tags", [])]
    assert tags.count("navigation") >= 1 and tags.count("setup") == 1
    assert tags.count("parts-table") == 2 and tags.count("done") == 1
    code = [c for c in cells(path, "code") if "setup" not in c.metadata.get("tags", [])]
    lines = sorted(c.source.count("\n") + 1 for c in code)
    assert lines[len(lines) // 2] <= 9, "one idea in a cell"


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_links_and_pictures_of_a_notebook_are_there(path):
    text = "\n".join(c.source for c in cells(path, "markdown"))
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)  # att[name](x) is no link
    for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
        assert len(alt) >= 40, f"{target} needs a text that says what it shows"
        assert not target.startswith("http") and (path.parent / target).is_file(), target
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", text):
        if not target.startswith("http"):
            assert (path.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_notebook_is_valid_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 1e6
    assert nbformat.writes(tidied(notebook, path)) == nbformat.writes(
        tidied(tidied(notebook, path), path)
    )
