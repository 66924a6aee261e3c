"""Staging: a Python function of named tensors becomes one SPMD program.

`spmd(fn, mesh, layout)` is a `Program`. Called with whole tensors it places them, traces `fn` once per
signature inside `jax.shard_map` (there, tensors are slices and ops add the collectives that their dims
call for), compiles, runs, and hands back whole tensors. Nothing is interpreted: the jaxpr is the graph.

Eager execution is the same thing, one op at a time: an op called outside a program is staged as a program
of its own on the mesh and layout of its operands, and cached.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from . import context
from .captures import CapturedFunction
from .context import Context
from .errors import LayoutError, LayoutWarning, ProgramError, WeftError, nearest, user_frame
from .forms import RetraceOnMesh, capture_key, check_same_placement
from .layout import Layout
from .mesh import Mesh
from .placement import device_put, partition_spec, place, without_values
from .signature import (
    CONCRETIZATION_ERRORS,
    NUMBER_TYPES,
    Static,
    check_arguments,
    format_signature,
    is_argument_leaf,
    is_dynamic,
    number_names,
    retrace_reason,
    unhashable_error,
    unknown_value_error,
)
from .staging import (
    RestageWithCaptures,
    Staged,
    StagedCall,
    add_output,
    argument_builders,
    flatten_outputs,
    input_slice,
    rebuild_outputs,
)
from .tensor import Tensor, check_has_values, check_shape, describe, format_call, stored_splits
from .types import weak_type

MAX_CACHED_TRACES = 512  # traces of an eager op that takes functions; the oldest is dropped for a new one
MAX_CAPTURE_TRACES = (
    3  # to find what a function captures: one is enough, unless it captures what it did not before
)


@dataclass(frozen=True)
class Trace:
    """One trace of a program: why it was needed, and for what signature."""

    reason: str
    signature: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.signature}"


class Program:
    """A function staged for a mesh and a layout; made by `wf.spmd`.

    Attributes:
      mesh, layout: what it is staged for.
      traces: one entry for each time the function was traced, saying why.

    >>> import weft as wf
    >>> program = wf.spmd(lambda x: wf.sum(x, "d"), "data=4 model=2", "batch:data d:model")
    >>> program(wf.ones("batch=4 d=6"))
    f32[batch=4/data·4] [6., 6., 6., 6.]
    >>> print(program.traces[0])
    first call: f32[batch=4, d=6]
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Any = None,
        layout: Any = None,
        *,
        static: Sequence[int | str] = (),
        donate: Sequence[int | str] = (),
        eager: bool = False,
        static_numbers: tuple[type, ...] = (),
    ):
        self.fn = fn
        self.mesh = Mesh.of(mesh)
        self.layout = Layout.of(layout)
        self.layout.check(self.mesh)
        self.static = (static,) if isinstance(static, int | str) else tuple(static)
        self.donate = (donate,) if isinstance(donate, int | str) else tuple(donate)
        if self.static or self.donate:
            self._check_chosen()
        self.traces: list[Trace] = []
        self._eager, self._static_numbers = eager, static_numbers
        self._staged: dict[Any, Staged] = {}
        self._awaits = self.mesh.size > 1 and jax.default_backend() == "cpu"
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", repr(self.fn))
        return f'<program {name} on mesh "{self.mesh}" with layout "{self.layout}">'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = context.current()
        if outer is not None:
            return self._nested(outer, args, kwargs)
        return self._settled(self._run, args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        staged, arrays = self._prepare(args, kwargs, runs=True)
        # Not left to JAX: on several devices it would end the process.
        gone = sum(isinstance(a, jax.Array) and not context.is_traced(a) and a.is_deleted() for a in arrays)
        if gone:
            raise self._used_up(gone, args, kwargs)
        if staged.donated:
            self._check_given_once(staged, arrays, args, kwargs)
        try:
            outs = staged.call(*arrays)
        except jax.errors.UnexpectedTracerError:
            if not any(one.schedule == "1f1b" for one in staged.call.last["context"].pipelines):
                raise
            raise self._held(args, kwargs) from None
        # Virtual CPU devices deadlock when calls pile up: at most one is in flight.
        if self._awaits and outs and not context.is_traced(outs[0]):
            jax.block_until_ready(outs)
        return rebuild_outputs(staged, outs, self.mesh, self.layout)

    def reached_values(self) -> tuple[Any, ...]:
        """What a nested call depends on (`core/captures.py`)."""
        return self.fn, self.mesh, self.layout

    def __get__(self, owner: Any, _: Any = None) -> Any:
        """Of a method: the program with its owner as the first argument."""
        return self if owner is None else _Method(self, owner)

    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """The traced program. Arguments may be `wf.spec`s, and the mesh needs no devices."""
        return self._traced(args, kwargs).jaxpr

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's lowered form (`.as_text()` is StableHLO)."""
        return self._traced(args, kwargs).lower()

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's compiled form (`.as_text()` is HLO, `.memory_analysis()` its memory)."""
        self.mesh.require_devices()
        return self.lower(*args, **kwargs).compile()

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """The program through `jax.export`; `.serialize()` gives bytes."""
        self.mesh.require_devices()
        return self._settled(self._exported, args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """What one call will do and cost, before it runs: a `Plan`.

        Arguments may be `wf.spec`s, and the mesh needs no devices.
        """
        from ..plan.plan import plan_program

        return self._settled(functools.partial(plan_program, self), args, kwargs)

    def collectives(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Every collective of one call: kind, axes, bytes on one device, how often it runs."""
        from ..plan.events import extract_collectives

        return extract_collectives(self.jaxpr(*args, **kwargs), self.mesh)

    # Inside

    def _settled(self, use: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """Use the staged function; stage it anew where jit traces again and it captures other tensors."""
        for _ in range(MAX_CAPTURE_TRACES):
            try:
                return use(args, kwargs)
            except RestageWithCaptures as anew:
                found = anew.found
        raise _unsettled(found).located(self._asked(args, kwargs))

    def _traced(self, args: Any, kwargs: Any) -> Any:
        return self._settled(self._traced_once, args, kwargs)

    def _traced_once(self, args: Any, kwargs: Any) -> Any:
        staged, arrays = self._prepare(args, kwargs)
        return staged.call.trace(*self._abstract(arrays))

    def _exported(self, args: Any, kwargs: Any) -> Any:
        from jax import export

        staged, arrays = self._prepare(args, kwargs)
        return export.export(staged.call.jitted)(*self._abstract(arrays))

    def _abstract(self, arrays: list[Any]) -> list[Any]:
        """The same with numbers as arrays, which have a shape and a type."""
        return [a if not isinstance(a, NUMBER_TYPES) else jnp.asarray(a) for a in arrays]

    def _nested(self, outer: Context, args: Any, kwargs: Any) -> Any:
        mine = (self.mesh, self.layout)
        if mine not in ((outer.mesh, outer.layout), (Mesh(), Layout())):
            if outer.adopts and not outer.is_over:
                raise RetraceOnMesh(
                    *mine
                )  # an eager vmap or scan around a program runs where the program does
            raise LayoutError(
                f'a program on mesh "{self.mesh}" with layout "{self.layout}" was called inside one '
                f'on mesh "{outer.mesh}" with layout "{outer.layout}"',
                rule="a nested program has the mesh and layout of the one around it",
                hint="stage both alike, or call the plain function inside",
            ).located(self._asked(args, kwargs))
        return self.fn(*args, **kwargs)

    def _prepare(self, args: Any, kwargs: Any, *, runs: bool = False) -> tuple[Staged, list[Any]]:
        try:
            if runs and self.mesh.size > 1:
                self.mesh.require_devices()
            staged, arrays = self._find(args, kwargs)
            if runs and any(isinstance(a, jax.ShapeDtypeStruct) for a in arrays):
                leaves = jax.tree.leaves((args, kwargs), is_leaf=is_argument_leaf)
                check_has_values(*leaves, *staged.captured)
            return staged, arrays
        except WeftError as error:
            # An op that runs eagerly says itself what was asked.
            raise error.located("" if self._eager else self._asked(args, kwargs)) from None
        except CONCRETIZATION_ERRORS as error:
            numbers = [] if self._eager else number_names(self.fn, args, kwargs)
            raise unknown_value_error(error, numbers).located_in(
                error.__traceback__, self._asked(args, kwargs)
            ) from error

    def _asked(self, args: Any, kwargs: Any) -> str:
        name = getattr(self.fn, "__name__", "")
        return format_call(name if self._eager else f"program {name}", args, kwargs)

    def _used_up(self, gone: int, args: Any, kwargs: Any) -> ProgramError:
        """An error for arguments whose memory an earlier call has used."""
        return ProgramError(
            f"{gone} of the arrays given are no longer there",
            rule="what is donated to a program is used up by the call, and its results take its place",
            hint="go on with the results: model, state = step(model, state); or stage it without donate=",
        ).located(self._asked(args, kwargs))

    def _check_given_once(self, staged: Staged, arrays: list[Any], args: Any, kwargs: Any) -> None:
        """An error if an array that is donated is also another input: the call would read what it used up."""
        places: dict[int, list[int]] = {}
        for n, array in enumerate(arrays):
            if isinstance(array, jax.Array) and not context.is_traced(array):
                places.setdefault(id(array), []).append(n)
        shared = [held for held in places.values() if len(held) > 1 and {*held} & {*staged.donated}]
        if not shared:
            return
        names = self._input_names(staged, args, kwargs)
        raise ProgramError(
            f"{len(shared)} of the donated arrays are given more than once",
            *(f"one array: {', '.join(names[n] for n in held)}" for held in shared),
            rule="what is donated to a program is used up by the call, so it can be no other input of it",
            hint="donate a copy, jax.tree.map(jnp.copy, t); or stage it without donate=",
        ).located(self._asked(args, kwargs))

    def _input_names(self, staged: Staged, args: Any, kwargs: Any) -> list[str]:
        """What the inputs of a call are, in their order."""
        if self.static:
            args, kwargs = self._mark_static(args, kwargs)
        leaves = jax.tree.leaves_with_path((args, kwargs), is_leaf=is_argument_leaf)
        given = [path for path, leaf in leaves if is_dynamic(leaf, self._static_numbers)]
        names = [f"argument {jax.tree_util.keystr(path[1:])}" for path in given]
        return names + [f"the captured {describe(t)}" for t in staged.captured]

    def _held(self, args: Any, kwargs: Any) -> ProgramError:
        """An error for a gradient that a pipeline can't give: JAX finds a value where its trace is over."""
        return ProgramError(
            'the function of a pipeline with the schedule "1f1b" holds from outside what is differentiated',
            rule="this schedule gives gradients of x, of the layers' parameters and of what is shared",
            hint='give what the function holds as shared=(…,); or schedule="gpipe"',
        ).located(self._asked(args, kwargs))

    def _find(self, args: Any, kwargs: Any) -> tuple[Staged, list[Any]]:
        if self.static:
            args, kwargs = self._mark_static(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_argument_leaf)
        key: list[Any] = [tree]
        arrays: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                array = self._array_of(leaf)
                key.append((leaf.dims, array.dtype, weak_type(array), leaf.role))
                arrays.append(array)
            elif isinstance(leaf, CapturedFunction):
                key.append(leaf.key)
                arrays += map(self._array_of, leaf.tensors)
            elif is_dynamic(leaf, self._static_numbers):
                if isinstance(leaf, np.ndarray | jax.Array):
                    leaf = self._on_all(leaf)
                key.append((np.shape(leaf), getattr(leaf, "dtype", type(leaf)), weak_type(leaf)))
                arrays.append(leaf)
            else:
                key.append(leaf if isinstance(leaf, Static) else Static(leaf))
        try:
            staged = self._staged.get(tuple(key))
        except TypeError:
            self._check_arguments(args, kwargs)
            raise unhashable_error(key) from None
        if staged is None or staged.is_stale:
            self._check_arguments(args, kwargs)
            staged = self._stage(leaves, tree, tuple(key), arrays)
        arrays += [t._array for t in staged.captured]
        return staged, arrays

    def _array_of(self, t: Tensor) -> Any:
        is_here = t.mesh is self.mesh and t.layout is self.layout
        is_anywhere = t.mesh is None and self.mesh.is_anywhere  # nothing to move or to pad
        if t.splits is not None or not (is_here or is_anywhere):
            return self._place(t)._array
        check_shape(t)
        return t._array

    def _check_arguments(self, args: Any, kwargs: Any) -> None:
        """An error for an object among the arguments; an eager op checks its arguments itself."""
        if not self._eager:
            check_arguments(self.fn, jax.tree.leaves_with_path((args, kwargs), is_leaf=is_argument_leaf))

    def _on_all(self, array: Any) -> Any:
        """A raw array on all devices, where a call's results are too: JAX tells the two types apart."""
        array = jnp.asarray(array)
        mesh = self.mesh.jax_mesh
        is_free = self.mesh.size == 1 and not self.mesh.is_one_named
        if is_free or not self.mesh.has_devices or context.is_traced(array):
            return array
        if isinstance(array.sharding, NamedSharding) and array.sharding.mesh == mesh:
            return array
        return device_put(array, NamedSharding(mesh, PartitionSpec()))

    def _place(self, t: Tensor) -> Tensor:
        if t.is_slice:
            raise ProgramError(
                f"{describe(t)} is a slice from inside another program",
                rule="a program's tensors can be used inside it only; return them to use them outside",
                hint="return the tensor from the program that made it",
            )
        check_shape(t)
        if not self._eager and t.mesh is not None and t.mesh != self.mesh:
            check_same_placement(t, Context(self.mesh, self.layout))
        return self._put(t)

    def _put(self, t: Tensor) -> Tensor:
        """A tensor where the program wants it; its shape only, on a mesh that is good for planning."""
        return place(t if self.mesh.has_devices else without_values(t), self.mesh, self.layout)

    def _mark_static(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        names = list(inspect.signature(self.fn).parameters)
        places = {names.index(s) if isinstance(s, str) and s in names else s for s in self.static}
        args = tuple(Static(a) if i in places else a for i, a in enumerate(args))
        chosen = {names[p] if isinstance(p, int) and p < len(names) else p for p in places}
        kwargs = {k: Static(v) if k in chosen else v for k, v in kwargs.items()}
        return args, kwargs

    def _check_chosen(self) -> None:
        """An error if `static` or `donate` speak of arguments that the function has not."""
        try:
            parameters = inspect.signature(self.fn).parameters
        except (TypeError, ValueError):  # a builtin
            return
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
            return
        for word, chosen in (("static", self.static), ("donate", self.donate)):
            wrong = [
                c
                for c in chosen
                if (c not in parameters if isinstance(c, str) else not 0 <= c < len(parameters))
            ]
            if wrong:
                names = ", ".join(f"{c}{nearest(str(c), parameters)}" for c in wrong)
                raise ProgramError(
                    f"{word}= speaks of argument {names}",
                    f"{len(parameters)} arguments: {', '.join(parameters) or 'none'}",
                    rule="arguments are chosen by position, counted from 0, or by name",
                    hint=f"for example {word}=(0,)",
                )

    def _stage(self, leaves: list[Any], tree: Any, key: Any, arrays: list[Any]) -> Staged:
        if not self._eager:
            is_known = key in self._staged
            why = "it captures other tensors" if is_known else retrace_reason(key, list(self._staged))
            self.traces.append(Trace(why, format_signature(key)))
        donated = self._donated(leaves, tree)
        captured: list[tuple[Tensor, Tensor]] = []
        for _ in range(MAX_CAPTURE_TRACES):
            staged = self._trace(leaves, tree, captured, donated)
            found, met = staged.call.begin(arrays + [t._array for _, t in captured])
            if not found:
                break
            # They become inputs: trace again with them.
            captured = captured + [(t, self._put(t)) for t in found]
        else:
            raise _unsettled(found)
        staged.is_settled = True
        has_functions = any(isinstance(leaf, CapturedFunction) for leaf in leaves)
        if any(context.is_traced(t._held) for t, _ in captured) or (captured and has_functions):
            return staged  # good for this call only
        if has_functions and len(self._staged) >= MAX_CACHED_TRACES:
            del self._staged[next(iter(self._staged))]
        self._staged[key] = staged
        if not self._eager:
            self._warn_unused(met)
        return staged

    def _trace(self, leaves: list[Any], tree: Any, captured: list[Any], donated: Any) -> Staged:
        staged = Staged(None, captured=[placed for _, placed in captured], donated=donated)
        templates = argument_builders(leaves, self._static_numbers)
        last: dict[str, Any] = {}
        in_specs = [spec for leaf in leaves for spec in self._in_specs(leaf)]
        in_specs += [partition_spec(stored_splits(t)) for t in staged.captured]
        out_specs: list[Any] = []

        def body(*arrays: Any) -> list[Any]:
            program = Context(self.mesh, self.layout, adopts=self._eager and self.mesh.is_anywhere)
            last["context"] = program
            with context.entered(program), program.frame():
                rest = list(arrays)
                inputs = [t(rest, program) for t in templates]
                for (whole, placed), array in zip(captured, rest, strict=True):
                    inner = input_slice(placed, array, program)
                    program.captured_inputs[capture_key(whole)] = inner
                args, kwargs = jax.tree.unflatten(tree, inputs)
                outs, specs = flatten_outputs(staged, self.fn(*args, **kwargs))
                for job in program.jobs:
                    for leaf in job.inputs:
                        add_output(leaf, outs, specs)
            program.is_over = True
            if program.captured and staged.is_settled:
                staged.is_stale = True
                raise RestageWithCaptures(list(program.captured.values()))
            out_specs[:] = specs
            return outs

        def run(*arrays: Any) -> list[Any]:
            outs = (body if self.mesh.is_whole else mapped)(*arrays)
            jobs = last["context"].jobs
            if jobs:
                count = sum(leaf[0] == "now" for leaf in staged.out_leaves)
                rest = iter(outs[count:])
                for job in jobs:
                    job.run(rest, self.mesh, self.layout)
                promised = [leaf[1] for leaf in staged.out_leaves if leaf[0] == "later"]
                outs = outs[:count] + [p.job.outputs[p.leaf] for p in promised]
            return outs

        def mapped(*arrays: Any) -> list[Any]:
            # shard_map looks at out_specs again after tracing the body, which fills the list in: the
            # function need not be traced once more just to learn what it returns.
            out_specs.clear()
            return jax.shard_map(
                body,
                mesh=self.mesh.jax_mesh,
                in_specs=tuple(in_specs),
                out_specs=out_specs,
                check_vma=True,
            )(*arrays)

        run.__name__ = run.__qualname__ = getattr(self.fn, "__name__", "program")
        where = NamedSharding(self.mesh.jax_mesh, PartitionSpec()) if self.mesh.is_one_named else None
        staged.call = StagedCall(jax.jit(run, donate_argnums=donated, out_shardings=where), last)
        return staged

    def _in_specs(self, leaf: Any) -> list[PartitionSpec]:
        """How the arrays of an argument are split."""
        if isinstance(leaf, Tensor | CapturedFunction):
            tensors = [leaf] if isinstance(leaf, Tensor) else leaf.tensors
            return [partition_spec(self.layout.splits(t.dims, self.mesh, t.role)) for t in tensors]
        return [PartitionSpec()] if is_dynamic(leaf, self._static_numbers) else []

    def _donated(self, leaves: list[Any], tree: Any) -> tuple[int, ...]:
        if not self.donate:
            return ()
        args, kwargs = jax.tree.unflatten(tree, range(len(leaves)))
        given = dict(enumerate(args)) | kwargs
        for position, name in enumerate(inspect.signature(self.fn).parameters):
            if position in given or name in given:  # else it has its default
                given[position] = given[name] = given.get(position, given.get(name))
        chosen = {n for c in self.donate for n in jax.tree.leaves(given.get(c))}
        dynamic = [n for n, leaf in enumerate(leaves) if is_dynamic(leaf, self._static_numbers)]
        return tuple(place for place, n in enumerate(dynamic) if n in chosen)

    def _warn_unused(self, met: dict[str, Any]) -> None:
        self.layout.check_dims(met)
        frame = user_frame()
        # Run as `python -m weft.cli.main`, no frame is the user's.
        place = ("<command line>", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        for name in sorted(self.layout.dim_names - set(met)):
            axes = self.layout.rules_for("param").get(name)
            axes = axes or self.layout.rules_for("optimizer")[name]
            text = LayoutError(
                f"rule {name}:{'+'.join(axes)} has no effect: no tensor of the program has a dim "
                f"{name}{nearest(name, met)}",
                rule="a rule splits the dim that it names, wherever that occurs",
                hint=f"the dims are {', '.join(sorted(met)) or 'none'}; "
                "correct the rule's name, or drop the rule",
            ).located(repr(self).strip("<>"))
            warnings.warn_explicit(str(text), LayoutWarning, *place)


def _unsettled(found: list[Tensor]) -> ProgramError:
    """An error for a function whose captured tensors can't be made inputs: each trace meets other ones."""
    return ProgramError(
        f"the function captures other tensors each time that it is traced: {', '.join(map(describe, found))}",
        rule="tensors that a program captures become inputs: one trace finds them, the next one uses them",
        hint="give what changes from call to call as an argument",
    )


class _Method:
    """A program that is a method: its owner is the first argument of calls, plans and the rest."""

    def __init__(self, program: Program, owner: Any):
        self.program, self.owner = program, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(self.owner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.program, name)
        return functools.partial(value, self.owner) if inspect.ismethod(value) else value


# The public function


def spmd(
    fn: Callable[..., Any] | None = None,
    mesh: Any = None,
    layout: Any = None,
    *,
    static: Sequence[int | str] = (),
    donate: Sequence[int | str] = (),
) -> Any:
    """Stage a function of named tensors for a mesh and a layout.

    Args:
      fn: takes and returns pytrees of tensors; left out, `spmd` is a decorator.
      mesh: a `Mesh`, or what makes one.
      layout: a `Layout`, or what makes one.
      static: positions or names of arguments that are part of the signature: numbers that Python needs to
        know, and objects that are not pytrees. They are hashed and compared by value.
      donate: positions or names of arguments whose memory the program may reuse.

    Returns:
      A `Program`: call it with whole tensors.

    >>> import weft as wf
    >>> double = wf.spmd(lambda x: x + x, wf.Mesh(), wf.Layout())
    >>> double(wf.arange(wf.Dim("a", 3)))
    i32[a=3] [0, 2, 4]
    """
    if fn is None:
        return functools.partial(spmd, mesh=mesh, layout=layout, static=static, donate=donate)
    try:
        if not callable(fn):
            raise ProgramError(
                f"{fn!r} is no function",
                rule="what is staged takes and returns trees of tensors",
                hint="wf.spmd(fn, mesh, layout); leave fn out to use it as a decorator",
            )
        return Program(fn, mesh, layout, static=static, donate=donate)
    except WeftError as error:
        more = {k: v for k, v in {"static": static, "donate": donate}.items() if v != ()}
        raise error.located(format_call("spmd", (fn, mesh, layout), more)) from None
