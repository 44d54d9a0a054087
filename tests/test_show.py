"""The diff of two classes."""

import subprocess
import sys

from helpers.norms import LayerNorm, RMSNorm
from helpers.notebooks import ROOT
from helpers.show import show_diff


def test_a_diff_shows_what_went_and_what_came_and_no_docstrings(capsys):
    show_diff(LayerNorm, RMSNorm)
    lines = capsys.readouterr().out.splitlines()
    assert "- class LayerNorm(nn.Module):" in lines and "+ class RMSNorm(nn.Module):" in lines
    assert any(line.startswith("-") and "self.shift" in line for line in lines)
    assert any(line.startswith("  ") and "super().__init__()" in line for line in lines)
    assert not any("Source" in line or line.startswith("?") for line in lines)


def test_the_same_thing_has_no_difference(capsys):
    show_diff(RMSNorm, RMSNorm)
    assert all(line.startswith("  ") for line in capsys.readouterr().out.splitlines())


def test_classes_and_functions_of_a_notebook_can_be_shown():
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("class A:\\n    '''Doc.'''\\n    def f(self):\\n        return 1\\n")
shell.run_cell("class B:\\n    def f(self):\\n        return 2\\n")
shell.run_cell("def f(x):\\n    return 1\\n")
shell.run_cell("def g(x):\\n    return 2\\n")
done = shell.run_cell("from helpers.show import show_diff; show_diff(A, B); show_diff(f, g)")
assert done.success
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "-         return 1\n+         return 2" in run.stdout
    assert "-     return 1\n+     return 2" in run.stdout
