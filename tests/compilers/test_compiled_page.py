"""The page of a compiled program: its text, and its looks in a real browser."""

import html
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import weft as wf
from weft.compilers.compiled import Compiled
from weft.compilers.facts import CompiledCollective, CompiledMemory, CompiledWork, PaddedArray
from weft.compilers.target import Target
from weft.core.errors import TensorTypeError
from weft.core.labels import OpLabel
from weft.plan.facts import Collective, Memory, UnboundedLoop, Work
from weft.plan.network import assign_mesh
from weft.plan.plan import Plan

pytest_plugins = ["browser"]
SPACE = " "

# -- Programs to look at -------------------------------------------------------------------------------

HOSTILE = "</script><script>document.title='broken'</script><!-- <b>&amp; {{data}} {{name}} \"'"
GIB = 1 << 30
LAYOUT = 'Layout("batch:data d_ff:model", params="d_model:data")'
UP = OpLabel("einsum", [("batch", "d_model"), ("d_model", "d_ff")], ("batch", "d_ff"), layer="block.up")
RELU = OpLabel("relu", [("batch", "d_ff")], layer="block")
GRADIENT = OpLabel("gradient", [("d_model", "d_ff")])


def made_compiled(target="tpu-v5e:2x2", mesh="data=2 model=2", **fields):
    """A compiled program made by hand: without work and collectives, unless they are given."""
    target, mesh = Target.of(target), wf.Mesh(mesh)
    base = {
        "name": "made",
        "target": target,
        "mesh": mesh,
        "layout": LAYOUT,
        "assignment": assign_mesh((), mesh, target.hardware),
        "compiler": "libtpu 1.2.3",
        "device_kind": "TPU v5 lite",
        "seconds": 12.5,
        "memory": CompiledMemory(4 * GIB, 2 * GIB, 2 * GIB, 3 * GIB, 1024, 16 * GIB),
        "work": (),
        "collectives": (),
        "largest": (),
        "padded": (),
        "loops": (),
        "hlo": "HloModule made",
    }
    return Compiled(**(base | fields))


def work(kind, roofline, estimated, op=UP, count=1, source="lm.py:8", flops=0, instruction="fusion.1"):
    return CompiledWork(
        op, "forward", source, instruction, kind, "f32[8,4]", flops, 4096, count, roofline, estimated
    )


def collective(kind, requested, axes, seconds, hidden=0.0, count=1, arrays=1, op=UP, source="lm.py:8"):
    return CompiledCollective(
        *(kind, requested, axes, "f32", 2048, arrays, count, hidden > 0, hidden, seconds, None),
        *(op, "backward", source, f"{kind}.1"),
    )


NO_OP = OpLabel.unlabeled("")
SMALL = made_compiled(
    name="step",
    work=(
        work("matmul", 3e-3, 5e-3, count=4, flops=10**9),
        work("elementwise", 1e-3, None, RELU, count=2),
        work("elementwise", 1e-3, 4e-3, RELU, count=2),
        work("copy", 2e-3, 1e-3, NO_OP, source="", instruction="copy.7"),
        work("gather", 1e-12, None, RELU),
        work("custom call", 0.0, None, NO_OP),
    ),
    collectives=(
        collective("all-reduce", "reduce-scatter", ("data",), 4e-3, count=2, arrays=3, op=GRADIENT),
        collective("all-gather", "all-gather", ("model",), 3e-3, hidden=2e-3),
        collective("permute", "", ("data", "model"), 1e-3, hidden=5e-3, op=RELU),
    ),
    padded=(PaddedArray(RELU, "lm.py:9", "f32[8,1] in tiles of 8x128", 32, 4096),),
    loops=(UnboundedLoop(OpLabel("while_loop", [("batch",)]), "lm.py:30"),),
)
EMPTY = made_compiled("tpu-v5e:1x1", "")
TOO_LARGE = replace(
    SMALL, memory=CompiledMemory(10 * GIB, GIB, 0, 9 * GIB, 1024, 16 * GIB), name="too large", loops=()
)
HOSTILE_OP, LONG_OP = OpLabel.unlabeled(HOSTILE), OpLabel("einsum", [("x" * 300,)])
LONG_PATH = "a/very/long/path/" * 9 + "f.py:1"
HOSTILE_PROGRAM = made_compiled(
    "tpu-v5e:16x16",
    "data=16 model=16",
    name=HOSTILE,
    layout=HOSTILE,
    compiler=HOSTILE,
    device_kind=HOSTILE,
    work=tuple(
        work(f"custom call {HOSTILE}" if n % 2 else "matmul", (n + 1) * 1e-3, None, op, source=f"{place}{n}")
        for n, (op, place) in enumerate([(HOSTILE_OP, HOSTILE), (LONG_OP, LONG_PATH)] * 15)
    ),
    collectives=tuple(
        collective("all-reduce", HOSTILE, ("data", "model"), 1e-3, op=op, source=f"{HOSTILE}{n}")
        for n, op in enumerate([HOSTILE_OP, LONG_OP] * 15)
    ),
    padded=(PaddedArray(HOSTILE_OP, HOSTILE, HOSTILE, 1, 2),) * 12,
    loops=(UnboundedLoop(LONG_OP, LONG_PATH), UnboundedLoop(HOSTILE_OP, HOSTILE)),
)


