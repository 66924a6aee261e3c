"""What the compiler's process reads from the serialized program, and how it reports failures."""

import json

import jax
import jax.numpy as jnp
import pytest

from weft.compilers import worker
from weft.compilers.hlo import parse_hlo


def varint(value):
    """An integer of variable length, as protocol buffers encode it: seven bits a byte, the lowest first."""
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def instruction(name, opcode, called=None, **config):
    encoded = field(worker.NAME, name.encode()) + field(worker.OPCODE, opcode.encode())
    if called is not None:
        encoded += field(worker.CALLED, called)
    return encoded + (field(worker.BACKEND_CONFIG, json.dumps(config).encode()) if config else b"")


def computation(number, *instructions):
    return b"".join(field(worker.INSTRUCTIONS, one) for one in instructions) + field(
        worker.COMPUTATION_ID, number
    )


class Executable:
    """A compiled program with this serialized module."""

    def __init__(self, *computations):
        self.text = field(1, b"jit_step") + b"".join(field(worker.COMPUTATIONS, one) for one in computations)

    def runtime_executable(self):
        return self

    def hlo_modules(self):
        return [self]

    def as_serialized_hlo_module_proto(self):
        return self.text


@pytest.mark.nodevice
@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**63])
def test_integers_of_variable_length(number):
    assert worker._varint(b"\xff" + varint(number) + b"\x01", 1) == (number, 1 + len(varint(number)))


@pytest.mark.nodevice
def test_fields_of_all_kinds():
    message = (
        field(1, 300) + field(2, b"text") + bytes([3 << 3 | 1, *range(8)]) + bytes([4 << 3 | 5, *range(4)])
    )
    assert [*worker._fields(message)] == [(1, 300), (2, b"text"), (3, bytes(range(8))), (4, bytes(range(4)))]


@pytest.mark.nodevice
def test_costs_of_asynchronous_instructions():
    def cost(microseconds, name="sol"):
        return {"exec_time_us": microseconds, "name": name}

    compiled = Executable(
        computation(300, instruction("reduce-scatter.1", "reduce-scatter", reification_cost=[cost(12.5)])),
        computation(7, instruction("p", "parameter"), instruction("a2a", "all-to-all", reification_cost=[
            cost(1.0, ""), cost(2.5), cost(3.0, "other"),
        ])),
        computation(8, instruction("plain", "reduce-scatter", operation_queue_id="0")),
        computation(
            9,
            instruction("reduce-scatter-start", "async-start", varint(300)),
            instruction("all-to-all-start", "async-start", 7),
            instruction("other-start", "async-start", varint(8)),
            instruction("fusion", "fusion", varint(7), reification_cost=[cost(99.0)]),
        ),
    )  # fmt: skip
    assert worker.hidden_costs(compiled) == {"reduce-scatter-start": 12.5, "all-to-all-start": 2.5}


def test_the_numbers_of_fields_are_those_of_xla():
    """A program of this machine has the same instructions in both forms."""
    compiled = jax.jit(lambda x: jnp.sort(jnp.sin(x)).sum()).lower(jnp.ones(8)).compile()
    serialized = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    found = set()
    for number, one in worker._fields(serialized):
        if number == worker.COMPUTATIONS:
            fields = [*worker._fields(one)]
            assert worker.COMPUTATION_ID in dict(fields)
            for n, value in fields:
                if n == worker.INSTRUCTIONS:
                    parts = dict(worker._fields(value))
                    found.add((parts[worker.NAME].decode(), parts[worker.OPCODE].decode()))
    module = parse_hlo(compiled.as_text())
    assert found == {(one.name, one.opcode) for c in module.computations.values() for one in c.instructions}
    assert any(opcode == "sort" for _, opcode in found)


def test_an_error_of_the_compiler_is_written_down(tmp_path, capsys):
    request = {
        "topology": {"topology_name": "x", "platform": "abacus"},
        "mesh": [],
        "order": [0],
        "donated": [],
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    worker.main(tmp_path)
    failed = json.loads((tmp_path / "failed.json").read_text())
    assert failed["error"] and "abacus" in failed["message"]
    assert not (tmp_path / "compiled.json").exists()
    assert capsys.readouterr().out.splitlines() == ["loading the compiler"]


class Chip:
    """A device of a topology: its id, and for a TPU its place."""

    def __init__(self, id, coords=None, core_on_chip=0):
        self.id = id
        if coords is not None:
            self.coords, self.core_on_chip = coords, core_on_chip


def test_devices_are_numbered_along_the_sides_of_the_torus():
    """libtpu lists a slice of 4 x 2 chips host by host, 2 x 2 chips each."""
    places = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    listed = [Chip(x + 4 * y, [x, y, 0]) for x, y in places]
    assert [chip.id for chip in worker.numbered(listed)] == [*range(8)]
    cores = [Chip(2 * (x + 4 * y) + core, [x, y, 0], core) for x, y in places for core in (1, 0)]
    assert [chip.id for chip in worker.numbered(cores)] == [*range(16)]
    assert [chip.id for chip in worker.numbered([Chip(3), Chip(1)])] == [3, 1]
