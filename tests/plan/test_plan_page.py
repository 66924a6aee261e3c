"""The page of a plan, in a real browser."""

import json
import re

import jax
import pytest

import weft as wf
from benchmarks import lm
from weft.core.labels import OpLabel
from weft.plan.facts import Advice, Collective, LiveBuffer, Memory, PlannedTensor, Work
from weft.plan.html import plan_page
from weft.plan.plan import Plan

pytest_plugins = ["browser"]
ENTER, END, HOME, RIGHT, DOWN = "\ue007", "\ue010", "\ue011", "\ue014", "\ue015"  # WebDriver's names for keys

# -- Plans to look at ----------------------------------------------------------------------------------

HOSTILE = "</script><script>document.title='broken'</script><!-- <b>&amp; {{data}} {{title}}"


def made_plan(mesh, stored, events=(), advice=(), name="made"):
    """A plan made by hand."""
    memory = Memory(
        40,
        80,
        160,
        40,
        10,
        200,
        (LiveBuffer(90, "f32[9]{V:data}", OpLabel.unlabeled(HOSTILE), "forward", HOSTILE),),
    )
    plan = Plan(name, wf.Mesh(mesh), 'Layout("")', tuple(events), tuple(stored), memory)
    plan.__dict__["advice"] = tuple(advice)
    return plan


def stored(name, *dims, role="value"):
    return PlannedTensor(name, "input", role, "f32", dims, 40, 0.1)


def hostile_plan():
    """512 devices, long words without a line break, and markup in every text."""
    long, hostile = OpLabel("einsum", [("x" * 300,)]), OpLabel.unlabeled(HOSTILE)
    events = [
        Work(hostile, "forward", HOSTILE, "matmul", "f32", 10, 2560, 30, 2),
        Work(long, "backward", "a/very/long/path/" * 9 + "f.py:1", "matmul", "f32", 40, 40, 30, 1),
        Collective("all-reduce", ("data", "model"), 100, 3, long, "update", HOSTILE, 190),
    ]
    both = stored("x" * 120, ("a", 160, ("data",)), ("b", 320, ("model",)), role="param")
    advice = [Advice("warning", long + HOSTILE, HOSTILE)] * 6
    return made_plan("data=16 model=32", [both, stored(HOSTILE)], events, advice, name=HOSTILE)


@pytest.fixture(scope="module")
def lm_plan():
    return lm.step().plan(*lm.specs())


@pytest.fixture(scope="module")
def pages(lm_plan, tmp_path_factory):
    """Files by name."""
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "lm": plan_page(lm_plan),
        "timed": plan_page(lm_plan, "tpu-v2"),
        "hostile": plan_page(hostile_plan()),
        "pods": plan_page(made_plan("pod=3 data=5 model=40", [stored("x", ("a", 77, ("model", "pod")))])),
        "empty": plan_page(made_plan("", [])),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


# -- Without a browser ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [hostile_plan, lambda: lm.step().plan(*lm.specs())], ids=["hostile", "lm"])
def test_the_page_contains_the_full_plan(make):
    plan = make()
    text = plan_page(plan)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data) == json.loads(json.dumps(plan.to_data()))


def test_the_page_loads_nothing(lm_plan):
    text = plan_page(lm_plan)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(|<script[^>]+src|<link[^>]+href=\"(?!data:)", text)


# -- In the browser ------------------------------------------------------------------------------------

# Elements that stick out of the window, but for those in a box that scrolls.
STICKING_OUT = """
return [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, .tensors, script")
  && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 200))
"""


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("name", ["lm", "timed", "hostile", "pods", "empty"])
def test_it_loads_and_fits(browser, pages, name, width, scheme):
    browser.open(pages[name], width, scheme=scheme)
    assert browser.errors() == []
    assert browser.run("return innerWidth") == width
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(STICKING_OUT) == []
    assert browser.text("#found")  # the last thing that is drawn


def test_markup_in_a_plan_stays_text(browser, pages):
    browser.open(pages["hostile"])
    assert browser.text("#name").strip() == HOSTILE
    assert browser.run("return document.title") == f"{HOSTILE} · Weft plan"
    assert HOSTILE in browser.texts("#events td.op code")[0]
    assert browser.run("return document.scripts.length") == 2


def test_totals(browser, pages, lm_plan):
    browser.open(pages["timed"])
    text = browser.text("#totals")
    for part in ("8.46 GFLOP", "23.1 MiB", "model", "data", "1×", "tpu-v2"):
        assert part in text
    assert str(lm_plan.mesh.size) in browser.text("#machine")
    assert browser.run("return getComputedStyle(document.querySelector('.bar i')).width") != "0px"


def test_sorting(browser, pages, lm_plan):
    browser.open(pages["lm"])
    flops = [e.flops * e.count if isinstance(e, Work) else 0 for e in lm_plan.events]
    order = sorted(range(len(flops)), key=lambda n: -flops[n])
    header = "#events th[data-key=flops]"

    def column(n):
        return browser.texts(f"#events td:nth-child({n})")

    assert column(1) == [str(n) for n in range(len(flops))]
    browser.click(header + " button")
    assert column(1) == [str(n) for n in order]
    assert browser.run(f"return document.querySelector('{header}').ariaSort") == "descending"
    browser.type(header + " button", ENTER)  # the heading that was clicked keeps the focus
    assert column(1) == [str(n) for n in sorted(order, key=lambda n: (flops[n], n))]
    browser.click("#events th[data-key=op] button")
    assert column(2) == sorted(e.op for e in lm_plan.events)


