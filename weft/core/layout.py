"""Layouts: which dims are split over which axes.

A layout is a set of rules `dim:axis`. It does not mention tensors, only names, so a dim is split the same way
in every tensor. On a mesh of 4 × 2 devices (`data=4 model=2`) with

    >>> layout = Layout("batch:data d_ff:model")

every tensor with a dim `batch` is split 4 ways along it, every tensor with a dim `d_ff` 2 ways, and a tensor
with neither is replicated. To split a tensor differently, rename its dim. A rule may name several axes
(`batch:pod+data`), and several dims may share an axis (`d_ff:model heads:model`), as long as no tensor has
two dims on the same axis.

State may be stored in a different layout from the one it is used in: `params=` and `optimizer=` add rules
for tensors with that role.

    >>> Layout("batch:data d_ff:model", params="d_model:data").rules_for("param")
    {'batch': ('data',), 'd_ff': ('model',), 'd_model': ('data',)}

`Splits` are what follows for one tensor: for each of its dims, the axes that split it. A `Placement` is a
mesh and a layout for it; it computes the splits and the shapes of arrays.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .call_errors import reports_construction
from .dims import Dim, format_dims, is_name, parse_pairs
from .errors import LayoutError, nearest
from .mesh import Mesh, MeshLike

Splits = tuple[tuple[str, ...], ...]
RulesLike = str | Mapping[str, str | Sequence[str]] | Iterable[tuple[str, str | Sequence[str]]]

ROLES = ("value", "param", "optimizer")


# Cached, because every op calls it for each of its operands.
@functools.lru_cache(maxsize=2**12)
def axes_of(splits: tuple[tuple[str, ...], ...]) -> frozenset[str]:
    """All axes that split some dim.

    >>> sorted(axes_of((("pod", "data"), (), ("model",))))
    ['data', 'model', 'pod']
    """
    return frozenset([axis for axes in splits for axis in axes])


@reports_construction
class Layout:
    """Rules `dim:axis`.

    Args:
      rules: `"batch:data d_ff:model"`, `"batch:pod+data;d_ff:model"`, a mapping, or pairs.
      params: additional rules for stored parameters (gathered where they are used).
      optimizer: additional rules for optimizer state; by default those of `params`.

    >>> import weft as wf
    >>> layout = wf.Layout("batch:data d_ff:model")
    >>> wf.place(wf.ones("batch=2 d_ff=2"), "data=2 model=2", layout)
    f32[batch=2/data·2, d_ff=2/model·2]
    [[1., 1.],
     [1., 1.]]
    """

    __slots__ = ("_hash", "_key", "_rules")

    _rules: dict[str, dict[str, tuple[str, ...]]]

    def __init__(
        self,
        rules: RulesLike = (),
        *,
        params: RulesLike | None = None,
        optimizer: RulesLike | None = None,
    ):
        base = _parse(rules)
        stored = base | (_parse(params) if params is not None else {})
        # Without rules of its own, optimizer state follows the parameters: ZeRO-3 must not replicate it.
        state = base | _parse(optimizer) if optimizer is not None else stored
        self._set_rules({"value": base, "param": stored, "optimizer": state})

    def _set_rules(self, rules: dict[str, dict[str, tuple[str, ...]]]) -> None:
        """Set the rules of each role."""
        self._rules = rules
        self._key = tuple(tuple(sorted(self._rules[role].items())) for role in ROLES)
        self._hash = hash(self._key)  # once: layouts are part of every cache key

    @classmethod
    def of(cls, given: LayoutLike) -> Layout:
        """Convert to a Layout: a Layout is returned as it is, and None splits nothing."""
        return given if isinstance(given, Layout) else cls(() if given is None else given)

    def rules_for(self, role: str = "value") -> dict[str, tuple[str, ...]]:
        """Axes by dim name, for tensors with this role."""
        return self._rules[role]

    @property
    def dim_names(self) -> set[str]:
        """The dims that any rule names."""
        return {name for rules in self._rules.values() for name in rules}

    def check(self, mesh: Mesh) -> None:
        """Raise an error if a rule names an axis that the mesh does not have."""
        unknown = {
            (name, axis)
            for rules in self._rules.values()
            for name, axes in rules.items()
            for axis in axes
            if axis not in mesh.shape
        }
        if unknown:
            shown = ", ".join(f"{axis}{nearest(axis, mesh.names)}" for _, axis in sorted(unknown))
            wanted = " ".join(f"{axis}=4" for axis in dict.fromkeys(axis for _, axis in sorted(unknown)))
            raise LayoutError(
                f'mesh "{mesh}" has no axis {shown}'
                if mesh.names
                else f"without a mesh there is no axis {shown}",
                "rules: " + " ".join(f"{name}:{axis}" for name, axis in sorted(unknown)),
                rule="a rule is dim:axis, where axis is an axis of the mesh",
                hint=f"the axes are {', '.join(mesh.names)}"
                if mesh.names
                else f'pass a mesh too, such as "{wanted}"',
            )

    def check_dims(self, occurring: Iterable[str]) -> None:
        """Called with the names of a program's dims; a subclass may raise an error for unused rules.

        Here unused rules are allowed: one layout may serve several programs.
        """

    def splits(self, dims: Sequence[Dim], mesh: Mesh, role: str = "value") -> Splits:
        """For each dim, the axes that split it (without axes of size 1); raises an error if invalid."""
        rules = self.rules_for(role)
        splitting = mesh.splitting_axes
        splits = tuple(tuple(a for a in rules.get(dim.name, ()) if a in splitting) for dim in dims)
        check_disjoint(dims, splits, self, mesh, role)
        return splits

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self._rules)  # the hash of a string differs in another process

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        more = "; ".join(f"{word} {rules or 'as values'}" for word, rules in self._further_rules())
        return _format_rules(self._rules["value"]) + (f" ({more})" if more else "")

    def __repr__(self) -> str:
        more = "".join(f', {word}="{rules}"' for word, rules in self._further_rules())
        return f'Layout("{_format_rules(self._rules["value"])}"{more})'

    def _repr_html_(self) -> str:
        from .html import layout_html  # imported here because html.py imports this module

        return layout_html(self)

    def _further_rules(self) -> list[tuple[str, str]]:
        """The rules that `params=` and `optimizer=` add to those of the previous role."""
        base, stored, state = (self._rules[role] for role in ROLES)
        found = []
        for word, rules, inherited in (("params", stored, base), ("optimizer", state, stored)):
            if rules != inherited:
                more = {k: v for k, v in rules.items() if base.get(k) != v}
                found.append((word, _format_rules(more)))
        return found


LayoutLike = Layout | RulesLike | None


def _restore(kind: type[Layout], rules: dict[str, dict[str, tuple[str, ...]]]) -> Layout:
    """An unpickled layout."""
    layout = kind.__new__(kind)
    layout._set_rules(rules)
    return layout


def _format_rules(rules: Mapping[str, tuple[str, ...]]) -> str:
    return " ".join(f"{name}:{'+'.join(axes)}" for name, axes in rules.items())


def _parse(rules: RulesLike) -> dict[str, tuple[str, ...]]:
    """Axes by dim name, from a string, a mapping or pairs."""
    if isinstance(rules, str):
        pairs: list[Any] = parse_pairs(rules, ":=", LayoutError, "Layout", "rule", r"[A-Za-z_][\w.'+]*")
    elif isinstance(rules, Iterable):
        pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    else:
        pairs = [rules]
    parsed: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        valid = isinstance(pair, tuple | list) and len(pair) == 2 and is_name(pair[0])
        axes_are_names = valid and (
            isinstance(pair[1], str)
            or (isinstance(pair[1], tuple | list) and all(isinstance(axis, str) for axis in pair[1]))
        )
        if not axes_are_names:
            raise LayoutError(
                f"{pair!r} is not a rule",
                rule="a rule is a dim's name (starting with a letter) and an axis, or axes joined by +",
                hint='for example "batch:data d_ff:model" or [("batch", "data")]',
            ).located(f"Layout({rules!r})")
        name = pair[0]
        axes = tuple(pair[1].split("+")) if isinstance(pair[1], str) else tuple(pair[1])
        # An equal rule twice is harmless: rules are often concatenated from several strings.
        if parsed.get(name, axes) != axes or len(set(axes)) < len(axes) or "" in axes:
            raise LayoutError(
                f"dim {name} has the rules {name}:{'+'.join(parsed.get(name, axes))} and "
                f"{name}:{'+'.join(axes)}"
                if name in parsed
                else f"rule {name}:{'+'.join(axes)} names an axis twice or not at all",
                rule="a dim has one rule; several axes are joined by +",
                hint=f"for example {name}:pod+data",
            ).located(f"Layout({rules!r})")
        parsed[name] = axes
    return parsed


def check_disjoint(
    dims: Sequence[Dim], splits: Splits, layout: Layout, mesh: Mesh, role: str = "value"
) -> None:
    """Raise an error if two dims are on the same axis."""
    on: dict[str, list[Dim]] = {}
    for dim, axes in zip(dims, splits, strict=True):
        for axis in axes:
            on.setdefault(axis, []).append(dim)
    for axis, several in on.items():
        if len(several) > 1:
            names = [dim.name for dim in several]
            free = [a for a in mesh.names if a not in on and a in mesh.splitting_axes]
            ways = f'map {names[0]} to {free[0]} ("{names[0]}:{free[0]}"), or ' if free else ""
            rules = layout.rules_for(role)
            raise LayoutError(
                f"{' and '.join(names)} of [{format_dims(dims)}] are both on axis {axis}",
                f"rules: {' '.join(n + ':' + '+'.join(rules.get(n, (axis,))) for n in names)}"
                f"     mesh: {mesh}",
                rule="a mesh axis splits at most one dim of a tensor, or of an einsum's union of dims; "
                "it cannot index slices of two dims at once",
                hint=f"{ways}remove one of the two rules, or rename one of the dims",
            )


class Placement:
    """A mesh and a layout: where tensors are, and how their dims are split.

    Attributes:
      mesh, layout: the pair. Every rule of the layout names an axis of the mesh.
      known_splits, shapes: the results of `splits` and `array_shape`, by their arguments.

    >>> Placement(Mesh("data=2"), Layout("batch:data")) is Placement(Mesh("data=2"), Layout("batch:data"))
    True
    """

    __slots__ = ("__weakref__", "_padded", "known_splits", "layout", "mesh", "shapes")

    mesh: Mesh
    layout: Layout
    # Every op asks for these, several times for each operand, hence the caches.
    known_splits: dict[tuple[tuple[Dim, ...], str], Splits]
    _padded: dict[tuple[tuple[Dim, ...], Splits], bool]
    shapes: dict[tuple[tuple[Dim, ...], str, Splits | None], tuple[int, ...]]

    # Placements are part of every cache key and are compared for every operand. Equal pairs are therefore one
    # object, which Python compares and hashes by identity. The types are part of the key because a subclass
    # of Layout may equal a plain one and still check more.
    def __new__(cls, mesh: Mesh, layout: Layout) -> Placement:
        key = type(mesh), mesh, type(layout), layout
        found = _PLACEMENTS.get(key)
        if found is None:
            layout.check(mesh)
            found = super().__new__(cls)
            found.mesh, found.layout = mesh, layout
            found.known_splits, found.shapes, found._padded = {}, {}, {}
            found = _PLACEMENTS.setdefault(key, found)
        return found

    @classmethod
    def of(cls, mesh: MeshLike, layout: LayoutLike) -> Placement:
        """Convert a pair, each of which may be a string, a mapping or None, to a Placement."""
        return cls(Mesh.of(mesh), Layout.of(layout))

    def splits(self, dims: tuple[Dim, ...], role: str = "value") -> Splits:
        """For each dim, the axes that split it (without axes of size 1); raises an error if invalid."""
        found = self.known_splits.get((dims, role))
        if found is None:
            found = self.known_splits[dims, role] = self.layout.splits(dims, self.mesh, role)
        return found

    def array_shape(
        self, dims: tuple[Dim, ...], role: str = "value", splits: Splits | None = None
    ) -> tuple[int, ...]:
        """The shape of a tensor's array, padding included: of one slice if `splits` are given."""
        found = self.shapes.get((dims, role, splits))
        if found is None:
            ways = self._ways(self.splits(dims, role) if splits is None else splits)
            blocks = [-(-dim.size // n) for dim, n in zip(dims, ways, strict=True)]
            shape = blocks if splits is not None else [b * n for b, n in zip(blocks, ways, strict=True)]
            found = self.shapes[dims, role, splits] = tuple(shape)
        return found

    def _ways(self, splits: Splits) -> list[int]:
        sizes = self.mesh.shape
        return [math.prod([sizes[axis] for axis in axes]) for axes in splits]

    def has_padding(self, dims: tuple[Dim, ...], splits: Splits) -> bool:
        """Whether some device's slice of a tensor with these dims and splits has padding."""
        found = self._padded.get((dims, splits))
        if found is None:
            ways = zip(dims, self._ways(splits), strict=True)
            found = self._padded[dims, splits] = any(dim.size % n for dim, n in ways)
        return found

    def __repr__(self) -> str:
        return f'mesh "{self.mesh}" with layout "{self.layout}"'

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.mesh, self.layout)  # a copy is the same object


# Weak, because a layout search creates very many placements.
_PLACEMENTS: weakref.WeakValueDictionary[Any, Placement] = weakref.WeakValueDictionary()
