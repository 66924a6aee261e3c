"""Calls that do not match a signature: an error that has the signature and an example.

    x.sum(axis=0)

    TensorTypeError: sum() has no argument axis
      the arguments are sum(x, dims=None)
      in sum(f32[batch=4, d=3], axis=0)
      at example.py:3

    hint: a dim is given by its name, for example "batch"

Arguments are compared with the signature only after Python raised a TypeError, so a correct call costs
nothing. The examples are those of the docstrings.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from .errors import TensorTypeError, WeftError, is_user_frame, nearest, user_frame

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

# Arguments of functions of NumPy, JAX and PyTorch that Weft's functions do not have, and a hint for each.
KEYWORDS = {
    name: hint
    for names, hint in (
        ("axis axes dim dims start_dim end_dim in_axes", 'a dim is given by its name, for example "batch"'),
        ("keepdims keepdim", "omit it: a dim that an operand lacks is broadcast by name"),
        ("ddof correction unbiased", "Weft divides by n; multiply the variance by n / (n - 1)"),
        ("out inplace", "use the result: tensors are immutable, and an op returns a new one"),
        ("num length", 'the number of elements is the size of a dim: wf.Dim("a", 5)'),
        ("n", "the number of elements is an argument size=, or the size of a dim"),
        ("diagonal offset", "the diagonal is called k="),
        ("a_min", "the bounds are called min= and max="),
        ("a_max", "the bounds are called min= and max="),
        ("reverse", "for descending order, descending=True"),
        ("where", "select first: wf.where(condition, x, 0)"),
        ("dtype", "convert the result: x.astype(jnp.float32)"),
        ("device devices mesh sharding", "place the result: wf.place(x, mesh, layout)"),
        ("in_shardings out_shardings in_specs out_specs", "the layout splits tensors by the names of dims"),
        ("static_argnums static_argnames", 'static arguments are called static=: wf.spmd(fn, static=("n",))'),
        ("donate_argnums donate_argnames", "donated arguments are called donate=: wf.spmd(fn, donate=(0,))"),
        ("training train deterministic", "call it in training only"),
        ("lr", "the rate is the first argument, learning_rate"),
        ("betas", "the decays are called beta1= and beta2="),
        ("eps", "the tolerances are called rtol= and atol=, the constant of an optimizer epsilon="),
        ("hardware", "the hardware is an argument of the plan: program.plan(x).explain(hardware)"),
        ("use_bias", "it is called bias="),
    )
    for name in names.split()
}
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Python's messages for a call that does not match the signature of a function.
_WRONG_CALL = re.compile(r"\(\) (takes|missing|got) |object is not callable$")


def check_function(fn: object, name: str, hint: str = "") -> None:
    """Raise an error unless an argument is a function; most often it was called too early."""
    if not callable(fn):
        raise TensorTypeError(
            f"{name} was given {_format(fn)}, which is not a function",
            rule=f"{name} takes the function itself, and calls it later",
            hint=hint or f"pass the function without its arguments: wf.{name}(loss), not wf.{name}(loss(x))",
        ).located(name)


def checks_arguments(fn: Function) -> Function:
    """Decorate a public function so that a call that does not match its signature is reported.

    Unlike `reports_call`, it leaves the call of an error as it is: the function names it itself.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except WeftError as error:
            if not error.call and user_frame() is not None:
                error.located(_format_call(fn.__name__, args, kwargs))
            raise
        except TypeError as error:
            name = fn.__name__ if fn.__name__ != "__call__" else type(args[0]).__name__
            raise_call_error(fn, name, args, kwargs, error)

    return call  # type: ignore[return-value]


def reports_construction(cls: Class) -> Class:
    """Decorate a class so that errors of its constructor report the call and the user's line."""
    construct = cls.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except WeftError as error:
            error.located(_format_call(type(self).__name__, args, kwargs) if not error.call else "")
            raise
        except TypeError as error:
            name = type(self).__name__
            raise_call_error(functools.partial(construct, self), name, args, kwargs, error, cls.__doc__ or "")

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def raise_call_error(
    fn: Callable[..., Any],
    name: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: TypeError,
    doc: str = "",
    call: str = "",
    hint: str = "",
) -> NoReturn:
    """Raise the error for a TypeError of a call: the same one, unless arguments don't match a signature.

    Args:
      fn: the function that was called.
      name: its public name.
      args, kwargs: the arguments.
      error: Python's error.
      doc: the docstring that has an example; by default the function's.
      call: the failing call; by default `name` with the arguments.
      hint: the hint if no argument has one of its own; by default the example.
    """
    if isinstance(error, WeftError):
        raise error
    name = name.lstrip("_")
    hint = hint or _example(fn, name, doc or fn.__doc__ or "")
    call = call or _format_call(name, args, kwargs)
    if found := _signature_error(fn, name, args, kwargs, hint):
        raise found.located(call) from None
    if found := _inner_call_error(name, error, hint):
        raise found.located(call) from error
    raise error


