"""Standard JSON: NaN and infinity, which JSON does not have, are written as strings.

plain_json({"loss": math.nan, "best": (1.5, math.inf)})     # {"loss": "nan", "best": [1.5, "inf"]}
"""

from __future__ import annotations

import json
import math
from typing import Any


def plain_json(data: object, indent: int | None = None) -> str:
    """Serialize data as JSON.

    Args:
      data: dicts, strings, numbers, booleans and None; any other iterable becomes a list.
      indent: the indentation of each level; by default all is on one line.

    >>> plain_json({"loss": float("-inf"), "text": "é", "logs": (0.5, float("nan"))})
    '{"loss": "-inf", "text": "é", "logs": [0.5, "nan"]}'
    """
    return json.dumps(_plain(data), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x if isinstance(x, str | int | float | type(None)) else [_plain(value) for value in x]
