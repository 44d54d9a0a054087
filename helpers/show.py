"""Show what changed between two pieces of code, as text that reads the same everywhere."""

import ast
import difflib
import inspect
import linecache


def show_diff(old, new):
    """Print the difference of two classes or functions: `-` went, `+` came, docstrings left out.

    Classes of the helpers and classes defined in a notebook's cell can both be given.
    """
    before, after = _lines(old), _lines(new)
    width = max(map(len, [*before, *after]))
    for line in difflib.ndiff(before, after):
        if not line.startswith("?"):  # ndiff's hints at single characters
            print(line[: width + 2].rstrip())


def _lines(thing):
    """The source of a class or function without docstrings and blank lines."""
    source = inspect.cleandoc("\n" + _source(thing))
    drop = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            drop |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    return [text for at, text in enumerate(lines, 1) if at not in drop and text.strip()]


def _source(thing):
    """inspect.getsource, also for a class of a notebook, whose file older Pythons do not find."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        methods = [m for m in vars(thing).values() if inspect.isfunction(m)]
        file = methods[0].__code__.co_filename
        cell = "".join(linecache.getlines(file))
        for node in ast.parse(cell).body:
            if getattr(node, "name", None) == thing.__name__:
                return ast.get_source_segment(cell, node)
        raise
