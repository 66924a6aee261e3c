"""Error messages in general: their golden texts, suggestions and formatting. Each theme has its own `test_*_errors.py`."""

import linecache
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import test_control_errors
import test_exported
import test_layout_errors
import test_op_errors
import test_program_errors
import test_tensor_errors
from mistakes import MESH, ones

import weft as wf
from weft import nn
from weft.core.describe import format_call
from weft.core.errors import LayoutWarning, nearest
from weft.models import Batch, Config, Transformer
from weft.optim import AdamW
from weft.train import train_step


def test_warning(golden, monkeypatch, request):
    """A rule whose dim never occurs warns at the line that traces the program."""
    monkeypatch.chdir(request.config.rootpath)
    program = wf.spmd(lambda x: x + 1, MESH, "batch:data d_fff:model")
    with pytest.warns(LayoutWarning) as caught:
        program.jaxpr(ones("batch=8 d_ff=4"))  # wrong
    (warning,) = caught
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).rstrip().endswith("# wrong")
    where = f"  at tests/core/test_errors.py:{warning.lineno}"
    text = str(warning.message)
    assert text.count("  at ") == text.count(where) == 1
    golden(
        "rule_without_effect", f"LayoutWarning: {text.replace(where, '  at tests/core/test_errors.py:LINE')}"
    )


def test_every_golden_text_has_its_mistake():
    names = {path.stem for path in (Path(__file__).parents[1] / "messages").glob("*.txt")}
    tables = (
        test_control_errors,
        test_exported,
        test_layout_errors,
        test_op_errors,
        test_program_errors,
        test_tensor_errors,
    )
    mistakes = [name for module in tables for name in module.MISTAKES]
    assert len(mistakes) == len(set(mistakes))
    assert names == {*mistakes, "rule_without_effect"}


@pytest.mark.parametrize(
    "name, known, meant",
    [
        ("nope", ["tiny-moe", "tiny-lm"], ""),
        ("moe", ["tiny-lm", "tiny-moe"], "tiny-moe"),
        ("ml", ["lm", "translate"], "lm"),
        ("dta", ["data", "model"], "data"),
        ("lenght", ["heads", "length"], "length"),
        ("x", ["y"], ""),
    ],
)
def test_only_close_names_are_suggested(name, known, meant):
    assert nearest(name, known) == (f" (did you mean {meant}?)" if meant else "")


def test_types_are_formatted_as_their_names():
    """NumPy's types have a shape and a dtype, and were mistaken for arrays."""
    assert format_call("cast", (np.float32, jnp.bfloat16), {"to": int}) == "cast(float32, bfloat16, to=int)"


def test_long_arguments_are_formatted_as_their_type():
    """A model and its optimizer state made the line of the failing call pages long."""
    model = nn.specs(Transformer(Config(vocab=32, d_model=8, d_ff=16, heads=2, d_kv=4, layers=1)))
    optimizer = AdamW(1e-3)
    rows = Batch(wf.spec("batch=3 length=4", "int32"), wf.spec("batch=3 length=4", "int32"))
    with pytest.raises(wf.ShapeError) as error:
        wf.spmd(train_step(optimizer, micro=2)).plan(model, optimizer.init(model), rows, None)
    call = "program step(Transformer(…), {step: i32[], mean: {…}, variance: {…}}, Batch(…), None)"
    assert error.value.call == call


@pytest.mark.parametrize("name, meant", [("einsun", "did you mean einsum?"), *wf.ELSEWHERE.items()])
def test_unknown_names_suggest_an_alternative(name, meant):
    with pytest.raises(AttributeError, match=re.escape(meant)):
        getattr(wf, name)
    assert meant not in wf.ELSEWHERE.values() or hasattr(wf, meant)
