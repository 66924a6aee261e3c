"""A field is declared once: its annotation and the string below it serve Python, flags, TOML, JSON and help."""

import contextlib
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import tyro

from weft.cli.flag_errors import naming_flags
from weft.cli.targets import UsageError
from weft.core.errors import DataError, HardwareError, ModelError, ProgramError
from weft.core.field_text import read_flags, read_table
from weft.core.field_types import (
    FieldType,
    Fraction,
    NonNegative,
    OneOf,
    Positive,
    PositiveInt,
    Range,
    Share,
    Text,
)
from weft.core.fields import (
    FLAGS,
    TOML,
    Offender,
    documented,
    field_docs,
    field_types,
    replace_nested,
    respelled,
    validate,
)
from weft.hardware.profile import Hardware
from weft.models import Config
from weft.serve.schema import COMPLETION_FIELDS, APIError, parse_body, schema_field
from weft.train.config import DataConfig, HostsConfig, TrainConfig

pytestmark = pytest.mark.nodevice


@documented
@dataclass(frozen=True)
class OvenConfig:
    """An oven."""

    degrees: Annotated[int, Range(at_least=50, below=301)] = 180
    """The temperature, in
    degrees Celsius."""
    fan: bool = False
    """Whether the fan runs."""

    def __post_init__(self) -> None:
        validate(self, DataError, more=self._contradictions())

    def _contradictions(self):
        if self.fan and self.degrees > 200:
            yield Offender(("degrees",), self.degrees, "at most 200 with the fan", fix=200)


@documented
@dataclass(frozen=True)
class CakeConfig:
    """A cake."""

    layers: PositiveInt = 2
    """The number of layers."""
    sweetness: Share = 0.5
    """The share of sugar."""
    kind: Literal["sponge", "fruit"] = "sponge"
    oven: OvenConfig = field(default_factory=OvenConfig)

    def __post_init__(self) -> None:
        validate(self)


def test_python_names_arguments():
    with pytest.raises(ProgramError) as error:
        CakeConfig(layers=0, sweetness=float("nan"), kind="spong")
    assert error.value.fact == "layers=0, sweetness=nan, kind='spong'"
    assert error.value.rule.split("\n  ") == [
        "layers is an integer of at least 1",
        "sweetness is a finite number of at least 0 and below 1",
        "kind is one of sponge, fruit (did you mean sponge?)",
    ]
    assert error.value.call == "CakeConfig(layers=0, sweetness=nan, kind='spong')"
    assert error.value.where.startswith("tests/core/test_fields.py:")
    with pytest.raises(DataError, match=r"^degrees=301\n  degrees is an integer from 50 to 300\n"):
        OvenConfig(degrees=301)


def test_flags_name_flags():
    changes, mistakes = read_flags(
        CakeConfig, "--layers 0 --oven.degrees hot --oven.fan true --kind=spong --laiers 2".split(), {}
    )
    assert mistakes == [
        "--layers 0 is not an integer of at least 1",
        "--oven.degrees hot is not an integer from 50 to 300",
        "--kind spong is not one of sponge, fruit (did you mean sponge?)",
        "there is no setting --laiers (did you mean --layers?)",
    ]
    changes, mistakes = read_flags(CakeConfig, ["-l", "3", "--oven.degrees", "90"], {})
    assert mistakes == ["-l is not a flag"] and changes == {"oven": {"degrees": 90}}
    assert replace_nested(CakeConfig(), changes).oven == OvenConfig(90)


def test_toml_names_keys():
    table = {"layers": True, "sweetness": 0, "oven": {"degrees": 20.5, "light": 1}, "kind": "fruit"}
    changes, mistakes = read_table(CakeConfig, table)
    assert mistakes == [
        "layers = True is not an integer of at least 1",
        "oven.degrees = 20.5 is not an integer from 50 to 300",
        "oven.light: there is no such setting",
    ]
    assert changes == {"sweetness": 0.0, "oven": {}, "kind": "fruit"}
    assert read_table(CakeConfig, {"oven": 3})[1] == ["oven = 3: it is a section, [oven]"]


