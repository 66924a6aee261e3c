"""Op labels: the names under which ops appear in jaxprs, profiles and plans.

    label = OpLabel("einsum", [("batch", "io"), ("io", "hidden")], ("batch", "hidden"), layer="mlp.up")
    str(label)        # einsum[batch,io · io,hidden → batch,hidden]
    label.scope       # einsum[batch,io · io,hidden → batch,hidden] in mlp.up, for jax.named_scope

JAX carries a name stack of plain text from the op through differentiation to the equation. `OpLabel.scope` is
the only code that writes this text, and `parse_label` is the only code that reads it. Everything else uses
the fields of a label.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .dims import Dim

# The names of labels of work that belongs to no op: a gradient that is summed, and an optimizer's update.
GRADIENT, OPTIMIZER = "gradient", "optimizer"


class OpLabel(str):
    """The label of an op. As a string it is the text that plans show.

    Two labels are equal if the layer is the same, too: the two feed-forward layers of a model do not become
    one row of a plan.

    Attributes:
      name: the name of the op, `GRADIENT`, or `OPTIMIZER`.
      operands: the names of the dims of each operand.
      out: the names of the dims of an einsum's result, or None.
      layer: the path of the layer that calls the op, `decoder.blocks.attention`, or "".
      scope: the text for `jax.named_scope`.
    """

    __slots__ = ("layer", "name", "operands", "out", "scope")

    name: str
    operands: tuple[tuple[str, ...], ...]
    out: tuple[str, ...] | None
    layer: str
    scope: str

    def __new__(
        cls,
        name: str,
        operands: Iterable[tuple[str, ...]] = (),
        out: tuple[str, ...] | None = None,
        layer: str = "",
    ) -> OpLabel:
        operands = tuple(operands)
        dims = " · ".join(map(",".join, operands))
        if out is not None:
            dims = f"{dims} → {','.join(out)}"
        return cls._with_text(f"{name}[{dims}]", name, operands, out, layer)

    @classmethod
    def unlabeled(cls, text: str) -> OpLabel:
        """The label of work outside of all ops: it has a text, and no name."""
        return cls._with_text(text)

    @classmethod
    def _with_text(
        cls,
        text: str,
        name: str = "",
        operands: tuple[tuple[str, ...], ...] = (),
        out: tuple[str, ...] | None = None,
        layer: str = "",
    ) -> OpLabel:
        label = str.__new__(cls, text)
        label.name, label.operands, label.out, label.layer = name, operands, out, layer
        # Not "@", after which XLA drops the rest of a name.
        label.scope = f"{text} in {layer}" if layer else text
        return label

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, the text would be taken for the name.
        return OpLabel._with_text, (str(self), self.name, self.operands, self.out, self.layer)

    def __eq__(self, other: object) -> bool:
        return self.scope == other.scope if isinstance(other, OpLabel) else str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:  # `str` defines its own, which would ignore the layer
        return not self == other

    __hash__ = str.__hash__

    @property
    def dims(self) -> frozenset[str]:
        """The names of all dims."""
        return frozenset().union(*self.operands, self.out or ())


@functools.lru_cache(maxsize=4096)
def op_label(
    name: str, operands: tuple[tuple[Dim, ...], ...], out: tuple[str, ...] | None, layer: str
) -> OpLabel:
    """The label of a call of an op; a program calls most ops many times, on tensors with the same dims."""
    return OpLabel(name.lstrip("_"), [tuple(d.name for d in dims) for dims in operands], out, layer)


# The update by an optax transformation, which XLA's partitioner splits.
OPTAX_LABEL = OpLabel(OPTIMIZER, [("optax",)])

_SCOPE = re.compile(r"([a-z_0-9]+)\[([^\]]*)\](?: in (.+))?")


@functools.lru_cache(maxsize=4096)
def parse_label(text: str) -> OpLabel | None:
    """The label that `OpLabel.scope` wrote as this text; None for any other text."""
    match = _SCOPE.fullmatch(text)
    if not match:
        return None
    name, dims, layer = match.groups()
    given, arrow, out = dims.partition(" → ")
    operands = (tuple(filter(None, one.split(","))) for one in given.split(" · ")) if given else ()
    return OpLabel(name, operands, tuple(filter(None, out.split(","))) if arrow else None, layer or "")


@dataclass(frozen=True)
class Scope:
    """The decoded name stack of an equation.

    Attributes:
      ops: the labels of the enclosing ops, outermost first.
      transforms: JAX's transformations: "jvp", "transpose", "vmap".
      other: the innermost name that is not a label, for equations outside of all ops.
    """

    ops: tuple[OpLabel, ...] = ()
    transforms: frozenset[str] = frozenset()
    other: str = ""

    def extend(self, name_stack: Any) -> Scope:
        """The scope of an equation with this name stack, inside an equation with this scope.

        JAX stores only the innermost part of the stack for equations in a scanned body.
        """
        return _extended(self, name_stack.stack) if name_stack.stack else self

    @property
    def op(self) -> OpLabel:
        """The label of the innermost op."""
        return self.ops[-1] if self.ops else OpLabel.unlabeled(self.other)

    def is_inside(self, name: str) -> bool:
        """Whether an op of this name encloses the equation."""
        return any(label.name == name for label in self.ops)

    def phase(self, seen_backward: bool = False) -> str:
        """The phase of the equation: forward, backward or update.

        JAX marks transposed equations in the stack. Work after the backward pass that is not differentiated,
        and work inside an optimizer, is the update.

        Args:
          seen_backward: whether an earlier equation belongs to the backward pass.
        """
        if "transpose" in self.transforms or self.is_inside(GRADIENT):
            return "backward"
        updates = seen_backward or self.is_inside(OPTIMIZER)
        return "update" if updates and "jvp" not in self.transforms else "forward"


@functools.lru_cache(maxsize=4096)
def _extended(outer: Scope, stack: Sequence[Any]) -> Scope:
    ops, transforms, other = list(outer.ops), set(outer.transforms), outer.other
    for part in stack:
        if type(part).__name__ == "Transform":
            transforms.add(part.name)
            continue
        label = parse_label(part.name)
        if label is None:
            other = part.name
        else:
            ops.append(label)
    return Scope(tuple(ops), frozenset(transforms), other)
