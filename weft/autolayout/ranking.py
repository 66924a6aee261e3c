"""`search`: the public entry point of the layout search, and the checks of its arguments.

    result = search(step, args, devices=512, hardware="tpu-v2")
    result.best.layout

All reported numbers come from plans. Bounds only decide which candidates need no plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from ..core.call_errors import checks_arguments
from ..core.dims import DimsLike, dim_name, list_dims
from ..core.errors import DimError, MeshError, ProgramError, nearest
from ..core.field_types import OneOf, PositiveInt, Range
from ..core.fields import argument_types, check_values
from ..core.mesh import Mesh
from ..core.traced import Traced, unpack_traced
from ..core.types import PyTree
from ..hardware.profile import Hardware
from ..plan.inputs import check_args_is_tuple
from .branch_and_bound import BranchAndBound
from .candidates import CandidateSpace
from .results import RankedLayout, SearchResult

OBJECTIVES = ("time", "memory")


@checks_arguments
def search(
    fn: Callable[..., PyTree] | Traced,
    args: Sequence[PyTree] = (),
    *,
    devices: PositiveInt | None = None,
    hardware: Hardware | str | os.PathLike[str],
    mesh: Mesh | str | None = None,
    memory: PositiveInt | None = None,
    axes: Annotated[int, Range(at_least=1, at_most=3)] = 2,
    dims: DimsLike | None = None,
    stored: bool = True,
    objective: Annotated[str, OneOf(OBJECTIVES)] = "time",
    variants: Mapping[str, tuple[PyTree, ...]] | None = None,
    top: PositiveInt = 1,
    front: bool = False,
    progress: Callable[[int, RankedLayout | None], None] | None = None,
) -> SearchResult:
    """Find the mesh and the layout with the lowest predicted time, or memory.

    Args:
      fn: a function of tensors, a program, or a traced program; a program's mesh and layout are ignored.
      args: its arguments: tensors or `wf.spec(dims)`; by default those that a traced program was traced for.
      devices: the number of devices; all meshes of this size are tried.
      hardware: a profile's name, the path of a TOML file, or `Hardware`.
      mesh: the only mesh to try, in place of `devices`.
      memory: the bytes that a device may use; by default all of the hardware's memory.
      axes: the largest number of mesh axes, 1 to 3.
      dims: the only dims to split, or their names; by default all dims, but in programs with more than 8
        dims only those that matter and that no loop runs along.
      stored: whether to try storing parameters and optimizer state in more slices (ZeRO).
      objective: the quantity to minimize, "time" or "memory".
      variants: more functions with their arguments, by name, such as other remat policies or numbers of
        micro-batches. An optional third entry names a dim: only layouts that split it are tried, because
        the others are the same without the variant.
      top: the number of best candidates that are guaranteed to be found.
      front: whether to also find the fastest layouts for less and less memory.
      progress: called after each plan with the number of plans and the best so far.

    >>> import weft as wf
    >>> args = wf.spec("batch=4096 d=256"), wf.spec("d=256")
    >>> result = wf.search(lambda x, w: wf.einsum(x, w, out="batch"), args, devices=4, hardware="h100")
    >>> result.best.mesh, result.best.layout
    (Mesh("data=4"), Layout("batch:data"))
    """
    names: list[str] | None = None
    if dims is not None:
        names = [dim_name(d) for d in list_dims(dims)]
    given_mesh = Mesh.of(mesh) if mesh is not None else None
    if given_mesh is not None and devices is None:
        devices = given_mesh.size
    if devices is None:
        raise ProgramError(
            "neither devices= nor mesh= is given",
            rule="a search tries either one mesh, or all meshes of a number of devices",
            hint='give devices= or mesh=: wf.search(fn, args, devices=8, hardware="h100")',
        ).located("search")
    check_arguments(
        devices=devices,
        memory=memory,
        axes=axes,
        stored=stored,
        objective=objective,
        top=top,
        front=front,
        progress=progress,
    )
    if given_mesh is not None and devices != given_mesh.size:
        raise MeshError(
            f'mesh "{given_mesh}" has {given_mesh.size} devices, and devices={devices}',
            rule="a search tries either one mesh, or all meshes of a number of devices",
            hint=f"leave one of them out, or set devices={given_mesh.size}",
        ).located("search")
    machine = Hardware.of(hardware)
    cap = machine.memory_bytes if memory is None else memory
    programs: dict[str, tuple[PyTree, ...]] = {
        name: (*unpack_traced(one, one_args, "search"), *required_dim)
        for name, (one, one_args, *required_dim) in {"": (fn, args), **(variants or {})}.items()
    }
    for _, variant_args, *_ in programs.values():
        check_args_is_tuple(variant_args, "search", 'wf.search(fn, (x,), devices=8, hardware="h100")')
    spaces = {
        name: CandidateSpace(name, fn, tuple(args), devices, axes, machine, given_mesh, names, *required_dim)
        for name, (fn, args, *required_dim) in programs.items()
    }
    if names is not None:
        _check_dims(names, spaces.values())
    run = BranchAndBound(spaces, machine, devices, stored, objective, top, progress)
    result = run.best(cap)
    if not result.ranked:
        # The candidate with the least memory of all tells the user how far the limit is off.
        smallest = replace(run, objective="memory", top=1).best(sys.maxsize)
        return replace(result, nearest=smallest.best)
    return replace(result, front=tuple(run.front(result))) if front else result


def check_arguments(**given: Any) -> None:
    """Raise an error that lists the arguments of a search that are invalid. One mesh gives `devices`, too."""
    known = argument_types(search)
    hint = 'for example wf.search(fn, args, devices=8, hardware="h100", axes=2)'
    check_values({**known, "devices": known["devices"].required}, given, ProgramError, hint, "search")


def _check_dims(dims: Sequence[str], spaces: Iterable[CandidateSpace]) -> None:
    known = sorted({dim for space in spaces for dim in space.atoms.dims})
    for dim in dims:
        if dim not in known:
            raise DimError(
                f"the program has no dim {dim} to split{nearest(dim, known)}",
                f"dims that can be split: {', '.join(known) or 'none'}",
                rule="each dim of a search occurs in the program, with a size above 1",
                hint="correct the name, or leave it out",
            ).located(f"search(dims={list(dims)})")
