"""What notebooks display: the facts are there, texts of the user are escaped, and nothing is loaded or run."""

import html.parser
import re

import jax
import numpy as np
import pytest
from compare import cosines

import weft as wf
from weft.core.html import STYLE


class Cells(html.parser.HTMLParser):
    """The tables of a fragment as lists of rows; the other text; unclosed elements are an error."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.text, self.open = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in "div style p code b small table tr th td pre".split()
        assert dict(attrs).keys() <= {"class"}
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"th", "td"} & {*self.open}:
            self.tables[-1][-1][-1] += data
        elif "style" not in self.open:
            self.text.append(data)


def shown(x):
    return Cells(x._repr_html_())


def test_a_mesh():
    found = shown(wf.Mesh("data=2 model=3"))
    assert found.text[0] == 'Mesh("data=2 model=3")'
    assert found.tables == [
        [
            ["data × model", "model 0", "model 1", "model 2"],
            ["data 0", "device 0", "device 1", "device 2"],
            ["data 1", "device 3", "device 4", "device 5"],
        ]
    ]
    assert shown(wf.Mesh("x=2", jax.devices()[:4:-2])).tables[0][1] == ["", "device 7", "device 5"]
    assert not shown(wf.Mesh()).tables
    three = shown(wf.Mesh("a=2 b=2 c=2")).tables[0]
    assert [row[0] for row in three] == ["a × b × c", "a 0, b 0", "a 0, b 1", "a 1, b 0", "a 1, b 1"]
    large = shown(wf.Mesh("a=64 b=64"))
    assert len(large.tables[0]) == len(large.tables[0][0]) == 9
    assert "the first 8 × 8 of 64 × 64" in large.text and any("planned" in text for text in large.text)


def test_a_layout():
    assert shown(wf.Layout("batch:pod+data d:model")).tables == [
        [["dim", "split over"], ["batch", "pod + data"], ["d", "model"]]
    ]
    assert shown(wf.Layout("b:x", params="d:y")).tables == [
        [["dim", "split over", "stored parameters"], ["b", "x", "x"], ["d", "—", "y"]]
    ]
    both = shown(wf.Layout("b:x", params="d:y", optimizer="d:z")).tables[0]
    assert both[0] == ["dim", "split over", "stored parameters", "optimizer state"]
    assert not shown(wf.Layout()).tables


def test_which_device_has_which_slice():
    x = cosines("a=5 b=4")
    (grid,) = shown(wf.place(x, "data=2 model=2", "a:data b:model")).tables
    assert grid == [
        ["4 slices", "b 0:2", "b 2:4"],
        ["a 0:3", "device 0", "device 1"],
        ["a 3:5", "device 2", "device 3"],
    ]
    (row,) = shown(wf.place(x, "data=4 model=2", "a:data")).tables
    assert row[0] == ["4 slices", "a 0:2", "a 2:4", "a 4:5", "a padding"]
    assert row[1] == ["", "devices 0, 1", "devices 2, 3", "devices 4, 5", "devices 6, 7"]
    assert "replicated on 4 devices" in shown(wf.place(x, "data=4", "")).text
    assert not shown(x).tables


@pytest.mark.parametrize("layout", ["a:y+x b:z", "a:x+y+z", "b:z+y a:x", "a:z"])
def test_the_slices_are_those_of_jax(layout):
    """JAX's own map of devices to indices is the oracle."""
    x = wf.place(cosines("a=8 b=4"), "x=2 y=2 z=2", layout)
    indices = x.storage.sharding.devices_indices_map(x.storage.shape)
    want = {}
    for device, index in indices.items():
        block = tuple(
            f"{d.name} {s.start or 0}:{s.stop or d.size}" for d, s in zip(x.dims, index, strict=True)
        )
        want.setdefault(block, set()).add(device.id)
    head, *rows = shown(x).tables[0]
    got = {}
    for row in rows:
        for column, cell in zip(head[1:], row[1:], strict=True):
            blocks = {text.split()[0]: text for text in [*filter(None, row[0].split(", ")), column]}
            block = tuple(blocks.get(d.name, f"{d.name} 0:{d.size}") for d in x.dims)
            got[block] = {int(n) for n in re.findall(r"\d+", cell)}
    assert got == want


