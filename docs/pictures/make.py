"""The pictures of the pages, from real programs, plans, searches and runs: `make pictures`.

python -m docs.pictures.make [NAME ...]    all drawings if none is named

Drawings are written as SVG text. They have no background and follow the reader's colour scheme. What takes minutes
to find is kept beside its picture as CSV: `find-front` and `find-losses` find it again.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

import weft as wf
from weft.plan.units import human_bytes

Weights = tuple[wf.Tensor, ...]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #37474f } .small { font-size: 10.5px; fill: #607d8b }
.strong { font-weight: 600 } .code { font-family: ui-monospace, monospace; font-size: 11px }
.line { stroke: #90a4ae; fill: none } .faint { stroke: #cfd8dc; fill: none }
.dot { fill: #90a4ae } .one { fill: #00897b; stroke: #00897b } .two { fill: #e65100; stroke: #e65100 }
@media (prefers-color-scheme: dark) {
text { fill: #cfd8dc } .small { fill: #90a4ae } .line { stroke: #78909c } .faint { stroke: #455a64 }
.dot { fill: #78909c } .one { fill: #4db6ac; stroke: #4db6ac } .two { fill: #ffb74d; stroke: #ffb74d } }
"""


# Pieces of a drawing


def svg(wide: float, high: float, said: str, *parts: str) -> str:
    """A whole picture; `said` is for those who can't see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" '
        f'height="{high:g}" role="img" aria-label="{escape(said)}">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x: float, y: float, x2: float, y2: float, kind: str = "line", more: str = "") -> str:
    return f'<path d="M{x:g},{y:g} L{x2:g},{y2:g}" class="{kind}" {more}/>'


def box(x: float, y: float, wide: float, high: float, more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" {more}/>'


class Scale:
    """From values to places along an edge of a chart, with a few round ticks."""

    def __init__(self, low: float, high: float, start: float, end: float):
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, most: int = 6) -> list[float]:
        raw = (self.high - self.low) / most
        power = 10 ** np.floor(np.log10(raw))
        step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw)
        first = np.ceil(self.low / step - 1e-9)
        return [float(n * step) + 0.0 for n in np.arange(first, np.floor(self.high / step + 1e-9) + 1)]


def frame(
    x: Scale, y: Scale, across: str, upward: str, shown: Callable[[float], str] = "{:g}".format
) -> list[str]:
    """The edges of a chart, their ticks and what they are; `shown` is how a tick of the left one is written."""
    parts = []
    for tick in y.ticks():
        parts.append(line(x.start, y(tick), x.end, y(tick), "faint"))
        parts.append(text(x.start - 6, y(tick) + 4, shown(tick), "small", "end"))
    for tick in x.ticks():
        parts.append(text(x(tick), y.start + 16, f"{tick:g}", "small", "middle"))
    parts.append(line(x.start, y.start, x.end, y.start))
    parts.append(text((x.start + x.end) / 2, y.start + 34, across, "", "middle"))
    parts.append(text(x.start - 40, y.end - 12, upward))
    return parts


Bar = tuple[str, float, float, float]


def bars(groups: dict[str, list[Bar]], unit: str, mark: float | None = None) -> str:
    """Horizontal bars from (name, median, low, high): the whiskers go from the lower to the upper quartile.

    `groups` are bars under headings, of which "" is none. `unit` says what is measured; `mark` is a value to compare
    with.
    """
    rows = [row for group in groups.values() for row in group]
    left = 30 + 6.4 * max(len(name) for name, *_ in rows)
    x = Scale(0, 1.05 * max([mark or 0, *(high for *_, high in rows)]), left, left + 420)
    step, top, heads = 30, 14, []
    bars, y = [], top
    for heading, group in groups.items():
        if heading:
            heads.append(text(8, y + 22, heading, "strong"))
            y += step
        bars += [(y + step * n, row) for n, row in enumerate(group)]
        y += step * len(group)
    bottom = y
    parts = [line(x(tick), top, x(tick), bottom, "faint") for tick in x.ticks()]
    parts += [text(x(tick), bottom + 16, f"{tick:g}", "small", "middle") for tick in x.ticks()]
    parts += heads
    for y, (name, median, low, high) in bars:
        parts.append(text(left - 8, y + 19, name, "", "end"))
        parts.append(box(left, y + 6, x(median) - left, 18, 'class="one" fill-opacity=".45" stroke="none"'))
        parts.append(f'<path d="M{x(low)},{y + 15} H{x(high)}" class="one" stroke-width="2"/>')
        parts += [
            f'<path d="M{x(q)},{y + 10} v10" class="one" stroke-width="2"/>'
            for q in (low, high)
            if low < high
        ]
        parts.append(text(x.end + 10, y + 19, f"{median:.2f}"))
    if mark is not None:
        parts.append(line(x(mark), top - 6, x(mark), bottom, "two", 'stroke-dasharray="4 3"'))
    parts.append(text((x.start + x.end) / 2, bottom + 34, unit, "", "middle"))
    said = "; ".join(
        (f"{heading}: " if heading else "") + f"{name}: {median:.2f} ({low:.2f} to {high:.2f})"
        for heading, group in groups.items()
        for name, median, low, high in group
    )
    return svg(x.end + 50, bottom + 44, f"{unit}. {said}", *parts)


# The pictures

SHAPES = {"x": "batch io", "w": "io hidden", "v": "hidden io", "y": "batch io"}
DRAWN_AS = {"batch": 22, "io": 22, "hidden": 32}  # not to scale
COLOURS = ["#4c8dd6", "#e0913a", "#5aa469", "#b86bb4", "#d65c5c", "#3fa7a3", "#a58a3c", "#7d7fd1"]


def held(tensor: wf.Tensor, mesh: wf.Mesh, layout: wf.Layout) -> list[tuple[tuple[int, int], ...]]:
    """The range of each dim that each processor of a mesh holds, as JAX has placed them."""
    storage = wf.place(tensor, mesh, layout).storage
    where = storage.sharding.devices_indices_map(storage.shape)
    devices = mesh.jax_mesh.devices.flatten()
    return [tuple(s.indices(n)[:2] for s, n in zip(where[d], storage.shape, strict=True)) for d in devices]


def layouts() -> str:
    """Which slice of x, w, v and y each of 8 processors holds, and what a step costs it."""
    from examples.two_layers import LAYOUTS, batch, hidden, io, step

    by_name = {d.name: d for d in (batch, io, hidden)}
    shapes = {t: [by_name[n] for n in names.split()] for t, names in SHAPES.items()}
    specs = [wf.spec(shapes[t]) for t in "wvx"]
    whole = wf.spmd(step).plan(*specs).flops
    left, apart, row = 245, 158, 94
    parts = []
    for n, (name, dims) in enumerate(shapes.items()):
        parts.append(text(left + apart * n, 16, name, "strong"))
        parts.append(text(left + apart * n + 14, 16, " × ".join(d.name for d in dims), "small"))
    for n, (name, axes, rules) in enumerate(LAYOUTS):
        mesh, layout, y = wf.Mesh(axes), wf.Layout(rules), 30 + row * n
        plan = wf.spmd(step, mesh, layout).plan(*specs)
        share = f"{plan.flops / whole:.1%}".replace(".0%", "%")
        summed = sum(c.bytes * c.count for c in plan.collectives)
        parts += [
            line(0, y - 4, left + 4 * apart - 10, y - 4, "faint"),
            text(0, y + 14, name.split("  ")[1], "strong"),
            text(0, y + 31, axes, "code"),
            text(0, y + 47, rules or "(no rules)", "code"),
            text(0, y + 67, f"{share} of the work each, {human_bytes(summed)} summed", "small"),
        ]
        for k, dims in enumerate(shapes.values()):
            slices = held(wf.zeros(dims), mesh, layout)
            kinds = sorted(set(slices))
            high, wide = (DRAWN_AS[d.name] for d in dims)
            for p, piece in enumerate(slices):
                at = left + apart * k + 37 * (p % 4), y + 8 + 39 * (p // 4)
                (top, bottom), (first, last) = (
                    (a / d.size, b / d.size) for (a, b), d in zip(piece, dims, strict=True)
                )
                cut = at[0] + wide * first, at[1] + high * top, wide * (last - first), high * (bottom - top)
                parts.append(box(*cut, f'fill="{COLOURS[kinds.index(piece)]}"'))
                parts.append(box(*at, wide, high, 'class="line"'))
                if n == k == 0:  # which processor is where
                    parts.append(text(at[0] + wide + 2, at[1] + high, str(p), "small"))
    said = "Which slices of x, w, v and y each of 8 processors holds, in five layouts"
    return svg(left + 4 * apart - 8, 30 + row * len(LAYOUTS), said, *parts)


FRONT = "seconds bytes variant mesh layout".split()


def stack_step(again: bool) -> wf.Program:
    """A train step of 24 residual layers, with momentum; `again`: layers are recomputed in the backward pass."""

    def layer(x: wf.Tensor, weights: Weights) -> tuple[wf.Tensor, None]:
        w, v = weights
        h = wf.relu(wf.einsum(x, w, reduce="d_model"))
        return x + wf.einsum(h, v, reduce="d_ff"), None

    def loss(params: Weights, x: wf.Tensor) -> wf.Tensor:
        return wf.mean(wf.square(wf.scan(wf.remat(layer) if again else layer, x, params, "layers")[0]))

    def step(params: Weights, moments: Weights, x: wf.Tensor) -> tuple[Weights, Weights]:
        grads = wf.grad(loss)(params, x)
        moments = tuple(0.9 * m + g for m, g in zip(moments, grads, strict=True))
        return tuple(p - 0.01 * m for p, m in zip(params, moments, strict=True)), moments

    return wf.spmd(step, donate=(0, 1))


def find_front() -> None:
    """The fastest and the leanest 80 ways to run that step on 64 devices, by their plans."""

    def weights(role: str) -> Weights:
        shapes = "layers=24 d_model=4096 d_ff=16384", "layers=24 d_ff=16384 d_model=4096"
        return tuple(wf.spec(shape, role=role) for shape in shapes)

    args = weights("param"), weights("optimizer"), wf.spec("batch=131072 d_model=4096")
    asked = {"devices": 64, "hardware": "h100", "top": 80, "variants": {"remat": (stack_step(True), args)}}
    found = [wf.search(stack_step(False), args, objective=o, **asked) for o in ("time", "memory")]
    every = {(o.candidate.variant, str(o.mesh), str(o.layout)): o for f in found for o in f.ranked}
    rows = [(f"{one.seconds:.5g}", one.bytes, *key) for key, one in every.items()]
    keep("front", FRONT, sorted(rows, key=lambda row: float(row[0])))


def front() -> str:
    """Time against memory of candidates of a search; those that none beats in both are joined."""
    found = [(1e3 * float(r[0]), int(r[1]) / 2**30, *r[2:]) for r in kept("front")]  # the fastest first
    best = [r for n, r in enumerate(found) if r[1] < 0.999 * min([1e9, *(f[1] for f in found[:n])])]
    x, y = Scale(0, 40, 60, 640), Scale(0, 600, 350, 30)
    parts = frame(x, y, "memory on each device, GiB", "time of a step, ms")
    joined = " ".join(f"{x(gib)},{y(ms)}" for ms, gib, *_ in best)
    parts.append(f'<polyline points="{joined}" class="two" style="fill:none"/>')
    for one in sorted(found, key=lambda r: r in best):
        ms, gib, variant, mesh, layout = one
        if ms > y.high or gib > x.high:
            continue
        kind, size = ("two", 4.5) if one in best else ("dot", 3)
        name = f"{mesh}, {layout}" + (f", {variant}" if variant else "")
        title = escape(f"{ms:.0f} ms, {gib:.1f} GiB: {name}")
        parts.append(
            f'<circle cx="{x(gib)}" cy="{y(ms)}" r="{size}" class="{kind}"><title>{title}</title></circle>'
        )
    for n, (ms, gib, variant, mesh, layout) in enumerate(best):
        words = f"{ms:.0f} ms, {gib:.1f} GiB: {mesh}, {layout}" + (f", {variant}" if variant else "")
        parts += [text(x(gib), y(ms) + 18, str(n + 1), "small", "middle"), text(20, 410 + 17 * n, f"{n + 1}")]
        parts.append(text(36, 410 + 17 * n, words))
    said = "Time against memory of candidates of a search; the best are joined"
    return svg(660, 416 + 17 * len(best), said, *parts)


LOSSES = {"one device": ("", ""), "data=4 model=2": (None, None)}


def find_losses() -> None:
    """The demo's run, on one device and on eight; minutes."""
    from dataclasses import replace

    from weft.cli.demo import DemoCommand, demo_config
    from weft.train.loop import train

    curves = []
    for mesh, rules in LOSSES.values():
        with tempfile.TemporaryDirectory() as folder:
            config = demo_config(Path(folder) / "run", DemoCommand.steps)
            if mesh is not None:
                config = config.replace(layout=replace(config.layout, mesh=mesh, rules=rules))
            train(config, quiet=True)
            lines = (config.folder / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(one) for one in lines]
        curves.append({r["step"]: r["loss"] for r in found if "loss" in r})
    keep("losses", ["step", *LOSSES], [(s, *(f"{c[s]:.6f}" for c in curves)) for s in curves[0]])


