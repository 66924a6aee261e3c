"""Numeric arguments: tyro constructors whose errors are short and don't mention Python types."""

from __future__ import annotations

from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ..core.field_types import SCALARS, FieldType

REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How to parse an int or a float, an optional one, or a list of them. Commands check the ranges."""
    annotation: Any = info.type
    kind = FieldType.of(annotation)
    several = kind.variadic
    (item,) = kind.items if several else (kind,)
    if item.kind not in (int, float) or item.choices:
        return None
    noun, is_valid = SCALARS[item.kind]

    def parse(words: list[str]) -> Any:
        values = tuple(item.parse_word(word) for word in words)
        wrong = [word for word, value in zip(words, values, strict=True) if isinstance(value, str)]
        if wrong:
            raise ValueError(f"{wrong[0]} is not {noun}")
        return values if several else values[0]

    name = item.kind.__name__.upper()
    return PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=f"[{name} ...]" if several else name,
        instance_from_str=parse,
        is_instance=lambda x: all(map(is_valid, x)) if several else is_valid(x),
        str_from_instance=lambda x: [str(one) for one in (x if several else [x])],
    )
