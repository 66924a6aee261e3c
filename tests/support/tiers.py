"""Tiers: a grid of cases of which the fast tests run a few, and `make soak` runs all."""

import pytest


def slow(*values):
    """A case that only `make soak` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(fast, cases):
    """Cases for `parametrize`: those in `fast` run always, the others are slow."""
    return [case if case in fast else slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]
