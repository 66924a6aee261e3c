"""From the name of an HLO instruction to the op, the layer and the phase that it comes from.

JAX writes the scopes of an equation into the name of its instruction, and XLA keeps the name through all of
its passes: `jit(step)/shard_map/transpose(jvp(einsum[a,b · b,c → a,c] in block.up))/dot_general`. XLA may cut
off the end of a name, or join the names of several equations with ";". The name of a merged collective has
those of its parts: `jit(step)/(jvp(einsum[…])/psum:jvp(mean[…])/psum)`.
"""

from __future__ import annotations

import functools
import re

from ..core.labels import Scope, parse_label

# The collective that a program requests, by the name of JAX's primitive.
REQUESTED = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}
INPUT = "args["  # the names of a program's inputs, `args[0]`
_LABEL = re.compile(r"[a-z_0-9]+\[[^\]]*\](?: in [\w.]+)?")
_MERGED = re.compile(r"(?:^|/)\(")
_TRANSFORM = re.compile(r"\b(jvp|transpose|vmap)\(")


@functools.lru_cache(maxsize=65536)
def parse_op_name(name: str) -> Scope:
    """The scope of an instruction with this name."""
    first = merged_names(name)[0].partition(";")[0]
    if first.startswith(INPUT):
        return Scope()
    labels = (parse_label(text) for text in _LABEL.findall(first))
    ops = tuple(label for label in labels if label is not None)
    return Scope(ops, frozenset(_TRANSFORM.findall(first)), primitive_of(first))


def primitive_of(name: str) -> str:
    """The primitive of JAX at the end of a name, `dot_general`, or ""."""
    last = name.rpartition("/")[2]
    return last if last.isidentifier() else ""


def merged_names(name: str) -> list[str]:
    """The names that XLA merged into one; the name itself if it is that of one equation."""
    group = _MERGED.search(name)
    if group is None:
        return [name]
    parts, depth, end = [""], 0, len(name)
    for position in range(group.end(), len(name)):
        letter = name[position]
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            end = position
            break
        if letter == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    before, after = name[: group.end() - 1], name[end + 1 :]
    return [merged for part in parts for merged in merged_names(before + part + after)]
