"""Programs: stage a Python function of named tensors as one SPMD program.

`spmd(fn, mesh, layout)` is a `Program`. Called with global tensors it places them, traces `fn` once per
signature inside `jax.shard_map` (there, tensors are slices and ops insert the collectives that their dims
need), compiles, runs, and returns global tensors. There is no graph of our own: the jaxpr is the graph.

Eager execution is the same, one op at a time: an op called outside a program is staged as a program of one
op, on the mesh and layout of its operands, and cached (`core/op.py`).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from . import context
from .arguments import Args, Kwargs, as_selected, check_selected, donated_inputs, mark_static
from .call_errors import checks_arguments, raise_call_error
from .captures import CapturedFunction
from .context import Context, active
from .describe import describe, format_call
from .dims import Dim
from .errors import LayoutError, LayoutWarning, ProgramError, WeftError, nearest, user_frame
from .exported import ExportedProgram
from .jax_compat import Tracer
from .layout import Layout, LayoutLike, Placement
from .mesh import Mesh, MeshLike
from .operands import check_same_placement
from .placement import as_array, device_put, place_tensor, without_values
from .retrace import Retrace, trace_with_guess
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
from .staging import UNPLACED, Staged
from .tensor import Tensor, check_has_values, check_shape
from .traced import Traced, trace_staged
from .types import Params, PyTree, Result, weak_type

if TYPE_CHECKING:
    from ..compilers.compiled import Compiled
    from ..compilers.target import Target
    from ..plan.facts import Collective
    from ..plan.plan import Plan

# A function that captures another number at each call has another key each time: the cache must not grow.
MAX_CACHED_TRACES = 512
# Traces to find the captured tensors. The second one has them as inputs, and usually finds no others.
MAX_CAPTURE_TRACES = 3

Captured = dict[Hashable, Tensor]  # captured tensors, placed, by `operands.capture_key`


@dataclass(frozen=True)
class Trace:
    """One trace of a program: why it was needed, and its signature.

    Attributes:
      reason: why the program was traced.
      key: the signature as a cache key; `signature` is its text.
    """

    reason: str
    key: tuple[Any, ...] = field(repr=False)

    @property
    def signature(self) -> str:
        """The arguments: `f32[batch=4, d=6]`."""
        return format_signature(self.key)

    def __str__(self) -> str:
        return f"{self.reason}: {self.signature}"


class Program(Generic[Params, Result]):
    """A function staged for a mesh and a layout; created by `wf.spmd`.

    Attributes:
      mesh, layout: the mesh and the layout that it is staged for.
      compiler_options: options of the compiler.
      traces: one entry for each time the function was traced, with the reason.

    >>> import weft as wf
    >>> program = wf.spmd(lambda x: wf.sum(x, "d"), "data=4 model=2", "batch:data d:model")
    >>> program(wf.ones("batch=4 d=6"))
    f32[batch=4/data·4] [6., 6., 6., 6.]
    >>> print(program.traces[0])
    first call: f32[batch=4, d=6]
    """

    def __init__(
        self,
        fn: Callable[Params, Result],
        mesh: MeshLike = None,
        layout: LayoutLike = None,
        *,
        static: Sequence[int | str] = (),
        donate: Sequence[int | str] = (),
        compiler_options: Mapping[str, Any] | None = None,
        eager: bool = False,
        static_numbers: tuple[type, ...] = (),
    ):
        self.fn = fn
        self.placement = Placement.of(mesh, layout)
        self.static = as_selected("static", static)
        self.donate = as_selected("donate", donate)
        self.compiler_options = _checked_options(compiler_options)
        if self.static or self.donate:
            check_selected(fn, self.static, self.donate)
        self.traces: list[Trace] = []
        self._eager, self._static_numbers = eager, static_numbers
        self._staged: dict[Any, Staged] = {}
        # Not `mesh.has_devices`: it initializes JAX, and `wf.cpu_devices` may follow a decorated function.
        self._is_split = self.mesh.size > 1
        self._blocks = self._is_split and jax.default_backend() == "cpu"
        functools.update_wrapper(self, fn, updated=())

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is staged for."""
        return self.placement.mesh

    @property
    def layout(self) -> Layout:
        """The layout that it is staged for."""
        return self.placement.layout

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", repr(self.fn))
        return f"<program {name} on {self.placement}>"

    def _repr_html_(self) -> str:
        from .html import program_html  # imported here because only notebooks need it

        return program_html(self)

    def __reduce__(self) -> NoReturn:
        raise ProgramError(
            f"{self!r} can't be pickled",
            rule="a program has traces and compiled code of this process",
            hint="pickle the function, and call wf.spmd(fn, mesh, layout) in the other process; "
            "or send program.export(*args).serialize()",
        ).located("pickle")

    def __copy__(self) -> Program:
        return self  # a copy would trace again

    def __deepcopy__(self, _: object) -> Program:
        return self

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        outer = active.context
        if outer is not None:
            return self._nested(outer, args, kwargs)
        return self._with_captures(self._run, args, kwargs)

    def _run(self, args: Args, kwargs: Kwargs, captured: Captured) -> Any:
        staged, arrays = self._prepare(args, kwargs, captured, runs=True)
        # Checked here because JAX aborts the process for a deleted array on several devices.
        concrete = [a for a in arrays if isinstance(a, jax.Array) and not isinstance(a, Tracer)]
        deleted = [a for a in concrete if a.is_deleted()]
        if deleted:
            raise self._donated_input_error(len(deleted), args, kwargs)
        if staged.donated:
            self._check_donated_once(staged, arrays, args, kwargs)
        try:
            outs = staged(arrays)
        except jax.errors.JaxRuntimeError as error:
            if "compile option" not in str(error):
                raise
            raise _compiler_option_error(self.compiler_options, str(error)).located(
                self._format_call(args, kwargs)
            ) from None
        except jax.errors.UnexpectedTracerError:
            if not any(one.schedule == "1f1b" for one in staged.context.observations.pipelines):
                raise
            raise self._captured_gradient_error(args, kwargs) from None
        # Virtual CPU devices deadlock when calls pile up, so at most one call is in flight.
        if self._blocks and outs and not isinstance(outs[0], Tracer):
            jax.block_until_ready(outs)
        return staged.rebuild_outputs(outs)

    def reached_values(self) -> tuple[Any, ...]:
        """The values that a nested call depends on (`core/captures.py`)."""
        return self.fn, self.placement.mesh, self.placement.layout

    def __get__(self, owner: object, _: type | None = None) -> Any:
        """For a program that is a method: the program with its owner as the first argument."""
        return self if owner is None else _Method(self, owner)

    def trace(self, *args: PyTree, **kwargs: PyTree) -> Traced:
        """The program traced for these arguments: its jaxpr, inputs and outputs, without running it.

        Arguments may be `wf.spec`s, and the mesh needs no devices.
        """
        return self._with_captures(self._trace, args, kwargs)

    def jaxpr(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """The traced program as a jaxpr."""
        return self.trace(*args, **kwargs).jaxpr

    def lower(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """JAX's lowered form (`.as_text()` is StableHLO)."""
        self.mesh.require_devices()  # before tracing, which can take long
        return self.trace(*args, **kwargs).lower()

    def compile(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """JAX's compiled form (`.as_text()` is HLO, `.memory_analysis()` its memory)."""
        return self.lower(*args, **kwargs).compile()

    @checks_arguments
    def compile_for(self, target: Target | str, *args: PyTree, **kwargs: PyTree) -> Compiled:
        """Compile for TPUs or GPUs that need not be there, with the vendor's compiler.

        Arguments may be `wf.spec`s, and the mesh needs no devices: it has one position for each device of the
        target. `program.trace(*args).compile_for(target, timeout=…)` takes further options.

        Args:
          target: `"tpu-v5e:16x16"`, `"h100:16x8"` (16 hosts of 8).
          args, kwargs: the arguments of the program.

        Returns:
          A `Compiled`: its memory, the collectives and the work as compiled, with `.explain()`.
        """
        from ..compilers.target import Target  # compilers/ imports this module

        target = Target.of(target)  # before tracing, which can take long
        return self.trace(*args, **kwargs).compile_for(target)

    def export(self, *args: PyTree, **kwargs: PyTree) -> ExportedProgram:
        """The program exported by `jax.export`: `.save(path)` writes a file for `wf.load`."""
        self.mesh.require_devices()
        # jax.export traces again, so captures may differ.
        return self._with_captures(lambda *given: self._trace(*given).export(), args, kwargs)

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan:
        """A `Plan` of one call: its work, collectives, memory and time, without running it.

        Arguments may be `wf.spec`s, and the mesh needs no devices.
        """
        return self.trace(*args, **kwargs).plan()

    def collectives(self, *args: PyTree, **kwargs: PyTree) -> list[Collective]:
        """Every collective of one call: kind, axes, bytes per device, and how often it runs."""
        return self.trace(*args, **kwargs).collectives()

    def _with_captures(self, use: Callable[[Args, Kwargs, Captured], Any], args: Args, kwargs: Kwargs) -> Any:
        """`use(args, kwargs, captured)`, again if the function captures other tensors.

        Closed-over tensors are found only by tracing. They become inputs of the next trace; as constants they
        would be embedded in the executable.
        """
        attempts = 0

        def revise(captured: Captured, found: Retrace) -> Captured | None:
            nonlocal attempts
            if found.kind != "captures" or found.scope is not self.fn:
                return None
            attempts += 1
            if attempts == MAX_CAPTURE_TRACES:
                raise _unstable_captures_error(found.value).located(
                    "" if self._eager else self._format_call(args, kwargs)
                )
            return captured | {key: self._put(t) for key, t in found.value.items()}

        return trace_with_guess(functools.partial(use, args, kwargs), Captured(), revise)

    def _trace(self, args: Args, kwargs: Kwargs, captured: Captured) -> Traced:
        staged, arrays = self._prepare(args, kwargs, captured)
        # Python numbers become arrays, which have a shape and a dtype.
        arrays = [a if not isinstance(a, NUMBER_TYPES) else jnp.asarray(a) for a in arrays]
        return trace_staged(self, staged, arrays, args, kwargs)

    def _nested(self, outer: Context, args: Args, kwargs: Kwargs) -> Any:
        # By value: a layout that checks more is another object than the equal one of the enclosing program.
        mine, theirs = ((p.mesh, p.layout) for p in (self.placement, outer.placement))
        if mine != theirs and self.placement is not UNPLACED:
            # An eager vmap or scan of a program runs on the program's mesh.
            if outer.captures.adopts_placement and not outer.is_finished:
                raise Retrace("placement", self.placement)
            raise LayoutError(
                f"a program on {self.placement} was called inside one on {outer.placement}",
                rule="a nested program has the mesh and layout of the enclosing one",
                hint="stage both for the same mesh and layout, or call the plain function inside",
            ).located(self._format_call(args, kwargs))
        return self.fn(*args, **kwargs)

    def _prepare(
        self, args: Args, kwargs: Kwargs, captured: Captured, *, runs: bool = False
    ) -> tuple[Staged, list[Any]]:
        try:
            if runs and self._is_split and not self.placement.mesh.has_devices:
                self.mesh.require_devices()
            staged, arrays = self._lookup(args, kwargs, captured)
            if runs and any(isinstance(a, jax.ShapeDtypeStruct) for a in arrays):
                leaves = jax.tree.leaves((args, kwargs), is_leaf=is_argument_leaf)
                check_has_values(*leaves, *staged.captured)
            return staged, arrays
        except WeftError as error:
            # `op` adds the call of an eager op. Here the call would have the name of the lowering.
            raise error.located("" if self._eager else self._format_call(args, kwargs)) from None
        except CONCRETIZATION_ERRORS as error:
            numbers = [] if self._eager else number_names(self.fn, args, kwargs)
            raise unknown_value_error(error, numbers).located_in(
                error.__traceback__, self._format_call(args, kwargs)
            ) from error
        except TypeError as error:
            if self._eager:
                raise
            name = getattr(self.fn, "__name__", "the function")
            hint = "pass the arguments of the function itself; options are those of wf.spmd"
            call = self._format_call(args, kwargs)
            raise_call_error(self.fn, name, args, kwargs, error, call=call, hint=hint)

    def _format_call(self, args: Args, kwargs: Kwargs) -> str:
        name = getattr(self.fn, "__name__", "")
        return format_call(name if self._eager else f"program {name}", args, kwargs)

    def _donated_input_error(self, deleted: int, args: Args, kwargs: Kwargs) -> ProgramError:
        """The error for arguments that were donated to an earlier call."""
        return ProgramError(
            f"{deleted} of the input arrays have been deleted: they were donated to an earlier call",
            rule="a call deletes the arrays that are donated to it; its results replace them",
            hint="continue with the results: model, state = step(model, state); or stage it without donate=",
        ).located(self._format_call(args, kwargs))

    def _check_donated_once(self, staged: Staged, arrays: list[Any], args: Args, kwargs: Kwargs) -> None:
        """Raise an error if a donated array is also another input: its memory may be overwritten first."""
        positions: dict[int, list[int]] = {}
        for n, array in enumerate(arrays):
            if isinstance(array, jax.Array) and not context.is_traced(array):
                positions.setdefault(id(array), []).append(n)
        shared = [ns for ns in positions.values() if len(ns) > 1 and {*ns} & {*staged.donated}]
        if not shared:
            return
        names = self._input_names(staged, args, kwargs)
        raise ProgramError(
            f"{len(shared)} of the donated arrays are passed more than once",
            *(f"one array: {', '.join(names[n] for n in ns)}" for ns in shared),
            rule="a call deletes the arrays that are donated to it, so they can't also be other inputs",
            hint="donate a copy, jax.tree.map(jnp.copy, t); or stage it without donate=",
        ).located(self._format_call(args, kwargs))

    def _input_names(self, staged: Staged, args: Args, kwargs: Kwargs) -> list[str]:
        """The names of a call's inputs, in order."""
        if self.static:
            args, kwargs = mark_static(self.fn, self.static, args, kwargs)
        leaves = jax.tree.leaves_with_path((args, kwargs), is_leaf=is_argument_leaf)
        given = [path for path, leaf in leaves if is_dynamic(leaf, self._static_numbers)]
        names = [f"argument {jax.tree_util.keystr(path[1:])}" for path in given]
        return names + [f"the captured {describe(t)}" for t in staged.captured]

    def _captured_gradient_error(self, args: Args, kwargs: Kwargs) -> ProgramError:
        """The error for a 1F1B pipeline whose function closes over a differentiated value.

        The schedule's custom_vjp computes no gradient for it; JAX finds its tracer after the trace has ended.
        """
        return ProgramError(
            'the function of a pipeline with the schedule "1f1b" captures a tensor that is differentiated',
            rule="this schedule computes gradients of x, of the layers' parameters and of shared tensors",
            hint='pass the captured tensors as shared=(…,); or use schedule="gpipe"',
        ).located(self._format_call(args, kwargs))

    def _lookup(self, args: Args, kwargs: Kwargs, captured: Captured) -> tuple[Staged, list[Any]]:
        """The staged function for the signature of a call, and its inputs. Stages it if it is new."""
        if self.static:
            args, kwargs = mark_static(self.fn, self.static, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_argument_leaf)
        key: list[Any] = [tree]
        arrays: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                array = self._array_of(leaf)
                key.append((leaf.dims, array.dtype, getattr(array, "weak_type", False), leaf.role))
                arrays.append(array)
            elif isinstance(leaf, CapturedFunction):
                key.append(leaf.key)
                arrays += map(self._array_of, leaf.tensors)
            elif is_dynamic(leaf, self._static_numbers):
                if isinstance(leaf, np.ndarray | jax.Array):
                    leaf = self._replicated(leaf)
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
            staged = self._stage(leaves, tree, tuple(key), arrays, captured)
        arrays += [t._read() for t in staged.captured]
        return staged, arrays

    def _array_of(self, t: Tensor) -> Any:
        is_placed = t.placement is self.placement
        needs_no_placement = t.placement is None and self.placement is UNPLACED  # nothing to move or to pad
        if t.splits is not None or not (is_placed or needs_no_placement):
            return self._place(t)._read()
        check_shape(t)
        return t._read()

    def _check_arguments(self, args: Args, kwargs: Kwargs) -> None:
        """Raise an error for an argument that is not a pytree. An eager op checks its own arguments."""
        if not self._eager:
            check_arguments(self.fn, jax.tree.leaves_with_path((args, kwargs), is_leaf=is_argument_leaf))

    def _replicated(self, given: jax.Array | np.ndarray) -> jax.Array:
        """A raw array, replicated on all devices of the mesh.

        A call's results are on the mesh. If a raw array were on one device in the first call and, being its
        result, on the mesh in the second, JAX would retrace.
        """
        array = as_array(given)
        mesh = self.mesh.jax_mesh
        is_any_device = self.mesh.size == 1 and not self.mesh.is_chosen_device
        if is_any_device or not self.mesh.has_devices or context.is_traced(array):
            return array
        if isinstance(array.sharding, NamedSharding) and array.sharding.mesh == mesh:
            return array
        return device_put(array, NamedSharding(mesh, PartitionSpec()))

    def _place(self, t: Tensor) -> Tensor:
        if t.splits is not None:
            raise ProgramError(
                f"{describe(t)} is a slice from inside another program",
                rule="a program's tensors can be used inside it only; return them to use them outside",
                hint="return the tensor from the program that created it",
            )
        if not self._eager and t.placement is not None and t.mesh != self.mesh:
            check_same_placement(t, self.placement)
        return self._put(t)

    def _put(self, t: Tensor) -> Tensor:
        """The tensor, placed for this program; a spec if the mesh has no devices and is for planning only."""
        return place_tensor(t if self.placement.mesh.has_devices else without_values(t), self.placement)

    def _stage(
        self,
        leaves: list[Any],
        tree: PyTreeDef,
        key: tuple[Any, ...],
        arrays: list[Any],
        captured: Captured,
    ) -> Staged:
        """Trace the function for a signature, and cache it."""
        donated = donated_inputs(self.fn, self.donate, leaves, tree, self._static_numbers)
        staged = Staged(
            self.fn,
            self.placement,
            leaves,
            tree,
            captured,
            donated=donated,
            static_numbers=self._static_numbers,
            is_eager=self._eager,
            compiler_options=self.compiler_options or None,
        )
        staged.trace([*arrays, *[t._read() for t in staged.captured]])
        if not self._eager:
            is_known = key in self._staged
            why = "it captures different tensors" if is_known else retrace_reason(key, list(self._staged))
            self.traces.append(Trace(why, key))
        has_functions = any(isinstance(leaf, CapturedFunction) for leaf in leaves)
        # A captured tracer is valid in this call only, and a function key doesn't cover late captures.
        if any(context.is_traced(t._data) for t in staged.captured) or (staged.captured and has_functions):
            return staged
        if has_functions and len(self._staged) >= MAX_CACHED_TRACES:
            del self._staged[next(iter(self._staged))]
        self._staged[key] = staged
        if not self._eager:
            self._warn_unused(staged.context.observations.seen_dims)
        return staged

    def _warn_unused(self, seen_dims: dict[str, Dim]) -> None:
        """Warn about the rules of dims that no tensor of the program has."""
        self.layout.check_dims(seen_dims)
        frame = user_frame()
        # Under `python -m weft.cli.main` no frame is the user's.
        where = ("<command line>", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        for name in sorted(self.layout.dim_names - set(seen_dims)):
            axes = self.layout.rules_for("param").get(name)
            axes = axes or self.layout.rules_for("optimizer")[name]
            text = LayoutError(
                f"rule {name}:{'+'.join(axes)} has no effect: no tensor of the program has a dim "
                f"{name}{nearest(name, seen_dims)}",
                rule="a rule splits the dim that it names, in every tensor that has it",
                hint=f"the dims are {', '.join(sorted(seen_dims)) or 'none'}; "
                "correct the rule's name, or remove the rule",
            ).located(repr(self).strip("<>"))
            warnings.warn_explicit(str(text), LayoutWarning, *where)


def _unstable_captures_error(found: Mapping[Hashable, Tensor]) -> ProgramError:
    """The error for a function that captures different tensors in each trace, so they can't become inputs."""
    return ProgramError(
        f"the function captures different tensors in each trace: {', '.join(map(describe, found.values()))}",
        rule="tensors that a program captures become inputs: one trace finds them, the next one uses them",
        hint="pass tensors that change from call to call as arguments",
    )


def _checked_options(given: Any) -> dict[str, Any]:
    """Options of the compiler by name."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ProgramError(
            f"compiler_options= is {given!r}",
            rule="the options of the compiler are a mapping from names to values",
            hint='for example compiler_options={"xla_tpu_enable_async_collective_fusion": True}',
        )
    return dict(given)


def _compiler_option_error(options: Mapping[str, Any], message: str) -> ProgramError:
    """The error for an option that the compiler of the devices does not have."""
    return ProgramError(
        f"the compiler of these devices does not take all of compiler_options={dict(options)!r}",
        f"XLA: {message.partition(chr(10))[0]}",
        rule="options are those of the compiler of the devices: xla_tpu_… of TPUs, xla_gpu_… of GPUs",
        hint="omit them here; program.trace(*args).compile_for(target, options=…) takes them for a target",
    )


class _Method:
    """A program bound to an object, which is the first argument of calls, plans and the rest."""

    def __init__(self, program: Program, owner: object):
        self.program, self.owner = program, owner

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        return self.program(self.owner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.program, name)
        return functools.partial(value, self.owner) if inspect.ismethod(value) else value


@overload
def spmd(
    fn: Callable[Params, Result],
    mesh: MeshLike = None,
    layout: LayoutLike = None,
    *,
    static: Sequence[int | str] = (),
    donate: Sequence[int | str] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> Program[Params, Result]: ...
@overload
def spmd(
    fn: None = None,
    mesh: MeshLike = None,
    layout: LayoutLike = None,
    *,
    static: Sequence[int | str] = (),
    donate: Sequence[int | str] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[Params, Result]], Program[Params, Result]]: ...
@checks_arguments
def spmd(
    fn: Callable[..., PyTree] | None = None,
    mesh: MeshLike = None,
    layout: LayoutLike = None,
    *,
    static: Sequence[int | str] = (),
    donate: Sequence[int | str] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Stage a function of named tensors for a mesh and a layout.

    Args:
      fn: takes and returns pytrees of tensors; without it, `spmd` is a decorator.
      mesh: a `Mesh`, or a string or mapping for one.
      layout: a `Layout`, or a string or mapping for one.
      static: positions or names of arguments that are part of the signature: numbers that Python code
        needs, and objects that are not pytrees. They are hashed and compared by value.
      donate: positions or names of arguments whose memory the program may reuse.
      compiler_options: options of the compiler of the devices it runs on or is compiled for, as of
        `jax.jit`: `{"xla_tpu_enable_async_collective_fusion": True}`.

    Returns:
      A `Program`: call it with global tensors.

    >>> import weft as wf
    >>> double = wf.spmd(lambda x: x + x, wf.Mesh(), wf.Layout())
    >>> double(wf.arange(wf.Dim("a", 3)))
    i32[a=3] [0, 2, 4]
    """
    if fn is None:
        return functools.partial(
            spmd, mesh=mesh, layout=layout, static=static, donate=donate, compiler_options=compiler_options
        )
    try:
        if not callable(fn):
            raise ProgramError(
                f"{fn!r} is not a function",
                rule="spmd stages a function that takes and returns pytrees of tensors",
                hint="wf.spmd(fn, mesh, layout); omit fn to use it as a decorator",
            )
        return Program(fn, mesh, layout, static=static, donate=donate, compiler_options=compiler_options)
    except WeftError as error:
        given = {"static": static, "donate": donate, "compiler_options": compiler_options}
        more = {k: v for k, v in given.items() if v}
        raise error.located(format_call("spmd", (fn, mesh, layout), more)) from None