def losses() -> str:
    """The losses of one run on one device and on eight."""
    found = np.array(kept("losses"), float)
    steps, one, eight = found.T
    x, y = Scale(0, steps.max(), 60, 640), Scale(-3, 1, 330, 30)  # y by powers of ten
    parts = frame(x, y, "step", "loss, nats a token", lambda power: f"{10**power:g}")
    for values, kind, more in (
        (one, "one", 'stroke-width="5" stroke-opacity=".4"'),
        (eight, "two", 'stroke-width="1.4"'),
    ):
        points = " ".join(f"{x(s)},{y(v)}" for s, v in zip(steps, np.log10(values), strict=True))
        parts.append(f'<polyline points="{points}" class="{kind}" {more} style="fill:none"/>')
    for n, (name, kind) in enumerate((("one device", "one"), ("8 devices, data=4 model=2", "two"))):
        parts += [
            line(400, 52 + 20 * n, 424, 52 + 20 * n, kind, 'stroke-width="3"'),
            text(432, 56 + 20 * n, name),
        ]
    alike = int(steps[np.abs(one - eight) > 1e-4 * one][0]) - 1
    parts.append(text(400, 96, f"to four digits the same for {alike} steps", "small"))
    return svg(660, 372, "The loss of a run falls alike on one device and on eight", *parts)


