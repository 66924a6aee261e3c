"""The pictures of the documentation are small and complete, and load nothing."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from docs.pictures.make import Scale, bars

HERE = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN = sorted(HERE.glob("*.svg"))


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_a_drawing_is_complete_and_loads_nothing(path):
    text = path.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.get("aria-label") and root.get("viewBox")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\(|@import|<script|<image", text)
    assert len(text) < 60_000


def test_shots_are_small():
    assert all(path.stat().st_size <= 150_000 for path in HERE.glob("*.png"))


def test_bars_have_whiskers_at_the_quartiles():
    groups = {"a few": [("one", 1.0, 0.5, 2.0)], "": [("two & more", 1.5, 1.25, 1.75)]}
    root = ET.fromstring(bars(groups, "seconds", mark=1))
    rects = [e for e in root.iter() if e.tag.endswith("rect")]
    across = [e.get("d") for e in root.iter() if " H" in (e.get("d") or "")]
    assert len(rects) == len(across) == 2
    start, one = float(rects[0].get("x")), float(rects[0].get("width"))
    low, high = map(float, re.match(r"M([\d.]+),[\d.]+ H([\d.]+)", across[0]).groups())
    assert low - start == pytest.approx(one / 2, abs=0.2)
    assert high - start == pytest.approx(2 * one, abs=0.2)


def test_ticks_are_round_and_inside():
    assert Scale(0, 1.05, 0, 1).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Scale(300, 900, 0, 1).ticks() == [300, 400, 500, 600, 700, 800, 900]
