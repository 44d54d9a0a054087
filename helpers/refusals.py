"""How a refusal reaches a reader: as one sentence, with the whole story kept for those who look.

In a notebook an error of the loader is shown as its sentence alone, without the frames of other
people's libraries. They are not lost: `error.__cause__` is what the library said.
"""

import errno
import functools

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def in_one_sentence(function):
    """Let OSError, ValueError and an interruption that leave `function` be shown as a sentence."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (OSError, ValueError, KeyboardInterrupt) as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, KeyboardInterrupt):
                text = "KeyboardInterrupt: stopped; nothing half-written is left"
            error._render_traceback_ = lambda: [text]  # what IPython shows instead of its own
            raise

    return wrapped


def without_token(error, token):
    """Take a token out of an error's words, and out of those of the errors behind it."""
    seen = set()
    while token and error is not None and id(error) not in seen:
        seen.add(id(error))
        clean = [a.replace(token, "(token)") if isinstance(a, str) else a for a in error.args]
        if clean != list(error.args):
            error.args = tuple(clean)
        for name, value in list(vars(error).items()):
            if isinstance(value, str) and token in value:
                setattr(error, name, value.replace(token, "(token)"))
        error = error.__cause__ or error.__context__


def chain(error):
    """An error and those behind it, the last first."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen
