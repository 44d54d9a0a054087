"""Run and tidy the notebooks, so that their stored outputs are those of one run from top to bottom.

python -m helpers.notebooks             run all, tidy, store the outputs
python -m helpers.notebooks 11          only those whose name begins with 11
python -m helpers.notebooks --retime    also store new outputs of cells tagged nbval-ignore-output
python -m helpers.notebooks --check     execute nothing; fail where tidying would change a file
python -m helpers.notebooks --cells     execute nothing; write the generated cells anew
python -m helpers.notebooks --repo OWNER/NAME   say where on GitHub the course is, in every notebook
"""

import argparse
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
SAME_EVERYWHERE = {  # what a run uses, so that compared outputs are the same on every machine
    "COURSE_MODEL": "smollm2-135m-instruct-q4",
    "COURSE_DEVICE": "cpu",
    "COURSE_DTYPE": "float32",
    "HF_HUB_OFFLINE": "1",
}
REPOSITORY = ""  # OWNER/NAME where the course can be fetched from; empty until it is published
LINE = {  # lesson -> the rows of the parts table that it changes in the running model
    "01": (),
    "02": ("norm",),
    "03": ("feed-forward",),
    "04": ("positions",),
    "05": ("biases",),
    "06": ("attention",),
    "07": ("positions",),
    "08": ("tokenizer",),
    "09": ("head",),
    "10": (),
}
SETUP = """\
# Find the course's `helpers` (not on PyPI: they come with the course). The same in every notebook.
import importlib
{imports}import sys
from pathlib import Path

here = Path.cwd()
places = [p for p in (here, *here.parents, *here.glob("*")) if (p / "helpers/skeleton.py").exists()]
if not places:
{otherwise}
sys.path.insert(0, str(places[0]))
importlib.import_module("helpers.setup").install_missing()"""
UPLOAD = """\
    raise ModuleNotFoundError("no folder with `helpers` here. On Colab: upload the course as a zip "
                              "file, run  !unzip -q NAME.zip  and then this cell again.")"""
CLONE = """\
    url = "https://github.com/{repository}"
    subprocess.run(["git", "clone", "-q", "--depth=1", url, "course"], check=True)
    places = [here / "course"]"""


def setup_cell(repository=None):
    """The setup cell: a few lines that find the course, or fetch it from its repository.

    Without a repository they say how to upload the course.
    """
    repository = REPOSITORY if repository is None else repository
    if not repository:
        return SETUP.format(imports="", otherwise=UPLOAD)
    fetch = CLONE.format(repository=repository)
    return SETUP.format(imports="import subprocess\n", otherwise=fetch)