def test_json_names_members():
    schema = {name: schema_field(kind) for name, kind in field_types(OvenConfig).items()}
    assert parse_body(b'{"degrees": 200, "fan": true}', schema) == {"degrees": 200, "fan": True}
    for given in (20, 1e2, "hot", True):
        with pytest.raises(APIError, match=r"it must be an integer from 50 to 300$") as error:
            parse_body(json.dumps({"degrees": given}).encode(), schema)
        assert error.value.param == "degrees"


def test_contradictions_are_respelled():
    """Where fields contradict each other, the class knows, and whoever reads text knows the spelling."""
    with pytest.raises(DataError, match=r"^degrees=250\n(.*\n)*hint: for example degrees=200$") as python:
        OvenConfig(250, fan=True)
    with pytest.raises(DataError) as error:
        replace_nested(CakeConfig(), {"oven": {"degrees": 250, "fan": True}})
    flags, toml = respelled(error.value, FLAGS, ""), respelled(error.value, TOML, "")
    assert str(flags) == (
        "--oven.degrees 250\n  --oven.degrees is at most 200 with the fan\n\n"
        "hint: for example --oven.degrees 200"
    )
    assert isinstance(flags, DataError) and toml.fact == "oven.degrees = 250"
    with (
        pytest.raises(UsageError, match=r"^--heat 250\n  --heat is at most 200"),
        naming_flags(names={"degrees": "heat"}),
    ):
        raise python.value
    other = ProgramError("not about fields")
    assert respelled(other, FLAGS, "") is other
    with pytest.raises(ProgramError) as same, naming_flags():
        raise other
    assert same.value is other


def test_help_has_the_documentation(capsys):
    assert field_docs(OvenConfig) == {
        "degrees": "The temperature, in\ndegrees Celsius.",
        "fan": "Whether the fan runs.",
    }
    assert OvenConfig.__doc__.splitlines() == [
        "An oven.",
        "",
        "Attributes:",
        "  degrees: The temperature, in",
        "    degrees Celsius.",
        "  fan: Whether the fan runs.",
    ]
    with contextlib.suppress(SystemExit):
        tyro.cli(CakeConfig, args=["--help"])
    out = capsys.readouterr().out
    assert all(text in out for text in ("The number of layers.", "--oven.degrees", "Whether the fan runs."))


VALID = {
    "int": (int, [0, -3, np.int64(3)], [True, 1.0, "1", None]),
    "float": (float, [0, 2.5, np.float32(1)], [True, float("inf"), float("nan"), 10**400, "1", None]),
    "str": (str, ["", "a"], [1, None]),
    "text": (Text, ["a"], ["", 1]),
    "bool": (bool, [True, False], [0, 1, "true"]),
    "path": (Path, [Path("a")], ["a", None]),
    "positive": (Positive, [1e-300, 3], [0, -1]),
    "fraction": (Fraction, [0, 1, 0.5], [-1e-9, 1.1]),
    "optional": (PositiveInt | None, [None, 1], [0, "none"]),
    "literal": (Literal["a", 1], ["a", 1], ["b", True, 1.0]),
    "one of": (Annotated[str, OneOf({"a": 0, "b": 1})] | None, ["a", "b", None], ["c", 0]),
    "list": (tuple[PositiveInt, ...], [(), (1, 2)], [(0,), [1], 1]),
    "range of items": (Annotated[tuple[int, ...], Range(at_least=1)], [(), (1,)], [(1, 0)]),
    "pair": (tuple[int, float], [(1, 2.0)], [(1,), (1, 2, 3), (1.5, 2)]),
    "union": (NonNegative | OvenConfig, [0.5, OvenConfig()], [-1, "x"]),
    "anything": (Any, [None, "a", object()], []),
}


@pytest.mark.parametrize(("annotation", "valid", "invalid"), VALID.values(), ids=VALID)
def test_values(annotation, valid, invalid):
    kind = FieldType.of(annotation)
    assert [x for x in valid if not kind.accepts(x)] == []
    assert [x for x in invalid if kind.accepts(x)] == []


