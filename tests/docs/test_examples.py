"""examples/*.py run, and print what their docstrings claim."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from tiers import slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses_of(text, word="loss"):
    return [float(loss) for loss in re.findall(rf"^step +\d+  {word} ([\d.]+)", text, re.MULTILINE)]


def two_layers(text):
    assert "All five agree." in text


def transformer(text):
    losses = losses_of(text)
    assert len(losses) == 20
    assert losses[0] > 4 and losses[-1] < 1
    assert re.search(r"each step: [\d,]+ FLOPs, [\d,]+ bytes at most, bytes sent: [\d,]+ over ", text)


def attention(text):
    alone, _, both = text.partition("with gradients:")
    assert re.findall(r"(\S+) over (\S+):", alone) == [("all-reduce", "model")]
    forward = [line for line in both.splitlines() if line.startswith("  forward")]
    backward = [line for line in both.splitlines() if line.startswith("  backward")]
    assert [re.search("over (.*):", line)[1].split(":")[0] for line in forward] == ["model", "data"]
    assert len(backward) == 4 and all("all-reduce over data" in line for line in backward)
    assert float(re.search(r"dot_product_attention: (\S+)", text)[1]) < 1e-5
    assert "5 values and gradients are the same as on one device" in text


def mnist(text):
    losses = losses_of(text)
    assert losses[0] > 2 and losses[-1] < 1
    assert "6 × permute over down\n6 × permute over across\n" in text
    assert float(re.search(r"others ([\d.]+)% are recognised", text)[1]) > 75
    assert "one device gives the same losses" in text


def unet3d(text):
    one, each = map(float, re.search(r"([\d.]+) GiB on one device, ([\d.]+) GiB on each of 8", text).groups())
    assert one / 8 <= each < one / 6
    assert re.findall(r"^  (\S+) over (\S+):", text, re.MULTILINE) == [
        ("permute", "deep"),
        ("permute", "high"),
        ("all-reduce", "deep+high"),
    ]
    losses = losses_of(text)
    assert losses[0] > 0.4 and losses[-1] < 0.15
    assert float(re.search(r"overlap with new balls: ([\d.]+)", text)[1]) > 0.7
    assert "one device gives the same losses" in text


def moe(text):
    assert text.count("all-to-all over all") == 3  # there, back, and the gradients' way back
    errors = losses_of(text, "error")
    assert errors[0] > 4 and errors[-1] < 0.3
    table = [
        list(map(int, re.findall(r"\d+", row))) for row in re.findall(r"^ ?\[+[\d ]+\]+$", text, re.MULTILINE)
    ]
    assert sorted(row.index(max(row)) for row in table) == list(range(8))  # each kind has its own expert
    assert float(re.search(r"([\d.]+)% go where most of their kind do", text)[1]) > 90
    assert "one device gives the same errors" in text


def custom_op(text):
    value, loop = re.search(r"mean square ([\d.]+), by a loop ([\d.]+)", text).groups()
    assert float(value) == pytest.approx(float(loop), rel=1e-5)
    assert "the gradients agree with the loop's" in text
    ours, plain = re.search(r"peak memory ([\d,]+) bytes, with JAX's derivative ([\d,]+)", text).groups()
    assert int(ours.replace(",", "")) < int(plain.replace(",", ""))
    assert "4 layouts give what one device gives" in text
    assert "the layout splits length, which the local function does not declare splittable" in text


def gpt(text):
    trained, _, alone = text.partition("\none device:\n")
    losses = losses_of(trained)
    assert losses[0] > 5 and losses[-1] < 3.6
    assert losses_of(alone) == pytest.approx(losses[:1], rel=1e-4)
    written = trained.partition('"""GPT in about a hundred lines')[2]
    assert len(written) > 150 and "a" in written[64:]


CHECKS = {
    "two_layers.py": two_layers,
    "transformer.py": transformer,
    "attention.py": attention,
    "mnist.py": mnist,
    "unet3d.py": unet3d,
    "moe.py": moe,
    "custom_op.py": custom_op,
    "gpt.py": gpt,
}


ARGUMENTS = {
    "mnist.py": ["drawn"],  # whatever is installed
    "gpt.py": [str(EXAMPLES / "gpt.py"), "40"],
}


def test_all_examples_are_checked():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CHECKS)


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("mnist.py", "unet3d.py") else name for name in CHECKS]
)
def test_examples_run(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    CHECKS[name](capsys.readouterr().out)


WRONG = {
    "gpt.py": (["/nope.txt"], ["99", "nonsense"], [str(EXAMPLES / "gpt.py"), "-3"], [__file__, "3", "more"]),
    "mnist.py": (["drawn", "more"],),
}


@pytest.mark.parametrize(
    "name, arguments, code",
    [(name, ["--help"], 0) for name in WRONG]
    + [(name, wrong, 2) for name, all_of_it in WRONG.items() for wrong in all_of_it],
)
def test_examples_report_how_to_run_them(name, arguments, code, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert exit.value.code == code
    assert f"Run it: `python examples/{name} [" in capsys.readouterr().out