def made_plan(mesh="data=2 model=2", layout=LAYOUT, name="step"):
    """A plan of `SMALL`, with other collectives and less work."""
    events = (
        Work(UP, "forward", "lm.py:8", "matmul", "bf16", 9 * 10**8, 36 * 10**8, 2048, 4),
        Collective("reduce-scatter", ("data",), 2048, 6, GRADIENT, "backward", "lm.py:8", 1024),
        Collective("all-gather", ("model",), 2048, 1, UP, "forward", "lm.py:8", 1024),
    )
    return Plan(name, wf.Mesh(mesh), layout, events, (), Memory(GIB, GIB, 3 * GIB, 0, GIB, 6 * GIB))


PAGES = {
    "small": lambda: SMALL.to_html(),
    "planned": lambda: SMALL.to_html(made_plan()),
    "too large": lambda: TOO_LARGE.to_html(made_plan()),
    "hostile": lambda: HOSTILE_PROGRAM.to_html(made_plan("data=16 model=16", HOSTILE, HOSTILE)),
    "empty": lambda: EMPTY.to_html(),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Files by name."""
    folder = tmp_path_factory.mktemp("pages")
    for name, make in PAGES.items():
        (folder / f"{name}.html").write_text(make(), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


# -- Without a browser ---------------------------------------------------------------------------------

VOID = {"meta", "link", "input", "wbr"}


class Reader(HTMLParser):
    """The tables of a page by their names, a row as a dict; the names of bars; the text of each section."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.bars, self.sections = [], {}, [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.sections[given["id"]] = self.section = []
        elif given.get("role") == "region":
            self.rows = self.tables[given["aria-label"]] = []
        elif given.get("class") == "bar":
            assert given["role"] == "img"
            self.bars.append(given["aria-label"])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
            assert tag == "td" or given["scope"] == ("row" if "tbody" in self.open else "col")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if "tr" in self.open:
            self.rows[-1][-1] += text
        if "section" in self.open:
            self.section.append(text)

    def table(self, name):
        columns, *rows = self.tables[name]
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def column(self, name, column):
        return [row[column] for row in self.table(name)]


@pytest.mark.parametrize("compiled", [SMALL, HOSTILE_PROGRAM, EMPTY], ids=["small", "hostile", "empty"])
def test_the_page_contains_the_data(compiled):
    text = compiled.to_html()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data) == json.loads(compiled.to_json())


@pytest.mark.parametrize("name", PAGES)
def test_the_page_loads_nothing_and_is_well_formed(name):
    text = PAGES[name]()
    assert "default-src 'none'" in text
    own = text.replace(html.escape(HOSTILE), "")
    assert not re.search(r"https?://|@import|url\(|<script[^>]+src|<link[^>]+href=\"(?!data:)", own)
    Reader(text)


def test_what_was_compiled():
    text = html.unescape(SMALL.to_html())
    assert "Compiled for tpu-v5e:2x2 (4 devices, TPU v5 lite) by libtpu 1.2.3 in 12.5 s. Nothing ran" in text
    assert 'on mesh "data=2 model=2"' in text and "the seconds are estimates" in text
    assert "batch:data d_ff:model,<wbr> params=d_model:data" in text


def test_memory_that_fits():
    page = Reader(SMALL.to_html())
    assert "It fits. A device needs 7 GiB of 16 GiB." in "".join(page.sections["memory"])
    assert "Results of 2 GiB reuse donated arguments" in "".join(page.sections["memory"])
    assert (
        page.bars[0]
        == "Memory of a device, 16 GiB: arguments 4 GiB; temporaries 3 GiB; code 1 KiB; free 9 GiB"
    )
    assert [tuple(row.values()) for row in page.table("Memory by use")] == [
        ("arguments", "4 GiB", "25.0%"),
        ("temporaries", "3 GiB", "18.8%"),
        ("results that reuse no argument", "0 B", "0.0%"),
        ("code", "1 KiB", "0.0%"),
        ("needed", "7 GiB", "43.8%"),
        ("free", "9 GiB", "56.2%"),
    ]


