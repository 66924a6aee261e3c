"""The page of a server, in a real browser: a sentence is typed, and its translation appears."""

import re
import time
from collections import namedtuple
from importlib import resources

import pytest
from server_process import CONFIG, PATIENCE, Slow, listening
from untrained_models import untrained

from weft import serve
from weft.data import ByteTokenizer
from weft.generate import Beams, GenerationConfig, TextGenerator

pytest_plugins = ["browser"]
HOSTILE = "<img src=x onerror=\"document.title='broken'\">"
CHOSEN = {"translation": {"kind": "encoder_decoder"}, "language": {"kind": "decoder"}}
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")


class Address(namedtuple("Address", "url")):
    """A page that is not a file."""

    def as_uri(self):
        return self.url + "/"


def engine_of(kind):
    model = untrained(CONFIG.replace(longest=16, **CHOSEN[kind]), 9)
    return serve.Engine(TextGenerator(model, ByteTokenizer(), rows=2), stride=1)


@pytest.fixture(scope="module")
def translator(browser):
    with engine_of("translation") as engine:
        yield engine


def until(browser, script):
    end = time.monotonic() + PATIENCE
    while not browser.run(f"return Boolean({script})"):
        assert time.monotonic() < end, browser.text("main")
        time.sleep(0.05)


def wait_for_all(browser):
    until(
        browser,
        "/searched|wrong/.test(status.textContent + status.className)".replace("status", 'at("status")'),
    )


def test_a_translation_appears_token_by_token(browser, translator, monkeypatch):
    monkeypatch.setattr(translator.programs, "decode_rows", Slow(translator, 0.05))
    alone = TextGenerator(translator.generator.models, ByteTokenizer(), rows=1)
    (completion,) = alone.generate(["hello"], GenerationConfig(limit=10))
    (search,) = alone.generate(["hello"], GenerationConfig(limit=10, beams=Beams(4)))
    with listening(translator, name=HOSTILE) as url:
        browser.open(Address(url))
        assert browser.text("h1") == HOSTILE
        browser.run(
            """window.seen = []; new MutationObserver(() => seen.push(at("completion").textContent))
            .observe(at("completion"), { childList: true, characterData: true, subtree: true })"""
        )
        browser.type("#text", "hello")
        browser.type("#most", "10")
        browser.click("#go")
        wait_for_all(browser)
        shown = browser.run("return seen")
        assert len(shown) > 3 and sorted(shown, key=len) == shown  # it grows
        assert browser.texts("#completion") == [completion.text]
        every = [search, *search.others]
        assert browser.texts("#others li") == [f"{one.text or '(nothing)'}{one.score:.3f}" for one in every]
        assert browser.texts("#across th") == [*"hello", "■"]
        assert len(browser.texts("#down td")) == len(completion.tokens) * 6
        shares = browser.run(
            "return [...document.querySelectorAll('#down tr')].map(row => [...row.cells].slice(1)"
            ".reduce((sum, cell) => sum + Number(cell.style.getPropertyValue('--weight')), 0))"
        )
        colours = "return [...new Set([...document.querySelectorAll('#down td')].map(c => getComputedStyle(c)"
        assert len(browser.run(colours + ".backgroundColor))]")) > 3  # they are seen
        assert shares == pytest.approx([1] * len(completion.tokens), abs=0.01)
        assert browser.run("return document.title") != "broken" and browser.errors() == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_is_labelled(browser, translator, width, scheme):
    with listening(translator) as url:
        browser.open(Address(url), width=width, scheme=scheme)
        browser.type("#text", HOSTILE[:9])
        browser.click("#go")
        wait_for_all(browser)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        unnamed = """return [...document.querySelectorAll("button, input, textarea")]
            .filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.id)"""
        assert browser.run(unnamed) == []
        colours = browser.run(
            """return ["body", "#go", "#status", "label", "#completion"].map(selector => {
              const style = getComputedStyle(document.querySelector(selector));
              const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(x => {
                x /= 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4 });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b };
              let e = document.querySelector(selector);
              while (getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)") e = e.parentElement;
              const [a, b] = [lum(style.color), lum(getComputedStyle(e).backgroundColor)].sort((x, y) => y - x);
              return (a + 0.05) / (b + 0.05) })"""
        )
        assert min(colours) > 4.5, colours
        assert browser.errors() == []


def test_the_page_displays_an_error_and_requests_a_token(browser, translator):
    with listening(translator, token="word") as url:
        browser.open(Address(url))
        browser.type("#text", "a")
        browser.click("#go")
        until(browser, 'at("status").className === "wrong"')
        assert "requires a token" in browser.text("#status")
        browser.type("#token", "word")
        browser.click("#go")
        wait_for_all(browser)
        assert browser.text("#status").startswith("Generated and searched")
        assert all("401" in line for line in browser.errors())


def test_a_language_model_goes_on(browser):
    with engine_of("language") as engine, listening(engine) as url:
        browser.open(Address(url))
        assert browser.text("#go") == "Continue"
        shown = "return ['#warm', '#key', '#look'].map(one => document.querySelector(one).offsetHeight > 0)"
        assert browser.run(shown) == [True, False, False]
        assert browser.run("return at('temperature').value") == "0.8"  # at 0 a small model repeats itself
        browser.run("at('temperature').value = '0'")  # what follows then is known
        browser.type("#text", "ab")
        browser.type("#most", "8")
        browser.click("#go")
        wait_for_all(browser)
        (completion,) = TextGenerator(engine.generator.models, ByteTokenizer(), rows=1).generate(
            ["ab"], GenerationConfig(limit=8)
        )
        assert browser.texts("#completion") == [completion.text]
        assert browser.run("return at('look').hidden") and len(browser.texts("#others li")) == 4
        assert browser.errors() == []


def page():
    return (resources.files("weft.serve") / "page.html").read_text(encoding="utf-8")


def test_tokens_are_drawn_unless_the_temperature_is_changed():
    (temperature,) = re.findall('<input id="temperature"[^>]*>', page())
    assert 'value="0.8"' in temperature


def test_the_page_contacts_no_other_host():
    text = page()
    assert "http://" not in text and "https://" not in text and "innerHTML" not in text