PARSED = {
    "integer": (int, ["12"], 12),
    "number": (float, ["3"], 3.0),
    "none": (PositiveInt | None, ["none"], None),
    "list": (tuple[int, ...], ["1", "2"], (1, 2)),
    "pair": (tuple[int, float], ["1", "2"], (1, 2.0)),
    "path": (Path, ["a/b"], Path("a/b")),
    "word": (str | None, ["a"], "a"),
}


@pytest.mark.parametrize(("annotation", "words", "value"), PARSED.values(), ids=PARSED)
def test_words_of_flags(annotation, words, value):
    parsed = FieldType.of(annotation).parse(words)
    assert parsed == value and type(parsed) is type(value)


MISPARSED = {
    "integer": (int, ["1.5"], "an integer"),
    "list": (tuple[int, ...], ["1", "a"], "a list in which each item is an integer"),
    "infinite": (float, ["inf"], "a finite number"),
    "boolean": (bool, ["yes"], "true or false"),
    "empty path": (Path, [""], "a path: it is empty"),
}


@pytest.mark.parametrize(("annotation", "words", "rule"), MISPARSED.values(), ids=MISPARSED)
def test_wrong_words_of_flags(annotation, words, rule):
    with pytest.raises(ValueError) as error:
        FieldType.of(annotation).parse(words)
    assert str(error.value) == rule


@pytest.mark.parametrize("name", ["train", "train_targets", "valid", "valid_targets", "fields", "buckets"])
@pytest.mark.parametrize("value", [3, None, {}, b"x", "", ("",), (None,)], ids=repr)
def test_settings_that_are_lists_are_checked(name, value):
    """One path was converted to a tuple before anything was checked."""
    with pytest.raises(ProgramError, match=f"{name} is a list in which each item is"):
        DataConfig(**{name: value})


@pytest.mark.parametrize(
    "peaks", [{}, b"x", 3, None, {"f32": -1}, {"f32": float("nan")}, {"f32": True}, {3: 1.0}, {"bf16": 1e12}]
)
def test_peaks_of_hardware_are_checked(peaks):
    with pytest.raises(HardwareError, match="peak_flops is a mapping"):
        dataclasses.replace(Hardware.of("a100"), peak_flops=peaks)


def test_contradictions_are_found_at_construction():
    with pytest.raises(ModelError, match="kv_heads is a divisor of heads, 4"):
        Config(heads=4, kv_heads=3)
    with pytest.raises(ProgramError, match="fields is one field"):
        DataConfig(fields=("a", "b", "c"))
    with pytest.raises(
        ProgramError, match="buckets is a list in which each item is an integer of at least 1"
    ):
        DataConfig(buckets=(-1,))


def test_settings_of_hosts_and_the_folder_are_checked_at_construction():
    with pytest.raises(ProgramError, match=r"(?s)processes=0, process=-1.*processes is an integer of at le"):
        HostsConfig(processes=0, process=-1)
    with pytest.raises(ProgramError, match=r"(?s)folder=3, steps=0.*folder is a path"):
        TrainConfig(preset="tiny-lm", folder=3, steps=0)


def test_a_request_reports_unknown_and_invalid_fields_together():
    body = b'{"promt": "a", "stream": 1, "limit": 2, "a": 0, "b": 0, "c": 0}'
    with pytest.raises(APIError) as found:
        parse_body(body, COMPLETION_FIELDS)
    lines = found.value.message.split("\n")
    assert [line.partition(";")[0] for line in lines] == [
        'there is no field "promt" (did you mean prompt?)',
        'there is no field "limit"',
        'there is no field "a"',
        'there is no field "b"',  # the message does not grow with the request
        "prompt is missing",
        "stream is 1",
    ]
    assert (found.value.param, found.value.code) == ("promt", "unknown_parameter")


def test_a_request_reports_every_invalid_field():
    body = b'{"prompt": "a", "temperature": 1e999, "top_p": 0, "n": -1, "seed": "x"}'
    with pytest.raises(APIError) as found:
        parse_body(body, COMPLETION_FIELDS)
    lines = found.value.message.split("\n")
    assert [line.split()[0] for line in lines] == ["temperature", "top_p", "seed", "n"]
    assert "a finite number" in lines[0] and found.value.param == "temperature"