def _signature_error(
    fn: Callable[..., Any], name: str, args: Sequence[object], kwargs: Mapping[str, object], hint: str
) -> TensorTypeError | None:
    """The error for arguments that a function does not take; None if it takes them."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have no signature that Python can read
        return None
    try:
        signature.bind(*args, **kwargs)
        return None
    except TypeError:
        pass
    if next(iter(signature.parameters), "") == "self":
        signature, args = _without_self(signature), args[1:]
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    accepts_any = {p.kind for p in parameters}
    unknown = [k for k in kwargs if k not in names and inspect.Parameter.VAR_KEYWORD not in accepts_any]
    if unknown:
        fact = f"{name}() has no argument {', '.join(k + nearest(k, names) for k in unknown)}"
        close = [nearest(k, names).removeprefix(" (did you mean ").removesuffix("?)") for k in unknown]
        hints = [KEYWORDS[k] for k in unknown if k in KEYWORDS] + [f"write {k}=" for k in close if k]
        hint = hints[0] if hints else hint
    elif len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in accepts_any:
        most = f"{len(positional)} argument{'s' if len(positional) != 1 else ''}"
        fact = f"{name}() takes {most} by position, and {len(args)} were given"
    else:
        given = {p.name for p in positional[: len(args)]} | set(kwargs)
        required = [p.name for p in parameters if p.default is p.empty and p.kind not in VARIABLE]
        missing = [one for one in required if one not in given]
        twice = [p.name for p in positional[: len(args)] if p.name in kwargs]
        fact = (
            f"{name}() needs {' and '.join(missing)}"
            if missing
            else f"{name}() has two values for {twice[0]}"
        )
    return TensorTypeError(fact, rule=f"the arguments are {_format_signature(name, signature)}", hint=hint)


def _inner_call_error(name: str, error: TypeError, hint: str) -> TensorTypeError | None:
    """The error if a function among the arguments can't be called as `name` calls it; otherwise None."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    in_user_code = innermost is None or is_user_frame(innermost.tb_frame)
    if in_user_code or not _WRONG_CALL.search(str(error)):
        return None
    called = re.sub(r"^\S*?([\w<>]+\(\))", r"\1", str(error))
    return TensorTypeError(
        f"{name} called a function that it was given: {called}",
        rule="a function is passed without calling it, and takes the arguments that it is called with",
        hint=hint,
    )


def _example(fn: Callable[..., Any], name: str, doc: str) -> str:
    """The first call of the function in the examples of a docstring; without one, its required arguments."""
    for line in re.findall(r"^\s*>>> (.*)$", doc, re.MULTILINE):
        found = re.search(rf"(?<![\w.])[\w.]*\b{re.escape(name)}\(", line)
        if found is None:
            continue
        for end in range(found.end(), len(line) + 1):
            call = line[found.start() : end]
            if call.count("(") == call.count(")"):
                return f"for example {call}"
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return f"help({name}) describes the arguments"
    signature = _without_self(signature)
    required = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in VARIABLE]
    short = signature.replace(parameters=required) if required else signature
    return f"call {_format_signature(name, short)}"


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=[p for n, p in signature.parameters.items() if n != "self"])


def _format_signature(name: str, signature: inspect.Signature) -> str:
    """`sum(x, dims=None)`, without annotations."""
    parts, keyword_only = [], False
    for p in signature.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            keyword_only = True
        elif p.kind is p.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        mark = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        parts.append(f"{mark}{p.name}" + ("" if p.default is p.empty else f"={_format(p.default)}"))
    text = ", ".join(parts)
    return f"{name}({text})" if len(text) < 200 else f"{name}({', '.join(signature.parameters)})"


def _format_call(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    from .describe import format_call  # imported here because describe.py uses this module's decorators

    return format_call(name, args, kwargs)


def _format(value: object) -> str:
    return _format_call("", (value,), {})[1:-1]
