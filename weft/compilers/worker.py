"""The process that runs a vendor's compiler: `python worker.py FOLDER`.

Input: a folder with `request.json` and `program`, the bytes of a program that JAX exported for the platform.
Output: `compiled.json` and `compiled.hlo` in the same folder, or `failed.json` with the compiler's message.
Lines on stdout report the progress.

A process of its own, because the compilers need other settings than the user's JAX, and libtpu admits one
process at a time. It imports nothing of Weft, so it starts fast.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


def main(folder: Path) -> None:
    """Compile the request in a folder."""
    request = json.loads((folder / "request.json").read_text())
    try:
        compile_request(request, folder)
    except Exception as error:  # the compilers raise many classes; their message is the result
        failure = {"error": type(error).__name__, "message": str(error)}
        (folder / "failed.json").write_text(json.dumps(failure))


def compile_request(request: dict[str, Any], folder: Path) -> None:
    """Compile, and write the result."""
    _report("loading the compiler")
    topology: Any = topologies.get_topology_desc(**request["topology"])
    started = time.monotonic()
    exported = jax_export.deserialize(bytearray((folder / "program").read_bytes()))
    names, sizes = zip(*request["mesh"], strict=True) if request["mesh"] else ((), ())
    devices = np.array(numbered(topology.devices), object)[request["order"]].reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    inputs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    _report("lowering")
    lowered = jax.jit(exported.call, donate_argnums=request["donated"]).lower(*inputs)
    _report("compiling")
    compiled = lowered.compile(compiler_options=request["options"])
    seconds = time.monotonic() - started
    _report("reading the compiled program")
    (folder / "compiled.hlo").write_text(compiled.as_text() or "")
    result = {
        "device_kind": topology.devices[0].device_kind,
        "seconds": seconds,
        "memory": memory_of(compiled.memory_analysis(), request["topology"]["platform"]),
        "costs": hidden_costs(compiled) if request["topology"]["platform"] == "cuda" else {},
    }
    # The other process takes the result as complete when it sees this file.
    draft = folder / "compiled.json.part"
    draft.write_text(json.dumps(result))
    draft.rename(folder / "compiled.json")


def memory_of(found: Any, platform: str) -> dict[str, int]:
    """The bytes of one device.

    libtpu's own check that a program fits, and its buffer assignment, agree with the peak that it reports.
    Its size of the temporaries counts more: 7 GB of 26 in a step of GPT-2 XL.
    """
    stored = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    is_tpu = platform == "tpu"
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "temporaries": found.peak_memory_in_bytes - stored if is_tpu else found.temp_size_in_bytes,
        "aliased": found.alias_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }


# The GPU compiler writes its estimates of reduce-scatters and all-to-alls onto an instruction that the text
# of the program hides behind `async-start`. The serialized module has it. Fields, by XLA's hlo.proto:
COMPUTATIONS = 3  # of HloModuleProto
INSTRUCTIONS, COMPUTATION_ID = 2, 5  # of HloComputationProto
NAME, OPCODE, CALLED, BACKEND_CONFIG = 1, 2, 38, 43  # of HloInstructionProto


def numbered(devices: Sequence[Any]) -> list[Any]:
    """Devices by number: those of a TPU along x, then y and z, as `hardware/topology.py` numbers them.

    libtpu lists them host by host. GPUs have no places in a torus, and are listed by host.
    """
    if not hasattr(devices[0], "core_on_chip"):
        return list(devices)
    return sorted(devices, key=lambda device: (*reversed(device.coords), device.core_on_chip))


def hidden_costs(compiled: Any) -> dict[str, float]:
    """The microseconds of asynchronous instructions, by name."""
    module = compiled.runtime_executable().hlo_modules()[0]
    costs: dict[int, float] = {}
    starts: dict[str, int] = {}
    for number, computation in _fields(module.as_serialized_hlo_module_proto()):
        if number != COMPUTATIONS:
            continue
        fields = list(_fields(computation))
        of = next((value for number, value in fields if number == COMPUTATION_ID), 0)
        for instruction in (dict(_fields(value)) for number, value in fields if number == INSTRUCTIONS):
            for estimate in _estimates(instruction.get(BACKEND_CONFIG, b"")):
                # Of several models, "sol" has the measured tables.
                if of not in costs or estimate["name"] == "sol":
                    costs[of] = float(estimate["exec_time_us"])
            if instruction.get(OPCODE) == b"async-start":
                called = instruction[CALLED]
                starts[instruction[NAME].decode()] = called if isinstance(called, int) else _varint(called)[0]
    return {name: costs[called] for name, called in starts.items() if called in costs}


def _estimates(config: bytes) -> list[dict[str, Any]]:
    """The estimates in the configuration of an instruction; that of a foreign function is not JSON."""
    try:
        return json.loads(config).get("reification_cost") or []
    except (ValueError, AttributeError):
        return []


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: their numbers, and integers or bytes."""
    at = 0
    value: int | bytes
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        else:
            length, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = message[at : at + length], at + length
        yield key >> 3, value


def _varint(message: bytes, at: int = 0) -> tuple[int, int]:
    """An integer of variable length, and the position after it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _report(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