def notebook_files(prefixes=()):
    """The notebooks in reading order, or those whose file names begin with one of `prefixes`."""
    files = [p for p in sorted(FOLDER.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]
    return [p for p in files if not prefixes or p.name.startswith(tuple(prefixes))]


def title(path):
    """The notebook's first heading, without the mark."""
    for cell in nbformat.read(path, as_version=4).cells:
        for line in cell.source.splitlines():
            if line.startswith("# "):
                return line[2:].strip()
    raise ValueError(f"{path} has no heading that begins with '# '")


def navigation(path):
    """Links to the neighbours, the contents, and to Colab once there is a repository."""
    files = [p for p in notebook_files() if p.parent == path.parent]
    at = files.index(path)
    links = [f"[< {title(files[at - 1])}]({files[at - 1].name})"] if at else []
    up = "../" * (len(path.relative_to(ROOT).parts) - 1)
    links.append(f"[Contents]({up}README.md)")
    if at + 1 < len(files):
        links.append(f"[{title(files[at + 1])} >]({files[at + 1].name})")
    if REPOSITORY:
        where = f"{REPOSITORY}/blob/main/{path.relative_to(ROOT).as_posix()}"
        links.append(f"[Open in Colab](https://colab.research.google.com/github/{where})")
    return " | ".join(links)


def lesson_table(path, done):
    """The parts table of one lesson: where its Part starts, the running model, where it goes.

    The part that this lesson changes is marked; `done` shows the model after the lesson.
    """
    from helpers.families import FAMILIES, describe, format_table

    number = path.name[:2]
    start, goal = ("GPT-2", "Llama 2") if number < "06" else ("Llama 2", "Llama 3.2")
    first, last = describe(*FAMILIES[start]), describe(*FAMILIES[goal])
    now = describe(*running_model(number, begin=not done))
    rows = [["part", start, "the running model", goal]]
    for row in first:
        if row not in ("norm epsilon", "block"):
            mark = "**{}**" if row in LINE[number] else "{}"
            rows.append([mark.format(row), first[row], mark.format(now[row]), last[row]])
    return format_table(rows)


def running_model(number, begin=False):
    """The running model after lesson `number`, or as it begins: (class, config, tokenizer)."""
    from helpers.attention import GroupedQueryAttention
    from helpers.feed_forward import FeedForward
    from helpers.gpt2 import GPTModel
    from helpers.llama3 import LLAMA32_CONFIG_1B
    from helpers.norms import RMSNorm
    from helpers.positions import RoPE
    from helpers.running_model import RUNNING_CONFIG

    class Running(GPTModel):
        """GPT-2 with the parts of the lessons so far."""

    done = f"{int(number) - begin:02d}"  # the last lesson whose change is in the model
    cfg, swaps, tokenizer = RUNNING_CONFIG, {}, "characters"
    if done >= "02":
        swaps["norm"] = RMSNorm
    if done >= "03":
        swaps["feed_forward"] = FeedForward
        cfg = replace(cfg, bias=False)
    if done >= "04":
        swaps["positions"] = RoPE
        cfg = replace(cfg, rope_base=10_000.0)
    if done >= "05":
        swaps["attention"] = GroupedQueryAttention
        cfg = replace(cfg, qkv_bias=False)
    if number >= "06":  # Part II begins from Llama 2, whose head is a matrix of its own
        cfg = replace(cfg, tie_embeddings=False)
    if done >= "06":
        cfg = replace(cfg, n_kv_groups=2)
    if done >= "07":
        cfg = replace(cfg, rope_base=500_000.0, rope_freq=LLAMA32_CONFIG_1B.rope_freq)
    if done >= "08":
        cfg, tokenizer = replace(cfg, vocab_size=128_256), "tiktoken BPE"
    if done >= "09":
        cfg = replace(cfg, tie_embeddings=True)
    Running.parts = replace(GPTModel.parts, **swaps)
    return Running, cfg, tokenizer


def generated(cell, path):
    """The text of a cell whose tag says that it is written here, or None."""
    tags = cell.metadata.get("tags", [])
    if "setup" in tags:
        return setup_cell()
    if "navigation" in tags:
        return navigation(path)
    if "parts-table" in tags:
        return lesson_table(path, done="done" in tags)
    return None


def tidied(notebook, path):
    """A copy with the generated cells, tags as only metadata, nothing that changes by itself."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    })  # fmt: skip
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        cell.id = f"cell-{number:02d}"
        cell.source = cell.source.strip()
        cell.source = generated(cell, path) or cell.source
        if cell.cell_type == "code":
            for output in cell.outputs:
                output.pop("metadata", None)
                if output.output_type in ("execute_result", "display_data"):
                    output.metadata = nbformat.from_dict({})
                    output.data = {k: v for k, v in output.data.items() if "widget" not in k}
    return notebook


def run(path, retime=False):
    """Execute a notebook from top to bottom and return it, tidied."""
    from nbclient import NotebookClient

    old = nbformat.read(path, as_version=4)
    new = tidied(old, path)
    env = {**os.environ, **SAME_EVERYWHERE, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    client = NotebookClient(new, timeout=600, kernel_name="python3", coalesce_streams=True,
                            resources={"metadata": {"path": str(path.parent)}})  # fmt: skip
    client.execute(env=env)
    for before, after in zip(old.cells, new.cells, strict=True):
        if after.cell_type == "code" and "nbval-ignore-output" in after.metadata.get("tags", []):
            if before.get("outputs") and not retime:
                after.outputs = before.outputs
            else:
                after.outputs = [o for o in after.outputs if o.get("name") != "stderr"]
    return tidied(new, path)


def problems(path):
    """What tidying or a run from top to bottom would change, in words; nothing is executed."""
    notebook = nbformat.read(path, as_version=4)
    found = []
    if nbformat.writes(tidied(notebook, path)) + "\n" != path.read_text(encoding="utf-8"):
        found.append("is not tidy")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("was not run once from top to bottom")
    outputs = [output for cell in code for output in cell.outputs]
    if any(output.output_type == "error" for output in outputs):
        found.append("has a cell that failed")
    if any(output.get("name") == "stderr" for output in outputs):
        found.append("has a cell that wrote to stderr")
    if not outputs:
        found.append("has no outputs")
    return [f"{path.relative_to(ROOT)} {problem}" for problem in found]


def write_cells(path):
    """Write a notebook's generated cells anew and tidy it; its outputs stay."""
    text = nbformat.writes(tidied(nbformat.read(path, as_version=4), path)) + "\n"
    path.write_text(text, encoding="utf-8")


def set_repository(name):
    """Write OWNER/NAME into this file, and with it into every setup cell and Colab link."""
    global REPOSITORY
    if not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", name) and name:
        raise ValueError(f"{name!r} is no repository on GitHub: OWNER/NAME")
    file = Path(__file__)
    text = file.read_text(encoding="utf-8")
    line = f'REPOSITORY = "{name}"'
    file.write_text(re.sub(r'^REPOSITORY = "[^"]*"', line, text, flags=re.M), encoding="utf-8")
    REPOSITORY = name


def readme():
    """The README's text with the parts table as the classes give it now."""
    from helpers.families import format_table, parts_table

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, mark, rest = text.partition("<!-- parts table -->\n")
    return before + mark + format_table(parts_table()) + rest[rest.index("\n<!-- end -->") :]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m helpers.notebooks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("prefixes", nargs="*", help="run only notebooks whose names begin so")
    parser.add_argument(
        "--retime", action="store_true", help="store new outputs of timed cells too"
    )
    parser.add_argument(
        "--check", action="store_true", help="execute nothing, fail where a file would change"
    )
    parser.add_argument(
        "--cells", action="store_true", help="execute nothing, write the generated cells anew"
    )
    parser.add_argument("--repo", metavar="OWNER/NAME", help='where on GitHub; "" for nowhere')
    args = parser.parse_args(arguments)
    files = notebook_files(args.prefixes)
    if args.repo is not None:
        try:
            set_repository(args.repo)
        except ValueError as error:
            parser.error(str(error))
    if args.repo is not None or args.cells:
        for path in notebook_files():
            write_cells(path)
        return 0
    if args.check:
        found = [problem for path in files for problem in problems(path)]
        if readme() != (ROOT / "README.md").read_text(encoding="utf-8"):
            found.append("README.md is not tidy: its parts table is not that of the classes")
        print("\n".join(found) or f"{len(files)} notebooks are tidy")
        return 1 if found else 0
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    for path in files:
        print(f"running {path.relative_to(ROOT)}", file=sys.stderr)
        path.write_text(nbformat.writes(run(path, args.retime)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