def test_a_tensor_has_the_text_of_its_repr():
    x = wf.place(wf.parameter(cosines("a=50 b=4")), "data=2", "a:data")
    found = shown(x)
    assert found.text[0] == "f32[a=50/data·2, b=4]" and "param" in found.text
    assert found.text[-1] == repr(x).partition("\n")[2]
    assert shown(wf.spec("a=3")).text == ["f32[a=3]"]


def test_a_tensor_that_was_donated():
    x = wf.place(cosines("a=4"), "data=2", "a:data")
    wf.spmd(lambda x: x + 1, "data=2", "a:data", donate=[0])(x)
    assert ", donated to a program" in shown(x).text


def step(x, w):
    return wf.sum(wf.square(wf.einsum(x, w, out=["batch", "f"])))


ARGS = wf.spec("batch=64 d=32"), wf.spec("d=32 f=16")


def test_a_plan():
    plan = wf.spmd(wf.grad(step, 1), "data=4 model=2", "batch:data f:model").plan(*ARGS)
    found = shown(plan)
    totals, collectives = found.tables
    named = dict(zip(*totals, strict=True))
    assert named["in collectives"] == "1 KiB" and named["FLOP"] == "16.4 K" and named["done"] == "1×"
    (gradient,) = [row for row in collectives if row[0].startswith("gradient")]
    assert gradient[:6] == ["gradient[d,f]", "backward", "all-reduce", "data", "1", "1 KiB"]
    assert gradient[6].startswith("tests/core/test_html.py:")
    assert "no collectives" in shown(wf.spmd(wf.exp).plan(ARGS[0])).text


def test_a_plan_with_many_collectives_shows_the_largest():
    def sums(x):
        return [wf.exp(wf.sum(x["b", : n + 1].rename(b=f"b{n}"), "a")) for n in range(20)]

    found = shown(wf.spmd(sums, "x=2", "a:x").plan(wf.spec("a=4 b=32")))
    sizes = [row[5] for row in found.tables[1][1:]]
    assert len(sizes) == 12 and sizes[0] == "80 B" and "and 8 more: print(plan.explain())" in found.text


def test_a_search():
    result = wf.search(wf.grad(step, 1), ARGS, devices=4, hardware="h100", top=3)
    (table,) = shown(result).tables
    assert table[0] == ["time", "memory", "bound by", "done", "mesh", "layout"]
    assert [row[4] for row in table[1:]] == [str(one.mesh) for one in result.ranked[:10]]
    nothing = wf.search(wf.grad(step, 1), ARGS, devices=4, hardware="h100", memory=1)
    assert "nothing fits" in shown(nothing).text and len(shown(nothing).tables[0]) == 2


def test_a_program():
    program = wf.spmd(step, "data=4", "batch:data")
    assert "not traced yet" in shown(program).text
    program.jaxpr(*ARGS)
    assert shown(program).tables == [
        [["traced", "arguments"], ["first call", "f32[batch=64, d=32], f32[d=32, f=16]"]]
    ]


def test_texts_are_escaped():
    def fn(x):
        return wf.sum(x, "a")

    fn.__name__ = "<script>alert('&')</script>"
    program = wf.spmd(fn, "x=2", "a:x")
    for x in (program, program.plan(wf.spec("a=4 b=4"))):
        assert "<script" not in x._repr_html_() and "&lt;script&gt;alert(" in x._repr_html_()


def test_the_style_is_small_and_belongs_to_the_fragment():
    assert all(line.startswith((".weft", " ")) for line in STYLE.strip().splitlines())
    assert len(wf.Mesh("data=4 model=2")._repr_html_()) < 2000
    assert not re.search(r"url\(|@import|http", STYLE)


def test_a_slice_has_no_values():
    texts = []
    wf.spmd(lambda x: [texts.append(x._repr_html_()), x][1], "data=2", "a:data").jaxpr(wf.spec("a=4"))
    assert "f32[a=4/data·2]" in texts[0] and "<table>" not in texts[0]


def test_values_are_truncated():
    assert len(wf.tensor(np.zeros((100, 100)), "a=100 b=100")._repr_html_()) < 2000