def test_memory_that_does_not_fit():
    text = TOO_LARGE.to_html()
    page = Reader(text)
    assert "It does not fit. A device has 16 GiB (the line in the bar) and needs 20 GiB" in "".join(
        page.sections["memory"]
    )
    assert page.table("Memory by use")[-1] == {"Use": "missing", "Bytes": "4 GiB", "Share": "25.0%"}
    assert 'class="limit" style="left:80.00%"' in text
    assert text.count("does not fit</b>") == 1 and '<b class="fits">' not in text


@pytest.mark.parametrize("code, fits", [(0, True), (1, False)])
def test_the_code_needs_memory_too(code, fits):
    full = CompiledMemory(16 * GIB, 0, 0, 0, code, 16 * GIB)
    assert ("It fits." in made_compiled(memory=full).to_html()) is fits


def test_time_by_kind():
    page = Reader(SMALL.to_html())
    rows = {
        row["Kind"]: (row["Roofline"], row["Compiler's"], row["Runs"])
        for row in page.table("Time by kind of work")
    }
    assert rows == {
        "matmul": ("12 ms", "20 ms", "4"),
        "elementwise": ("4 ms", "10 ms", "4"),  # one of the two has no estimate, and counts at its roofline
        "copy": ("2 ms", "1 ms", "1"),
        "gather": ("< 1 ns", "none", "1"),
        "network, exposed": ("9 ms", "9 ms", "4"),
        "a call": ("27 ms", "40 ms", ""),
    }
    assert page.bars[1:3] == [
        "By the roofline: matmul 12 ms; elementwise 4 ms; copy 2 ms; gather < 1 ns; network, exposed 9 ms",
        "By the compiler's estimates: matmul 20 ms; elementwise 10 ms; copy 1 ms; gather < 1 ns; network, exposed 9 ms",
    ]
    assert SMALL.step_seconds == pytest.approx((27e-3, 40e-3))
    assert "<dt>Time of a call</dt><dd>27–40 ms</dd>" in SMALL.to_html()


def test_a_compiler_without_estimates():
    compiled = replace(SMALL, work=tuple(replace(w, estimated_seconds=None) for w in SMALL.work))
    page = Reader(compiled.to_html())
    assert "Compiler's" not in page.tables["Time by kind of work"][0] + page.tables["Local work by op"][0]
    assert not any("compiler" in bar for bar in page.bars)
    assert "The compiler has no estimates of this program." in "".join(page.sections["time"])


def test_collectives():
    page = Reader(SMALL.to_html())
    assert page.bars[3:] == [
        "data: exposed 8 ms",
        "model: exposed 1 ms; overlapped 2 ms",
        "data+model: overlapped 1 ms",
    ]
    names = ["Over", "Collective", "Exposed", "Network", "Overlap", "Calls", "Bytes", "Op", "Layer", "Source"]
    assert page.tables["Collectives"][0] == names  # no estimates of the compiler, so no column for them
    assert [list(row.values()) for row in page.table("Collectives")] == [
        [
            *("data", "all-reduce requested: reduce-scatter", "8 ms", "8 ms", "sync", "2", "4 KiB"),
            *("gradient[d_model,d_ff] and 2 more", "", "lm.py:8"),
        ],
        ["model", "all-gather", "1 ms", "3 ms", "async", "1", "2 KiB", str(UP), "block.up", "lm.py:8"],
        ["data+model", "permute", "0", "1 ms", "async", "1", "2 KiB", str(RELU), "block", "lm.py:8"],
    ]
    assert all(line in "".join(page.sections["network"]) for line in SMALL.assignment.describe())


def test_estimates_of_collectives():
    estimated = replace(SMALL.collectives[0], estimated_seconds=6e-3)
    page = Reader(replace(SMALL, collectives=(estimated, *SMALL.collectives[1:])).to_html())
    assert page.column("Collectives", "Compiler's") == ["12 ms", "", ""]


