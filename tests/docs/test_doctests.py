"""Every example in a docstring prints the documented output."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import weft

PACKAGE = Path(weft.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples():
    """The modules that have examples, each with their number."""
    for path in sorted(PACKAGE.glob("**/*.py")):
        if count := len(re.findall(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), count


@pytest.mark.parametrize(("name", "count"), [*examples()])
def test_examples_of(name, count):
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert (failed, tried) == (0, count)