GROUPS = {
    "eight": "8 devices",
    "rows": "2 devices, batch split",
    "model": "2 devices, model split",
    "one": "1 device",
}
RATIO = re.compile(
    r"^Weft against the faster hand-written one \(\S.*?\): (\S+) \(quartiles (\S+)–(\S+)\)", re.M
)


def ratios() -> str:
    """The paired ratios of benchmarks/RESULTS.md."""
    rows, title, place = [], "", ""
    for one in (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines():
        if one.startswith("## "):
            title, place = one[3:], ""
        elif one.startswith("### "):
            place = ", " + ("8 devices" if one.startswith("### 8") else "1 device")
        elif match := RATIO.match(one):
            rows.append((title + place, *map(float, match.groups())))
    return bars(
        {"": rows}, "time, where the faster of the hand-written ones is 1 (median and quartiles)", mark=1
    )


def peers() -> str:
    """The steps of peers against Weft's, as `make bench-peers` measured them."""
    measured = json.loads((ROOT / "benchmarks" / "peers" / "measured.json").read_text())
    groups = {
        GROUPS[name]: [(row["name"], *(row["ratio"][q] for q in ("median", "low", "high"))) for row in found]
        for name, found in measured.items()
    }
    return bars(groups, "time of a step on two CPU cores, where Weft's is 1 (median and quartiles)", mark=1)


def plan_page(target: Path) -> None:
    """The upper part of a plan's page, as a browser shows it."""
    from PIL import Image

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("plan.png is left as it is: it needs chromium", file=sys.stderr)
        return
    wide, high = 1180, 980
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "plan.html", Path(folder) / "plan.png"
        weft = [sys.executable, "-m", "weft.cli.main"]
        asked = [*weft, "plan", "lm-4.9b", "--train", "adafactor", "--mesh", "data=16 model=32"]
        asked += ["--layout", "batch:data d_ff:model heads:model vocab:model", "--hardware", "tpu-v2"]
        subprocess.run([*asked, "--html", str(page)], check=True)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--window-size={wide},{high}", f"--screenshot={shot}"]
        subprocess.run([browser, *flags, page.as_uri()], check=True, stderr=subprocess.DEVNULL)
        Image.open(shot).convert("RGB").quantize(64).save(target, optimize=True)


# What is kept, and what is made


def keep(name: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with (HERE / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])


def kept(name: str) -> list[list[str]]:
    with (HERE / f"{name}.csv").open() as file:
        return list(csv.reader(file))[1:]


DRAWN: dict[str, Callable[[], str]] = {
    "layouts": layouts,
    "front": front,
    "losses": losses,
    "ratios": ratios,
    "peers": peers,
}
FOUND: dict[str, Callable[[], None]] = {"find-front": find_front, "find-losses": find_losses}


def main() -> None:
    wf.cpu_devices(8)
    asked = sys.argv[1:] or [*DRAWN, "plan"]
    known = [*DRAWN, *FOUND, "plan"]
    if unknown := [name for name in asked if name not in known]:
        sys.exit(f"{', '.join(unknown)}: not a picture; there are {', '.join(known)}")
    for name in asked:
        if name in FOUND:
            FOUND[name]()
        elif name == "plan":
            plan_page(HERE / "plan.png")
        else:
            try:
                drawn = DRAWN[name]()
            except FileNotFoundError as error:
                print(f"{name}.svg is left as it is: there is no {error.filename}", file=sys.stderr)
                continue
            (HERE / f"{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