def test_planned_next_to_compiled():
    page = Reader(SMALL.to_html(made_plan()))
    rows = {row["Quantity"]: row for row in page.table("Planned next to compiled")}
    peak, flops = rows["memory at the peak"], rows["FLOP on each device"]
    assert (peak["Planned"], peak["Compiled"], peak["Plan is"]) == ("6 GiB", "7 GiB", "-14.3%")
    assert (flops["Planned"], flops["Compiled"], flops["Plan is"]) == ("3.6 G", "4 G", "-10.0%")
    assert str(UP) in flops["Difference"]
    assert (rows["read and written"]["Planned"], rows["read and written"]["Compiled"]) == ("8 KiB", "44 KiB")
    time = made_plan().time(SMALL.target.hardware)
    local = wf.plan.units.human_seconds(time.compute_seconds + time.memory_seconds)
    assert (
        rows["local work, roofline"]["Planned"]
        == rows["local work, compiler's estimates"]["Planned"]
        == local
    )
    assert rows["local work, roofline"]["Compiled"] == "18 ms"
    assert rows["local work, compiler's estimates"]["Compiled"] == "31 ms"
    assert {"bytes over data", "bytes over model", "bytes over data+model", "network"} <= set(rows)
    kinds = {
        (row["Over"], row["Kind"]): list(row.values())[2:]
        for row in page.table("Collectives by axes and kind")
    }
    assert kinds == {
        ("data", "reduce-scatter"): ["6", "12 KiB", "0", "0 B"],
        ("data", "all-reduce"): ["0", "0 B", "2", "4 KiB"],
        ("model", "all-gather"): ["1", "2 KiB", "1", "2 KiB"],
        ("data+model", "permute"): ["0", "0 B", "1", "2 KiB"],
    }
    assert "comparison" not in Reader(SMALL.to_html()).sections


def test_a_plan_of_another_layout():
    warning = "the plan is of mesh &quot;data=4 model=1&quot;"
    assert warning in SMALL.to_html(made_plan("data=4 model=1", LAYOUT))
    assert warning not in SMALL.to_html(made_plan())
    with pytest.raises(TensorTypeError, match="'tpu-v5e' is not a plan"):
        SMALL.to_html("tpu-v5e")


def test_work_by_op():
    page = Reader(SMALL.to_html())
    rows = page.table("Local work by op")
    assert [row["Op"] for row in rows] == [str(UP), str(RELU), "copy.7", str(RELU)]  # the longest first
    assert rows[0] == {
        **{"Op": str(UP), "Kind": "matmul", "Roofline": "12 ms", "Compiler's": "20 ms", "Runs": "4"},
        **{"FLOP": "4 G", "Bytes": "16 KiB", "Phase": "forward", "Layer": "block.up", "Source": "lm.py:8"},
    }


def test_long_tables_hide_rows_until_all_are_requested():
    text = HOSTILE_PROGRAM.to_html()
    page = Reader(text)
    assert len(page.table("Local work by op")) == len(page.table("Collectives")) == 30
    assert len(page.table("Padding")) == 12
    assert text.count("<tr class=later>") == 10 + 10 + 4
    assert re.findall(r"Show all (\d+) rows", text) == ["30", "30", "12"]
    assert "Show all" not in SMALL.to_html()


def test_copies_and_padding():
    page = Reader(SMALL.to_html())
    assert "The compiler added copies and transposes that read and write 4 KiB." in page.sections["copies"]
    assert page.table("Copies")[0] == {
        **{"Bytes": "4 KiB", "Runs": "1", "Roofline": "2 ms", "Array": "f32[8,4]", "Op": "copy.7"},
    }
    assert page.column("Padding", "Padding") == ["3.97 KiB"] and page.column("Padding", "Of") == ["32 B"]
    assert not {"copies", "padding"} & set(Reader(EMPTY.to_html()).sections)


def test_the_notes_are_those_of_the_text():
    text = " ".join(SMALL.explain(width=10**6).split())
    notes = re.findall(r'<li class="(\w+)"><b>\1</b> (.*?)</li>', SMALL.to_html())
    assert [level for level, _ in notes] == ["warning", "warning", "note"]
    for level, note in notes:
        assert f"{level}: {html.unescape(note)}" in text
    # Warnings come before everything else.
    assert SMALL.to_html().index('<li class="warning">') < SMALL.to_html().index('id="memory-title"')


def test_an_empty_program():
    page = Reader(EMPTY.to_html())
    assert "The compiled program has no collectives." in page.sections["network"]
    assert "The compiled program has no local work." in page.sections["work"]
    assert page.column("Time by kind of work", "Kind") == ["a call"]
    assert "on one device" in EMPTY.to_html()


