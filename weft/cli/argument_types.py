"""Numeric arguments: tyro constructors whose errors are short and don't mention Python types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

TYPE_NAMES: dict[type, str] = {int: "an integer", float: "a number"}
REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How to parse an int or a float, an optional one, or a list of them."""
    inside = get_args(info.type)
    optional = len(inside) == 2 and inside[1] is type(None)
    several = len(inside) == 2 and inside[1] is ...
    kind = inside[0] if optional or several else info.type
    if kind not in TYPE_NAMES:
        return None
    if several:
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar=f"[{kind.__name__.upper()} ...]",
            instance_from_str=lambda words: tuple(_parser(kind)([word]) for word in words),
            is_instance=lambda x: isinstance(x, tuple) and all(isinstance(one, kind) for one in x),
            str_from_instance=lambda x: [str(one) for one in x],
        )
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=_parser(kind),
        is_instance=lambda x: isinstance(x, kind) or (kind is float and isinstance(x, int)),
        str_from_instance=lambda x: [str(x)],
    )


def _parser(kind: type[int] | type[float]) -> Callable[[list[str]], int | float]:
    def parse(words: list[str]) -> int | float:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"{words[0]} is not {TYPE_NAMES[kind]}") from None

    return parse
