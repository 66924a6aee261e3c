"""What a request's JSON may say: every field with its kind, and a clear word for everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.errors import nearest
from weft.generate.config import PENALTY_RANGE, SEED_LIMIT


class APIError(Exception):
    """A request that is rejected, in the terms of OpenAI's API.

    Attributes:
      status: the HTTP status.
      message: why.
      kind: OpenAI's `type`.
      param: the field that is wrong.
      headers: sent with the response.
      code: OpenAI's `code`, where it has one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param
        self.headers, self.code = headers, code

    @property
    def body(self) -> dict[str, Any]:
        """What is sent as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class SchemaField:
    """What a field may be: in words, and whether a value is that; and what it is if it is not given.

    `code` is the error's if a value does not fit."""

    words: str
    fits: Callable[[Any], bool]
    default: Any = None
    needed: bool = False
    code: str = "invalid_value"


def integer(least: int, most: int | None = None, default: int | None = None) -> SchemaField:
    """A whole number."""
    words = f"a whole number from {least} " + ("on" if most is None else f"to {most}")
    return SchemaField(
        words,
        lambda x: type(x) is int and x >= least and (most is None or x <= most),
        default,
    )


def number(words: str, fits: Callable[[float], bool], default: float) -> SchemaField:
    """A number that is no larger than a float may be."""
    return SchemaField(words, lambda x: type(x) in (int, float) and abs(x) <= MAX_FLOAT and fits(x), default)


def boolean(default: bool = False) -> SchemaField:
    """true or false."""
    return SchemaField("true or false", lambda x: type(x) is bool, default)


def unsupported(value: Any) -> SchemaField:
    """A field of OpenAI's that is not supported: it may say nothing but what it says when it is left out."""

    def fits(x: Any) -> bool:
        return x == value and (type(x) is bool) == (type(value) is bool)

    words = f"{json.dumps(value)} alone: it is not supported"
    return SchemaField(words, fits, value, code="unsupported_parameter")


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and not any("\ud800" <= c <= "\udfff" for c in x)


def _is_texts(x: Any) -> bool:
    return _is_text(x) or (isinstance(x, list) and 0 < len(x) <= TEXTS and all(map(_is_text, x)))


def _is_stop(x: Any) -> bool:
    stops = x if isinstance(x, list) else [x]
    return len(stops) <= STOPS and all(_is_text(stop) and stop for stop in stops)


TEXTS, STOPS = 64, 4  # at most, in one request
MAX_QUOTED = 60  # characters of what was given that are told back
MAX_COUNT = 2**31 - 1  # more than any count may be
MAX_FLOAT = sys.float_info.max
TEXTS_FIELD = SchemaField(f"a text, or a list of 1 to {TEXTS} texts", _is_texts, needed=True)
STRING_FIELD = SchemaField("a text", _is_text)
COUNT_FIELD = integer(1, MAX_COUNT)

COMPLETIONS: dict[str, SchemaField] = {
    "prompt": TEXTS_FIELD,
    "max_tokens": COUNT_FIELD,
    "temperature": number("a number from 0 on", lambda x: x >= 0, 1.0),
    "top_p": number("a number above 0 and up to 1", lambda x: 0 < x <= 1, 1.0),
    "top_k": integer(0, MAX_COUNT, 0),
    "repetition_penalty": number(
        f"a number from {PENALTY_RANGE[0]:g} to {PENALTY_RANGE[1]:g}",
        lambda x: PENALTY_RANGE[0] <= x <= PENALTY_RANGE[1],
        1.0,
    ),
    "seed": integer(0, SEED_LIMIT - 1),
    "stop": SchemaField(f"a text, or at most {STOPS}", _is_stop),
    "stream": boolean(),
    "stream_options": SchemaField(
        'an object with "include_usage": true or false',
        lambda x: (
            isinstance(x, dict) and set(x) <= {"include_usage"} and all(type(v) is bool for v in x.values())
        ),
    ),
    "logprobs": integer(0, 1),
    "beams": COUNT_FIELD,
    "n": integer(1, MAX_COUNT, 1),
    "model": STRING_FIELD,
    "user": STRING_FIELD,
    "echo": unsupported(False),
    "best_of": unsupported(1),
    "frequency_penalty": unsupported(0),
    "presence_penalty": unsupported(0),
    "suffix": unsupported(None),
    "logit_bias": unsupported(None),
}
TRANSLATE: dict[str, SchemaField] = {
    "text": TEXTS_FIELD,
    "beams": COUNT_FIELD,
    "best": integer(1, MAX_COUNT, 1),
    "max_tokens": COUNT_FIELD,
    "stream": boolean(),
    "attention": boolean(),
}
SCORE: dict[str, SchemaField] = {
    "text": TEXTS_FIELD,
    "target": TEXTS_FIELD,
}


def parse_body(body: bytes, fields: Mapping[str, SchemaField]) -> dict[str, Any]:
    """The fields of a request, each with a value.

    Args:
      body: JSON in UTF-8.
      fields: those that it may have.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        given = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {error or 'nested too deep'}") from None
    if not isinstance(given, dict):
        raise APIError(400, f"the body is {_shown(given)}; it is to be a JSON object")
    for name in given:
        if name not in fields:
            known = f"{nearest(name[:MAX_QUOTED], fields)}; known are {', '.join(fields)}"
            param = name[:MAX_QUOTED].encode(errors="replace").decode()  # a lone surrogate has no UTF-8
            message = f"there is no field {_shown(name)}{known}"
            raise APIError(400, message, param=param, code="unknown_parameter")
    values = {}
    for name, field in fields.items():
        value = given.get(name)
        if value is None:
            if field.needed:
                message = f"{name} is missing; it is to be {field.words}"
                raise APIError(400, message, param=name, code="missing_required_parameter")
            value = field.default
        elif not field.fits(value):
            message = f"{name} is {_shown(value)}; it is to be {field.words}"
            raise APIError(400, message, param=name, code=field.code)
        values[name] = value
    return values


def as_list(value: str | list[str] | None) -> list[str]:
    """One text or many, as many."""
    return [] if value is None else [value] if isinstance(value, str) else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except RecursionError:  # it could just be read
        return "nested too deep"
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."
