"""JSON that every program can read: a number that is not finite, which JSON has none of, is a text.

plain_json({"loss": math.nan, "best": (1.5, math.inf)})     # {"loss": "nan", "best": [1.5, "inf"]}
"""

from __future__ import annotations

import json
import math
from typing import Any


def plain_json(data: Any, indent: int | None = None) -> str:
    """Data as JSON.

    Args:
      data: dicts, texts, numbers, truth values and None; anything else is a list of its parts.
      indent: by how much each level is set in; by default all is on one line.

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