# -- In the browser ------------------------------------------------------------------------------------

# Elements that stick out of the window, but for those in a box that scrolls.
STICKING_OUT = """
return [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, script")
  && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 200))
"""
# Texts with too little contrast to the color behind them (WCAG 2.2, level AA).
FAINT = """
const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const channels = color => color.match(/[\\d.]+/g).map(Number);
const luminance = color => channels(color).slice(0, 3).map(c => linear(c / 255))
  .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
const behind = e => { while (e && channels(getComputedStyle(e).backgroundColor)[3] === 0) e = e.parentElement;
                      return getComputedStyle(e ?? document.documentElement).backgroundColor; };
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || e.closest("script") || !e.checkVisibility()) continue;
  const [a, b] = [luminance(getComputedStyle(e).color), luminance(behind(e))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(walker.currentNode.data.slice(0, 60));
}
return faint
"""
VISIBLE_ROWS = (
    "return [...document.querySelectorAll('#work tbody tr')].filter(e => e.checkVisibility()).length"
)


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_it_loads_and_fits(browser, pages, name, width, scheme):
    browser.open(pages[name], width, scheme=scheme)
    assert browser.errors() == []
    assert browser.run("return innerWidth") == width
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(STICKING_OUT) == []
    assert browser.run(FAINT) == []


def test_markup_in_a_program_stays_text(browser, pages):
    browser.open(pages["hostile"])
    assert browser.run("return document.title").split() == f"{HOSTILE} · Weft compiled".split()
    assert HOSTILE in browser.texts("h1")[0]
    assert any(HOSTILE in text for text in browser.texts("#work tbody th"))
    assert browser.run("return document.scripts.length") == 2


def test_the_parts_of_the_bars_have_their_shares(browser, pages):
    browser.open(pages["small"])
    widths = browser.run("""
        return [...document.querySelectorAll(".bar")].map(bar => [...bar.children].map(
            i => i.getBoundingClientRect().width / bar.getBoundingClientRect().width))
    """)
    assert [len(bar) for bar in widths] == [4, 6, 5, 1, 3, 2]
    for bar, shares in zip(
        widths,
        [
            [4 / 16, 3 / 16, 0, 9 / 16],
            [12 / 40, 4 / 40, 2 / 40, 0, 9 / 40, 13 / 40],
            [0.5, 0.25, 1 / 40, 0, 9 / 40],
        ],
        strict=False,
    ):
        assert bar == pytest.approx(shares, abs=0.02)
    assert widths[4] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.02)


def test_all_rows_without_the_script(browser, pages):
    """With the script off, everything but the search and the switch of the colors works."""
    browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["hostile"])
        assert browser.run("return document.querySelector('#theme').checkVisibility()") is False
        assert browser.run("return document.querySelector('.filter').checkVisibility()") is False
        assert browser.run(VISIBLE_ROWS) == 20
        browser.click("#work .more")
        assert browser.run(VISIBLE_ROWS) == 30
        browser.type("#work .more input", SPACE)  # with the keyboard
        assert browser.run(VISIBLE_ROWS) == 20
    finally:
        browser.cdp("Emulation.setScriptExecutionDisabled", value=False)


def test_finding_work(browser, pages):
    browser.open(pages["hostile"])
    browser.type(".filter input", "F.PY:129")
    assert browser.run(VISIBLE_ROWS) == 1  # also of the rows that are hidden at first
    browser.open(pages["hostile"])
    browser.type(".filter input", "MATMUL")
    assert browser.run(VISIBLE_ROWS) == 15
    browser.type(".filter input", "\ue003" * len("matmul"))  # backspace
    assert browser.run(VISIBLE_ROWS) == 20


def test_light_and_dark(browser, pages):
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser.open(pages["small"], scheme="light")
    light = browser.run(ground)
    browser.click("#theme")
    dark = browser.run(ground)
    assert dark != light
    browser.open(pages["small"], scheme="dark")
    assert browser.run(ground) == dark
    browser.click("#theme")
    assert browser.run(ground) == light


def test_headings_and_tables_have_names(browser, pages):
    browser.open(pages["planned"])
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = browser.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert (
        browser.run("""
        return [...document.querySelectorAll("section")].filter(
            e => document.getElementById(e.getAttribute("aria-labelledby")) === null).length
    """)
        == 0
    )
    assert browser.run(
        "return [...document.querySelectorAll('table')].every(e => e.closest('.scroll[tabindex]'))"
    )
