"""Traced: a program traced for one signature, between staging and planning, like `jax.stages.Traced`.

    traced = program.trace(*args)
    traced.jaxpr, traced.plan(), traced.collectives(), traced.lower().compile()

Everything that needs a trace but does not run it takes a `Traced`: plans, the layout search, export. A
search traces the program again, on other meshes, so a `Traced` keeps the program and its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from .arguments import Args, Kwargs, mark_static
from .call_stack import call_with_room
from .dims import Dim
from .errors import ProgramError
from .exported import ExportedProgram, export_for, export_staged
from .layout import Placement
from .observations import Observations
from .staging import Staged
from .tensor import Tensor, is_tensor
from .types import PyTree

if TYPE_CHECKING:
    from ..compilers.compiled import Compiled
    from ..compilers.target import Target
    from ..plan.facts import Collective
    from ..plan.plan import Plan
    from .program import Program


@dataclass(frozen=True)
class OutputSpec:
    """An output of a program: a tensor without its array.

    Attributes:
      name: its path in the result, `result.loss`.
    """

    name: str
    dims: tuple[Dim, ...]
    role: str
    dtype: Any


@dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """A program traced for one signature; created by `program.trace(*args)`.

    Attributes:
      name: the name of the function.
      program: the program.
      args, kwargs: the arguments.
      placement: the mesh and the layout that it was traced for.
      jaxpr: the traced program.
      inputs: the tensors among the arguments, with their names; captured tensors come last.
      outputs: the tensors among the results.
      donated: the positions of donated inputs.
      observations: facts of the trace that the jaxpr no longer has.

    >>> import weft as wf
    >>> program = wf.spmd(lambda x: wf.sum(x, "d"), "data=4 model=2", "batch:data d:model")
    >>> traced = program.trace(wf.spec("batch=8 d=6"))
    >>> [(c.kind, c.axes) for c in traced.collectives()]
    [('all-reduce', ('model',))]
    """

    name: str
    program: Program
    args: Args
    kwargs: Kwargs
    placement: Placement
    jaxpr: Any
    inputs: tuple[tuple[str, Tensor], ...]
    outputs: tuple[OutputSpec, ...]
    donated: tuple[int, ...]
    observations: Observations
    _stage: Any
    _staged: Staged
    _arrays: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"<traced {self.name} on {self.placement}>"

    @property
    def out_info(self) -> PyTree:
        """The result as a pytree of specs, as in `jax.stages.Traced`."""
        avals = self.jaxpr.out_avals
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return self._staged.rebuild_outputs(arrays)

    def lower(self) -> Any:
        """JAX's lowered form (`.as_text()` is StableHLO)."""
        # JAX lowers an abstract mesh for one device, and compiling the result fails inside XLA.
        self.placement.mesh.require_devices()
        return call_with_room(self._stage.lower)

    def export(self) -> ExportedProgram:
        """The program exported by `jax.export`: `.save(path)` writes a file for `wf.load`."""
        self.placement.mesh.require_devices()
        args, kwargs = self.args, self.kwargs
        if self.program.static:
            args, kwargs = mark_static(self.program.fn, self.program.static, args, kwargs)
        return export_staged(self.name, self._staged, self._arrays, args, kwargs, self.jaxpr)

    def export_for(self, platform: str) -> bytes:
        """The program exported for a platform that need not be there, `tpu` or `cuda`, for
        `jax.export.deserialize`. The mesh needs no devices."""
        return export_for(self._staged, self._arrays, platform)

    def compile_for(
        self,
        target: Target | str,
        *,
        options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> Compiled:
        """Compile for TPUs or GPUs that need not be there, with the vendor's compiler.

        Args:
          target: `"tpu-v5e:16x16"`, `"h100:16x8"` (16 hosts of 8).
          options: options of the compiler, over those of the program.
          timeout: seconds after which the compiler is stopped; 1800 by default.
          progress: is called with each step of the compiler and the seconds since its start.
        """
        from ..compilers.compiled import compile_traced  # compilers/ imports this module

        return compile_traced(self, target, options=options, timeout=timeout, progress=progress)

    def plan(self) -> Plan:
        """The `Plan` of one call."""
        from ..plan.plan import derive_plan  # plan/ imports this module

        return derive_plan(self).plan

    def collectives(self) -> list[Collective]:
        """Every collective of one call: kind, axes, bytes per device, and how often it runs."""
        from ..plan.events import extract_collectives  # plan/ imports this module

        return extract_collectives(self.jaxpr, self.placement.mesh)


def unpack_traced(fn: Any, args: PyTree, call: str) -> tuple[Any, PyTree]:
    """The program of a `Traced`, with the arguments it was traced for if `args` is empty.

    Other functions and their arguments are returned as they are. `call` is the name of the public function.
    """
    if not isinstance(fn, Traced):
        return fn, args
    if not isinstance(args, tuple | list) or args:
        return fn.program, args
    if fn.kwargs:
        raise ProgramError(
            f"{fn!r} was traced with keyword arguments: {', '.join(fn.kwargs)}",
            rule=f"{call} calls a program with positional arguments",
            hint="pass them by position: program.trace(*args)",
        ).located(call)
    return fn.program, fn.args


def trace_staged(
    program: Program, staged: Staged, arrays: Sequence[Any], args: Args, kwargs: Kwargs
) -> Traced:
    """Trace a staged function for the inputs `arrays`, which stand for the given arguments."""
    stage = staged.trace(arrays)
    named = _named_tensors(staged.fn, args, kwargs)
    return Traced(
        getattr(staged.fn, "__name__", "program"),
        program,
        args,
        kwargs,
        staged.placement,
        stage.jaxpr,
        (*named, *((f"captured {n}", t) for n, t in enumerate(staged.captured))),
        tuple(_outputs(staged, stage.jaxpr)),
        staged.donated,
        staged.context.observations,
        stage,
        staged,
        tuple(arrays),
    )


def _named_tensors(fn: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments, with their names."""
    names = list(inspect.signature(fn).parameters) if callable(fn) else []
    tensors = []
    trees = [(names[n] if n < len(names) else f"argument {n}", a) for n, a in enumerate(args)]
    for name, tree in [*trees, *kwargs.items()]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_tensor):
            if isinstance(leaf, Tensor):
                tensors.append((name + _format_path(path), leaf))
    return tensors


def _outputs(staged: Staged, closed: Any) -> list[OutputSpec]:
    indices = jax.tree.unflatten(staged.out_tree, range(len(staged.out_leaves)))
    paths = {n: path for path, n in jax.tree_util.tree_leaves_with_path(indices)}
    kinds = [kind for kind, *_ in staged.out_leaves]
    # The jaxpr returns the results of the SPMD part first, then those of deferred work.
    order = [n for kind in ("array", "deferred") for n, k in enumerate(kinds) if k == kind]
    dtypes = {n: v.aval.dtype for n, v in zip(order, closed.jaxpr.outvars, strict=True)}
    return [
        OutputSpec("result" + _format_path(paths[n]), named[0], named[1], dtypes[n])
        for n, (_, _, named) in enumerate(staged.out_leaves)
        if named is not None
    ]


def _format_path(path: Sequence[object]) -> str:
    return "".join(f".{getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))}" for k in path)
