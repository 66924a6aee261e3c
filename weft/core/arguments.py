"""Arguments: those that `spmd(fn, static=, donate=)` selects by position or by name.

A parameter selected by position may be passed by name, and the other way round; both are found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from .errors import ProgramError, nearest
from .signature import Static, is_dynamic
from .types import PyTree

Args = tuple[PyTree, ...]
Kwargs = dict[str, PyTree]
Selected = tuple[int | str, ...]


def as_selected(word: str, given: object) -> Selected:
    """The arguments that `static` or `donate` selects: one position or name, or several."""
    several = (given,) if isinstance(given, int | str) else given
    if not isinstance(several, Iterable):
        raise ProgramError(
            f"{word}= is {given!r}",
            rule="arguments are selected by position, counted from 0, or by name",
            hint=f"for example {word}=(0,)",
        )
    return tuple(several)


def check_selected(fn: Callable[..., PyTree], static: Selected, donate: Selected) -> None:
    """Raise an error if `static` or `donate` select arguments that the function does not have."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some builtins have no signature that Python can read
        return
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
        return
    for word, selected in (("static", static), ("donate", donate)):
        wrong = [
            s
            for s in selected
            if (s not in parameters if isinstance(s, str) else not 0 <= s < len(parameters))
        ]
        if wrong:
            names = ", ".join(f"{s}{nearest(str(s), parameters)}" for s in wrong)
            raise ProgramError(
                f"{word}= names argument {names}, which the function does not have",
                f"{len(parameters)} arguments: {', '.join(parameters) or 'none'}",
                rule="arguments are selected by position, counted from 0, or by name",
                hint=f"for example {word}=(0,)",
            )


def mark_static(
    fn: Callable[..., PyTree], static: Selected, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Wrap the selected arguments in `Static`."""
    names = list(inspect.signature(fn).parameters)
    positions = {names.index(s) if isinstance(s, str) and s in names else s for s in static}
    args = tuple(Static(a) if i in positions else a for i, a in enumerate(args))
    selected = {names[p] if isinstance(p, int) and p < len(names) else p for p in positions}
    kwargs = {k: Static(v) if k in selected else v for k, v in kwargs.items()}
    return args, kwargs


def donated_inputs(
    fn: Callable[..., PyTree],
    donate: Selected,
    leaves: Sequence[Any],
    tree: PyTreeDef,
    static_numbers: tuple[type, ...],
) -> tuple[int, ...]:
    """The positions, among the inputs of the jitted function, of the arrays in the selected arguments.

    Args:
      fn: the user's function.
      donate: the selected arguments.
      leaves: the leaves of (args, kwargs), inputs and static values.
      tree: their tree structure.
      static_numbers: the number types that are static.
    """
    if not donate:
        return ()
    # Arguments are selected by name, inputs are numbered flat. A tree of leaf numbers with the structure of
    # the arguments leads from one to the other, however deep an argument's own tree is.
    args, kwargs = jax.tree.unflatten(tree, range(len(leaves)))
    given = dict(enumerate(args)) | kwargs
    for position, name in enumerate(inspect.signature(fn).parameters):
        if position in given or name in given:  # an omitted one has its default, which is not an input
            given[position] = given[name] = given.get(position, given.get(name))
    selected = {n for s in donate for n in jax.tree.leaves(given.get(s))}
    # `donate_argnums` counts the inputs of the jitted function, and static leaves are not among them.
    inputs = [n for n, leaf in enumerate(leaves) if is_dynamic(leaf, static_numbers)]
    return tuple(position for position, n in enumerate(inputs) if n in selected)