def test_filtering(browser, pages, lm_plan):
    browser.open(pages["lm"])

    def rows():
        return [int(n) for n in browser.texts("#events td:first-child")]

    def choose(name, value):  # with the keyboard
        options = browser.texts(f"#filters [name={name}] option")
        browser.type(f"#filters [name={name}]", HOME + DOWN * options.index(value))

    def expected(keep):
        return [n for n, e in enumerate(lm_plan.events) if keep(e)]

    browser.type("#filters [name=text]", "D_FF")
    assert rows() == expected(lambda e: "d_ff" in e.op) != []
    choose("phase", "backward")
    assert rows() == expected(lambda e: "d_ff" in e.op and e.phase == "backward") != []
    browser.click("#filters [type=reset]")
    choose("axis", "data")
    assert rows() == expected(lambda e: isinstance(e, Collective) and e.axes == ("data",)) != []
    assert browser.text("#found").startswith(f"{len(rows())} of {len(lm_plan.events)} events")
    choose("axis", "none")
    assert rows() == expected(lambda e: isinstance(e, Work))
    choose("kind", "matmul")
    assert rows() == expected(lambda e: e.kind == "matmul") != []
    browser.click("#filters [type=reset]")
    browser.type("#filters [name=text]", "no such op")
    assert rows() == []


# Which device holds what, on a mesh of data=4 model=2.
SLICED = [
    stored("columns", ("a", 8, ()), ("b", 16, ("model",))),
    stored("two axes", ("a", 16, ("model", "data")), ("b", 6, ())),
    stored("two dims", ("a", 8, ("data",)), ("b", 6, ("model",))),
    stored("uneven", ("a", 9, ("data",)), ("b", 3, ("model",))),
    stored("mostly padding", ("a", 3, ("data", "model"))),
    stored("whole", ("a", 8, ())),
    stored("scalar"),
]


def storage_of(tensor, mesh):
    """The slice of each device according to JAX: the ranges of the split dims."""
    shape = [-(-size // mesh.ways(axes)) * mesh.ways(axes) for _, size, axes in tensor.dims]
    spec = jax.sharding.PartitionSpec(*[axes or None for _, _, axes in tensor.dims])
    shares = jax.sharding.NamedSharding(mesh.jax_mesh, spec).devices_indices_map(tuple(shape))
    rows = []
    for device in mesh.jax_mesh.devices.flat:
        ranges = []
        for (name, size, axes), part in zip(tensor.dims, shares[device], strict=True):
            first, last = part.indices(size)[0], min(part.indices(10**9)[1], size) - 1
            span = "padding only" if first > last else str(first) if first == last else f"{first}–{last}"
            ranges += [f"{name} {span}"] if axes else []
        rows.append(", ".join(ranges) or "whole")
    return rows


@pytest.mark.parametrize("width", [1280, 390])
def test_choosing_a_tensor(browser, tmp_path, width):
    plan = made_plan("data=4 model=2", SLICED)
    (tmp_path / "page.html").write_text(plan_page(plan), encoding="utf-8")
    browser.open(tmp_path / "page.html", width)
    for n, tensor in enumerate(SLICED):
        browser.click(f"#tensors input[value='{n}']")
        assert browser.text("#tensor").startswith(tensor.name)
        cells = browser.texts("#grid .device small:last-child")
        assert cells == storage_of(tensor, plan.mesh), tensor.name
        # The same piece has the same colour and number, different pieces have different ones.
        colours = browser.run(
            "return [...document.querySelectorAll('#grid .device')].map(e => getComputedStyle(e).backgroundColor)"
        )
        numbers = browser.texts("#grid .device b")
        assert len(set(zip(cells, colours, numbers, strict=True))) == len(set(colours)) == len(set(numbers))
        if "padding" not in str(cells):
            assert len(set(colours)) == len(set(cells))
        assert len(browser.texts("#slices tbody tr")) == len(set(numbers))
    assert browser.errors() == []


def test_every_device_of_a_large_mesh_is_drawn(browser, pages):
    for name, count in (("hostile", 512), ("pods", 600)):
        browser.open(pages[name])
        devices = browser.run(
            "return [...document.querySelectorAll('#grid .device')].map(e => Number(e.dataset.index))"
        )
        assert devices == list(range(count))
    browser.open(pages["hostile"])
    assert browser.run("return new Set(shown.slices.map(p => p.colour)).size") == 512


def test_finding_a_tensor_by_a_dim(browser, pages, lm_plan):
    browser.open(pages["lm"])
    browser.type("#search", "d_ff")
    visible = browser.run(
        "return [...document.querySelectorAll('#tensors label:not([hidden]) .mono')].map(e => e.textContent)"
    )
    assert visible == [s.name for s in lm_plan.stored if any(name == "d_ff" for name, *_ in s.dims)]


def test_keys_and_pointer_open_details(browser, pages, lm_plan):
    browser.open(pages["timed"])
    browser.type("#lanes", RIGHT)
    assert lm_plan.events[0].op in browser.text("#event")
    browser.type("#lanes", END)
    assert lm_plan.events[-1].op in browser.text("#event")
    matmul = next(n for n, e in enumerate(lm_plan.events) if e.kind == "matmul")
    browser.click(f"#lanes [data-index='{matmul}']")
    text = browser.text("#event")
    event = lm_plan.events[matmul]
    assert event.op in text and event.source in text and "forward matmul" in text
    browser.type("#grid", RIGHT * 2)
    assert browser.text("#device").startswith("Device 1 (data 0, model 1)")
    browser.click("#grid [data-index='6']")
    assert browser.text("#device").startswith("Device 6 (data 3, model 0)")


def test_light_and_dark(browser, pages):
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser.open(pages["lm"], scheme="light")
    light = browser.run(ground)
    browser.click("#theme")
    dark = browser.run(ground)
    assert dark != light
    browser.open(pages["lm"], scheme="dark")
    assert browser.run(ground) == dark
    browser.click("#theme")
    assert browser.run(ground) == light
