"""The schema of requests: the fields of each JSON body with their checks, and errors in OpenAI's format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from weft.core.errors import WeftError, nearest
from weft.core.field_types import FieldType, Range
from weft.core.fields import field_types
from weft.generate.config import GenerationConfig


class APIError(Exception):
    """A rejected request, in the format of OpenAI's API.

    Attributes:
      status: the HTTP status.
      message: the reason.
      kind: OpenAI's `type`.
      param: the invalid field.
      headers: further headers of the response.
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
    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body of the response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


@contextlib.contextmanager
def as_api_error(param: str | None, code: str | None = None) -> Iterator[None]:
    """Turn Weft's errors into responses with status 400."""
    try:
        yield
    except WeftError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        raise APIError(400, f"{error.fact}; {error.rule}{hint}", param=param, code=code) from None


@dataclass(frozen=True)
class SchemaField:
    """One field of a request.

    Attributes:
      description: the valid values, for messages.
      is_valid: checks a value.
      default: the value if the field is omitted or null.
      required: True if there is no default.
      code: OpenAI's `code` of the error for an invalid value.
      kind: the type, if the field has one; it describes why a value is invalid.
    """

    description: str
    is_valid: Callable[[Any], bool]
    default: Any = None
    required: bool = False
    code: str = "invalid_value"
    kind: FieldType | None = None

    def describe(self, value: object) -> str:
        """The valid values, for a message about this invalid one."""
        return self.description if self.kind is None else self.kind.describe(value)


def schema_field(kind: FieldType, default: Any = None) -> SchemaField:
    """A field of this type; null, as in every field, stands for the default."""
    return SchemaField(kind.describe(), kind.required.accepts, default, kind=kind)


def of_type(annotation: Any, default: Any = None) -> SchemaField:
    """A field that an annotation describes, `Annotated[int, Range(at_least=1)]`."""
    return schema_field(FieldType.of(annotation), default)


def of_config(name: str, default: Any = None) -> SchemaField:
    """A field with the type and range of a field of `GenerationConfig`. OpenAI's defaults differ."""
    return schema_field(field_types(GenerationConfig)[name], default)


def unsupported(default: bool | int | None) -> SchemaField:
    """A field of OpenAI's API that is not supported: only its default is valid."""

    def is_valid(x: object) -> bool:
        return x == default and (type(x) is bool) == (type(default) is bool)  # True == 1 in Python

    description = f"{json.dumps(default)}: other values are not supported"
    return SchemaField(description, is_valid, default, code="unsupported_parameter")


def _is_text(x: object) -> bool:
    return isinstance(x, str) and not any("\ud800" <= c <= "\udfff" for c in x)


def _is_texts(x: object) -> bool:
    return _is_text(x) or (isinstance(x, list) and 0 < len(x) <= MAX_TEXTS and all(map(_is_text, x)))


def _is_stop(x: object) -> bool:
    stops = x if isinstance(x, list) else [x]
    return len(stops) <= MAX_STOPS and all(_is_text(stop) and stop for stop in stops)


MAX_TEXTS, MAX_STOPS = 64, 4  # in one request
MAX_QUOTED = 60  # characters of an invalid value that a message repeats
MAX_UNKNOWN = 4  # unknown fields that a message names
Count = Annotated[int, Range(at_least=1, below=2**31)]
TEXTS_FIELD = SchemaField(f"a text, or a list of 1 to {MAX_TEXTS} texts", _is_texts, required=True)
STRING_FIELD = SchemaField("a text", _is_text)
COUNT_FIELD = of_type(Count)

COMPLETION_FIELDS: dict[str, SchemaField] = {
    "prompt": TEXTS_FIELD,
    "max_tokens": of_config("limit"),
    "temperature": of_config("temperature", 1.0),
    "top_p": of_config("top_p", 1.0),
    "top_k": of_config("top_k", 0),
    "repetition_penalty": of_config("penalty", 1.0),
    "seed": of_config("seed"),
    "stop": SchemaField(f"a text, or a list of at most {MAX_STOPS} texts, none of them empty", _is_stop),
    "stream": of_type(bool, False),
    "stream_options": SchemaField(
        'an object with "include_usage": true or false',
        lambda x: (
            isinstance(x, dict) and set(x) <= {"include_usage"} and all(type(v) is bool for v in x.values())
        ),
    ),
    "logprobs": of_type(Annotated[int, Range(at_least=0, at_most=1)]),
    "beams": COUNT_FIELD,
    "n": of_type(Count, 1),
    "model": STRING_FIELD,
    "user": STRING_FIELD,
    "echo": unsupported(False),
    "best_of": unsupported(1),
    "frequency_penalty": unsupported(0),
    "presence_penalty": unsupported(0),
    "suffix": unsupported(None),
    "logit_bias": unsupported(None),
}
TRANSLATE_FIELDS: dict[str, SchemaField] = {
    "text": TEXTS_FIELD,
    "beams": COUNT_FIELD,
    "best": of_type(Count, 1),
    "max_tokens": of_config("limit"),
    "stream": of_type(bool, False),
    "attention": of_type(bool, False),
}
SCORE_FIELDS: dict[str, SchemaField] = {
    "text": TEXTS_FIELD,
    "target": TEXTS_FIELD,
}


def parse_body(body: bytes, fields: Mapping[str, SchemaField]) -> dict[str, Any]:
    """Parse and check the body of a request; the result has a value for every field.

    Args:
      body: JSON in UTF-8.
      fields: the schema.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        given = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {error or 'nested too deep'}") from None
    if not isinstance(given, dict):
        raise APIError(400, f"the body is {_quoted(given)}; it must be a JSON object")
    values = {}
    errors: list[tuple[str, str, str]] = []  # message, field and code; all are reported at once
    unknown = [name for name in given if name not in fields][:MAX_UNKNOWN]
    for name in unknown:
        known = f"; the fields are {', '.join(fields)}" if name == unknown[-1] else ""
        message = f"there is no field {_quoted(name)}{nearest(name[:MAX_QUOTED], fields)}{known}"
        param = name[:MAX_QUOTED].encode(errors="replace").decode()  # a lone surrogate has no UTF-8
        errors.append((message, param, "unknown_parameter"))
    for name, field in fields.items():
        value = given.get(name)
        if value is None:
            if field.required:
                message = f"{name} is missing; it must be {field.description}"
                errors.append((message, name, "missing_required_parameter"))
            value = field.default
        elif not field.is_valid(value):
            message = f"{name} is {_quoted(value)}; it must be {field.describe(value)}"
            errors.append((message, name, field.code))
        values[name] = value
    if errors:
        _, param, code = errors[0]  # OpenAI's format has room for one field
        raise APIError(400, "\n".join(message for message, *_ in errors), param=param, code=code)
    return values


def as_list(value: str | list[str] | None) -> list[str]:
    """One text or many, as a list."""
    return [] if value is None else [value] if isinstance(value, str) else value


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _quoted(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except RecursionError:  # a value can be just shallow enough for the parser
        return "nested too deep"
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."
