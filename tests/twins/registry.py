"""Where the twins of all checks are collected: wrong ones with their hint, right ones, our own."""

import pytest

OWN = {}  # check: the helper that it proves
LINES = {}  # check: what it prints
REFUSED, ACCEPTED = [], []  # filled by the two decorators


def proves(check, own, line):
    """Register a check with the helper that it proves and the line that it prints."""
    OWN[check], LINES[check] = own, line


def refused(check, hint):
    """Mark a wrong twin, with words of the hint that must name its mistake."""

    def register(thing):
        REFUSED.append(pytest.param(check, thing, hint, id=called(check, thing)))
        return thing

    return register


def accepted(check, line=None):
    """Mark a right answer."""

    def register(thing):
        ACCEPTED.append(pytest.param(check, thing, line or LINES[check], id=called(check, thing)))
        return thing

    return register


def called(check, thing):
    return f"{check.__name__.removeprefix('check_')}-{thing.__name__}"
