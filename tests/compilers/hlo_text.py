"""Small HLO modules for tests, as the compilers print them.

They are abbreviated: the types of computations, and attributes that nothing reads, may be missing.
"""

from textwrap import dedent

from weft.compilers.hlo import parse_hlo


def parse(entry: str, *others: str, header: str = "", tables: str = ""):
    """The module with this ENTRY computation, and other computations."""
    texts = [f"HloModule jit_step, is_scheduled=true{header}", dedent(tables).strip()]
    texts += [dedent(text).strip() for text in (*others, entry)]
    return parse_hlo("\n\n".join(texts) + "\n")


def entry(*lines: str, signature: str = "() -> f32[]"):
    """The module whose ENTRY computation has these instructions; the last one is the root."""
    body = "\n".join(f"  {'ROOT ' if line == lines[-1] else ''}{line}" for line in lines)
    return parse(f"ENTRY %main.1 {signature} {{\n{body}\n}}")
