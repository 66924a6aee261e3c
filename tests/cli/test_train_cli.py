"""Invalid input to `weft train` gives a clear message and exit code 2; a run that fails, 1.

And its settings: what TOML, flags and --print-config say is the same.
"""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import re
import shutil
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from tiers import slow
from trained_runs import stored

from weft.cli.main import main
from weft.core.errors import ProgramError
from weft.core.field_text import flag_types, group_flags
from weft.data import SentencePiece
from weft.models import preset
from weft.train import config_io
from weft.train.config import DataConfig, OptimizerConfig, TrainConfig, recipe, recipes
from weft.train.data_setup import RUN_TOKENIZER_FILE
from weft.train.optimizer_setup import build_schedule
from weft.train.progress import PlannedSpeed, ProgressReporter

TINY = "--model.d-model 16 --model.d-ff 32 --model.heads 2 --model.d-kv 8 --model.layers 1"
RUN = f"lm --folder run --steps 2 --data.kind lines --data.rows 4 --data.length 16 {TINY}"
LINES = f"{RUN} --data.train text.txt"
PAIRS = f"translate --folder run --steps 2 --data.rows 4 --data.length 16 {TINY}"

FILES = {
    "text.txt": "A line of text that is long enough for a few windows.\n" * 8,
    "empty.txt": "",
    "blank.txt": "\n\n\n",
    "train.en": "one\ntwo\nthree\nfour\n",
    "train.fr": "un\ndeux\n",
    "rows.jsonl": '{"text": "a"}\n{"text": "b"}\n',
    "no.model": "text",
    "broken.toml": "steps = 100\n[data]\nrows = = 3\n",
    "wrong.toml": (
        'stesp = 100\nseed = 0.5\nsave = 3\n[data]\nrow = 3\nlength = "ten"\nkind = "line"\ntrain = "text.txt"\n'
        "buckets = [3, 4.5]\npacked = 1\n[model]\nd_modle = 3\nlayers = true\n[optimiser]\nrate = 1\n"
    ),
    "huge.toml": f'recipe = "lm"\n[optimizer]\nrate = 1{"0" * 400}\n',
    "recipe.toml": 'recipe = "ml"\n',
    "preset.toml": 'preset = "tiny-ml"\n',
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder of the test, with the files above in it."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # no profiles of this machine's user
    monkeypatch.setattr("warnings.showwarning", print)
    return tmp_path


def weft(capsys, line, *more):
    """`weft train` in this process: exit code, stdout, stderr. Of a flag that comes twice the last counts."""
    once = {}
    for flag, values in group_flags([*line.split(), *more]):
        once.pop(flag, None)
        once[flag] = values
    return weft_exactly(capsys, *(word for flag, values in once.items() for word in (flag, *values) if word))


def weft_exactly(capsys, *words):
    """The same, with these very words."""
    try:
        code = main(["train", *words])
    except SystemExit as exit:  # the parser's own
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err


def shown(err):
    """A message without the folder's name and without the line of this file, which counts as the user's."""
    err = re.sub(r"INTERNAL: .*", "INTERNAL: …", err)  # SentencePiece's own words
    return re.sub(rf"\n  at \S*{Path(__file__).name}:\d+(?=\n|$)", "", err.replace(str(Path.cwd()), "HERE"))


MISTAKES = {
    # which run
    "no_recipe": [""],
    "unknown_recipe": ["ml"],
    "unknown_preset": [f"{LINES} --preset tiny-ml"],
    "no_preset": [f"{LINES} --preset"],
    "too_many_steps": [f"{LINES} --steps 3000000000"],
    "rate_beyond_floats": [f"huge.toml {LINES.partition(' ')[2]}"],
    "unknown_flag": [f"{LINES} --optimizer.rat 0.1"],
    "unknown_section": [f"{LINES} --optimiser.rate 0.1"],
    "wrong_values": [
        f"{LINES} --data.rows four --optimizer.kind adam --data.packed 1 --data.buckets 3 4.5 --steps --seed 1 2"
        " --optimizer.rate=fast --sede 3 --model.rotary-stretch 8 1"
    ],
    "flag_in_front": [f"lm tiny {TINY}"],
    "unknown_model_kind": [f"{LINES} --model.kind decodr"],
    "negative_numbers": [
        f"{LINES} --steps -5 --data.rows 0 --data.length -1 --save.keep 0 --data.tokenizer-examples -5"
    ],
    "seed_that_is_too_large": [f"{LINES} --seed 4294967296"],
    "negative_rates": [f"{LINES} --optimizer.rate -1 --optimizer.clip -1 --optimizer.beta2 1.5"],
    "endless_rates": [f"{LINES} --optimizer.rate inf --optimizer.weight-decay nan --optimizer.clip -1"],
    "heads_that_are_none": [f"{LINES} --model.heads 0"],
    "model_out_of_range": [
        f"{LINES} --model.experts -1 --model.capacity inf --model.epsilon -1 --model.smoothing 2"
        " --model.rotary-base 0 --model.balance nan --model.dropout 1"
    ],
    "no_hashes": [f"{LINES} --model.lsh-rounds 0"],
    # a TOML file
    "no_toml": ["config.toml"],
    "broken_toml": ["broken.toml"],
    "toml_of_unknown_settings": ["wrong.toml"],
    "toml_of_an_unknown_recipe": ["recipe.toml"],
    "toml_of_an_unknown_preset": ["preset.toml"],
    # data
    "no_such_file": [f"{RUN} --data.train txet.txt"],
    "file_that_is_a_folder": [f"{RUN} --data.train ."],
    "empty_data": [f"{RUN} --data.train empty.txt"],
    "blank_data": [f"{RUN} --data.train blank.txt"],
    "files_not_named": [RUN],
    "files_for_nothing": [f"{RUN} --data.kind phrases --data.train text.txt"],
    "unequal_numbers_of_lines": [
        f"{PAIRS} --data.kind parallel --data.train train.en --data.train-targets train.fr"
    ],
    "no_targets": [f"{PAIRS} --data.kind parallel --data.train train.en"],
    "three_fields": [f"{RUN} --data.kind jsonl --data.train rows.jsonl --data.fields text en fr"],
    "no_such_field": [f"{RUN} --data.kind jsonl --data.train rows.jsonl --data.fields txt"],
    "unknown_tokenizer": [f"{LINES} --data.tokenizer byte"],
    "not_a_tokenizer": [f"{LINES} --data.tokenizer no.model"],
    "tokenizer_of_too_many_ids": [f"{LINES} --data.tokenizer unigram"],
    "tokenizer_of_too_few_ids": [f"{LINES} --data.tokenizer bpe --data.vocab 80"],
    "vocabulary_too_small": [f"{LINES} --model.vocab 100"],
    "texts_for_a_translation_model": [
        f"{PAIRS} --data.kind lines --data.train text.txt --data.tokenizer bpe --data.vocab 300"
    ],
    "pairs_for_a_language_model": [f"{RUN} --data.kind phrases"],
    "longer_than_the_positions": [f"{LINES} --data.length 256"],
    # layout
    "mesh_larger_than_the_devices": [
        f"{LINES} --layout.rules batch:data --data.rows 16",
        "--layout.mesh",
        "data=16",
    ],
    "mesh_that_is_none": [f"{LINES} --layout.mesh data"],
    "batch_smaller_than_the_mesh": [f"{LINES} --layout.rules batch:data --layout.mesh data=8"],
    "unknown_axis": [f"{LINES} --layout.rules batch:dta --layout.mesh data=2"],
    "unknown_axis_of_parameters": [f"{LINES} --layout.params d_model:dta --layout.mesh data=2"],
    "misspelt_dim": [f"{LINES} --data.train txet.txt --layout.rules bacth:data --layout.mesh data=2"],
    "misspelt_dim_of_parameters": [f"{LINES} --layout.params d_modle:data --layout.mesh data=2"],
    "two_dims_on_one_axis": [f"{LINES} --layout.mesh data=2", "--layout.rules", "batch:data vocab:data"],
    "unknown_hardware": [f"{LINES} --layout.hardware tpu-v44"],
    "micro_that_does_not_divide": [f"{LINES} --optimizer.micro 3"],
    "replicas_that_do_not_divide": [f"{LINES} --data.rows 8 --optimizer.micro 2 --diloco.replicas 3"],
    "average_of_replicas": [f"{LINES} --optimizer.average 0.9 --diloco.replicas 2"],
    # the folder
    "folder_that_is_a_file": [f"{LINES} --folder text.txt"],
    "folder_in_a_file": [f"{LINES} --folder text.txt/run"],
    "folder_that_can_not_be_made": [f"{LINES} --folder /proc/run"],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_exits_with_2(name, folder, capsys, golden):
    before = set(folder.rglob("*"))
    code, out, err = weft(capsys, *MISTAKES[name])
    golden(f"cli_{name}", shown(err), "messages/train")
    assert (code, out) == (2, "")
    assert set(folder.rglob("*")) == before  # nothing is left behind


# -- runs that fail, or go on ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(FILES["text.txt"])
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        patch.chdir(folder)
        assert main(["train", *LINES.split(), "--save.every", "1"]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, folder):
    """A copy of that run, where the test is."""
    shutil.copytree(trained, folder / "run")
    return folder / "run"


RECORD = ("config.toml", "plan.txt", "versions.json", "metrics.jsonl", "loss.png")


def test_what_a_run_writes(run):
    found = {path.name for path in run.iterdir()}
    wanted = {"checkpoints", "config.toml", "plan.txt", "versions.json", "metrics.jsonl", "tensorboard"}
    assert found == wanted | {"loss.png"}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"loss", "rate", "tokens", "seconds"} <= set(rows[0])


def test_its_own_settings_go_on_where_it_stopped(run, capsys):
    code, out, err = weft(capsys, "run/config.toml --steps 3")
    assert (code, out) == (0, "") and "resumes after step 2 in run" in err
    assert "\n1 steps in " in err  # of this run, not of the one before
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_other_settings_are_warned_of(run, capsys):
    (run.parent / "other.txt").write_text(FILES["text.txt"])
    flags = f"{LINES} --steps 3 --data.train other.txt text.txt --optimizer.rate 0.5 --model.dropout 0.25"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = weft(capsys, flags)
        again = weft(capsys, f"{flags} --steps 4")
    changed = "--data.train text.txt → other.txt text.txt, --optimizer.rate 0.001 → 0.5"
    changed += ", --model.dropout 0.0 → 0.25"
    assert code == 0 and f"warning: the run resumes with changed settings: {changed}\n" in err, err
    assert again[0] == 0 and "warning" not in again[2]


def test_a_finished_run_has_nothing_left_to_do(run, capsys):
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    code, out, err = weft(capsys, LINES)
    assert (code, out) == (
        0,
        "",
    ) and "the run is already at step 2, and --steps is 2: nothing to train" in err
    assert before == {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}


def test_settings_that_train_nothing_are_not_written_down(run, capsys):
    """The stored settings are those of the training run: other settings do not replace them."""
    stored = [*(run / "checkpoints").rglob("*"), *(run / name for name in RECORD)]
    before = {path: path.read_bytes() for path in stored if path.is_file()}
    code, out, err = weft(capsys, f"{LINES} --steps 1 --data.rows 8 --optimizer.rate 0.5")
    assert (code, out) == (0, "")
    assert err == "the run is already at step 2, and --steps is 1: nothing to train\n"
    assert before == {path: path.read_bytes() for path in before}


def test_a_run_of_another_model_is_not_gone_on_with(run, capsys, golden):
    written = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = weft(capsys, f"{LINES} --model.d-ff 48 --model.norm layer --steps 3")
    assert (code, out) == (2, "")
    golden("cli_run_of_another_model", shown(err), "messages/train")
    assert written == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_of_another_optimizer_is_not_gone_on_with(run, capsys, golden):
    code, out, err = weft(capsys, f"{LINES} --optimizer.kind momentum --steps 3")
    assert (code, out) == (2, "")
    golden("cli_run_of_another_optimizer", shown(err), "messages/train")


def test_a_run_begins_with_an_imported_model(run, capsys, golden):
    assert main(["checkpoint", "export", "run/checkpoints", "model.safetensors"]) == 0
    assert main(["checkpoint", "import", "model.safetensors", "new/checkpoints", "--step", "0"]) == 0
    capsys.readouterr()
    code, _, err = weft(capsys, f"{LINES} --folder new --steps 3 --save.every 1 --save.keep 9")
    assert code == 0 and "a new run in new" in err
    code, _, err = weft(capsys, f"{LINES} --folder new --steps 4")
    assert code == 0 and "resumes after step 3 in new" in err
    new, drawn = (Path(folder, "metrics.jsonl").read_text().splitlines()[0] for folder in ("new", "run"))
    assert json.loads(new)["loss"] < json.loads(drawn)["loss"]  # it has learned something already
    assert main(["checkpoint", "import", "model.safetensors", "late/checkpoints", "--step", "5"]) == 0
    capsys.readouterr()
    code, _, err = weft(capsys, f"{LINES} --folder late")
    golden("cli_model_imported_late", shown(err), "messages/train")
    assert code == 2


@pytest.mark.parametrize("file", ["manifest.json", slow("arrays/manifest.ocdbt")])
def test_an_imported_model_is_fallen_back_to(run, capsys, file):
    assert main(["checkpoint", "export", "run/checkpoints", "model.safetensors"]) == 0
    assert main(["checkpoint", "import", "model.safetensors", "new/checkpoints", "--step", "0"]) == 0
    flags = f"{LINES} --folder new --save.every 1 --save.keep 9"
    assert weft(capsys, flags)[0] == 0
    for step in (1, 2):
        path = Path(f"new/checkpoints/step_{step}", file)
        path.write_bytes(path.read_bytes()[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = weft(capsys, flags)
    assert code == 0 and err.count("skipping checkpoint") == 2 and "a new run in new" in err


def test_a_folder_that_another_run_writes_into(run, capsys, golden):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    handle = os.open(run, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    code, out, err = weft(capsys, f"{LINES} --steps 4")
    os.close(handle)
    assert (code, out) == (2, "")
    golden("cli_folder_in_use", shown(err[err.index("ProgramError") :]), "messages/train")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert weft(capsys, f"{LINES} --steps 4")[0] == 0


def test_rates_are_the_schedules(folder, capsys, monkeypatch):
    """However many are worked out at a time."""
    flags = f"{LINES} --steps 7 --optimizer.warmup 3"
    weft(capsys, f"{flags} --folder whole")
    monkeypatch.setattr("weft.train.setup.RATES_PER_CHUNK", 2)
    weft(capsys, f"{flags} --folder parts")
    full_batch, parts = (
        [json.loads(line)["rate"] for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert full_batch == parts and len(set(full_batch)) == 7


@pytest.mark.parametrize("warmup", [0, 16])
@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "rsqrt"])
def test_every_schedule_reaches_the_rate(kind, warmup):
    config = recipe("lm").replace(steps=100)
    learn = dataclasses.replace(config.optimizer, schedule=kind, warmup=warmup, rate=0.5)
    rate = build_schedule(config.replace(optimizer=learn))
    rates = [float(rate(step)) for step in range(0, 100, 4)]
    assert max(rates) == pytest.approx(0.5) == rates[warmup // 4]
    if kind == "rsqrt" and warmup:
        assert float(rate(4 * warmup)) == pytest.approx(0.25)


def test_a_tokenizer_that_is_there_is_not_taken_for_another(folder, capsys, golden):
    (folder / "run").mkdir()
    SentencePiece.train(FILES["text.txt"].splitlines(), folder / "run" / RUN_TOKENIZER_FILE, 280, kind="bpe")
    code, out, err = weft(capsys, f"{LINES} --data.tokenizer bpe --data.vocab 282")
    assert (code, out) == (2, "")
    golden("cli_tokenizer_of_another_run", shown(err), "messages/train")
    code, out, err = weft(capsys, f"{LINES} --data.tokenizer unigram --data.vocab 280")
    assert (code, out) == (2, "")
    golden("cli_tokenizer_of_another_kind", shown(err), "messages/train")


def test_a_run_continues_with_its_copy_of_the_tokenizer(folder, capsys, golden):
    texts = FILES["text.txt"].splitlines()
    for name, kind in (("own.model", "bpe"), ("other.model", "unigram")):
        SentencePiece.train(texts, folder / name, 280, kind=kind)
    code, _, err = weft(capsys, f"{LINES} --data.tokenizer own.model")
    assert code == 0, err
    stored = (folder / "run" / RUN_TOKENIZER_FILE).read_bytes()
    code, out, err = weft(capsys, f"{LINES} --steps 9 --data.tokenizer other.model")
    assert (code, out) == (2, "") and (folder / "run" / RUN_TOKENIZER_FILE).read_bytes() == stored
    golden("cli_tokenizer_by_another_path", shown(err), "messages/train")
    (folder / "own.model").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = weft(capsys, f"{LINES} --data.tokenizer own.model")
    assert code == 0 and "warning: there is no own.model: using the run's copy run/tokenizer.model" in err


def test_a_rule_of_no_dim_is_a_warning(run, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        line = f"{LINES} --steps 3 --data.valid text.txt --layout.rules experts:data --layout.mesh data=2"
        code, out, err = weft(capsys, line)
    assert (code, out) == (0, "")
    assert err.count("warning: rule experts:data has no effect") == 1  # also evaluation has that layout


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_a_narrow_terminal_shows_what_matters_most(width, monkeypatch):
    """The step, a bar, the time that is left and the loss; then as much as there is room for."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter(100_000, 12_340, PlannedSpeed(0.07, 1e9, 1e11), 10) as shown:
        for step in range(12_341, 12_345):
            shown.step(step, {"loss": 4.6748, "rate": 2.9e-4, "seconds": 0.078, "tokens": 2048})
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).splitlines()
    line = next(line for line in reversed(lines) if line.strip())
    assert len(line) <= width and "…" not in line
    assert re.match(r"step 12344/100000 [━╸╺]{16,24} +[-\d]:[-\d]{2}:[-\d]{2} loss 4.6748", line), line
    for words, least in {"rate 2.90e-04": 80, "26,256 tokens/s": 120, "78 ms/step (planned 70)": 160}.items():
        assert (words in line) == (width >= least), words


TOO_FAST = "--optimizer.rate 1e30 --optimizer.warmup 0 --optimizer.clip 0 --optimizer.schedule constant"


@pytest.mark.filterwarnings("ignore:the run resumes with changed settings")
def test_a_loss_that_is_not_finite_stops_the_run(run, capsys, golden):
    """Nothing is saved of a step that is not finite."""
    code, out, err = weft(capsys, f"{LINES} --steps 8 --save.every 1 {TOO_FAST}")
    assert (code, out) == (1, "")
    step, last = map(int, re.findall(r"step (\d+) (?:gave|in run/)", err))
    assert 3 < step == last + 1  # which it is depends on how numbers overflow
    text = re.sub(r"step \d+", "step N", err[err.index("TrainingError") :])
    golden("cli_loss_not_finite", shown(text), "messages/train")
    saved = stored(run)  # gradients may be NaN one step before a loss is
    assert [name for name, x in saved.items() if not np.isfinite(x).all()] == []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("grad_norm" in row for row in rows)  # though nothing is clipped


def test_an_evaluation_that_is_not_finite_stops_the_run(folder, capsys, golden):
    """The one step was finite, and what it made of the parameters is not saved."""
    one = f"{LINES} --data.valid text.txt {TOO_FAST} --optimizer.rate 3e38 --model.norm layer --steps 1"
    code, out, err = weft(capsys, one)
    assert (code, out) == (1, "")
    golden("cli_evaluation_not_finite", shown(err[err.index("TrainingError") :]), "messages/train")
    assert not (folder / "run" / "checkpoints").exists()
    code, out, err = weft(capsys, f"{one} --on-nan skip")
    assert (code, out) == (0, "") and "skipped the evaluation after step 1: loss " in err
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [set(row) & {"loss", "valid_loss"} for row in rows] == [{"loss"}]


def test_steps_that_are_not_finite_are_left_out_up_to_a_limit(folder, capsys, golden):
    skip = f"{LINES} {TOO_FAST} --on-nan skip --steps 5"
    code, out, err = weft(capsys, f"{skip} --nan-limit 2")
    assert (code, out) == (1, "")
    golden("cli_too_many_left_out", shown(err[err.index("skipped step 2") :]), "messages/train")
    assert not (folder / "run" / "checkpoints" / "step_5").exists()
    code, out, err = weft(capsys, f"{skip} --nan-limit 4")  # nothing was saved: it starts over
    assert (code, out) == (0, "") and err.count("skipped ") == 4
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


# -- settings ----------------------------------------------------------------------------------------

PRESETS = (
    "tiny-lm",
    "tiny-tr",
    "tiny-moe",
    "tiny-reversible",
    "tiny-llama",
    "gpt2",
    "t5-small",
    "llama-3-8b",
)


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("name", recipes())
def test_toml_gives_the_settings_back(name, preset, tmp_path):
    config = recipe(name, preset)
    path = tmp_path / "config.toml"
    path.write_text(config_io.config_to_toml(config), encoding="utf-8")
    assert config_io.config_from_toml(path) == config


def test_toml_gives_unusual_settings_back(tmp_path):
    config = recipe("translate", "tiny-llama")
    assert config.model.kv_heads is not None
    config = config.replace(
        folder=Path('a "folder" \\ é'),
        model=config.model.replace(kv_heads=None, remat="nothing", rotary_stretch=(8.0, 1.0, 4.0, 8192.0)),
        data=DataConfig(kind="parallel", train=("a b", "ü\n"), input_length=7, buckets=(3, 4)),
        evaluate=dataclasses.replace(config.evaluate, batches=3),
    )
    (tmp_path / "config.toml").write_text(config_io.config_to_toml(config), encoding="utf-8")
    assert config_io.config_from_toml(tmp_path / "config.toml") == config


def test_settings_from_python_may_be_simple():
    data = DataConfig(kind="lines", train="a.txt", valid=[Path("b.txt"), "c.txt"], buckets=[3])
    assert data == DataConfig(kind="lines", train=("a.txt",), valid=("b.txt", "c.txt"), buckets=(3,))
    assert recipe("lm").replace(folder="runs/a").folder == Path("runs/a")


def test_another_preset_from_python_brings_its_model():
    assert recipe("lm").replace(preset="tiny-llama") == recipe("lm", "tiny-llama")
    stored = recipe("lm").replace(preset="tiny-llama", model=preset("tiny-moe").config)
    assert stored.model == preset("tiny-moe").config


def test_settings_from_python_are_checked():
    """Errors name arguments, not flags."""
    config = recipe("lm")
    with pytest.raises(ProgramError, match=r"^steps='10', on_nan='go on'\n") as error:
        config.replace(on_nan="go on", steps="10")
    assert error.value.call == "TrainConfig(steps='10', on_nan='go on')"
    with pytest.raises(ProgramError, match=r"^kind='adam', beta2=1\n") as error:
        dataclasses.replace(config.optimizer, kind="adam", beta2=1)
    assert "did you mean adamw?" in str(error.value)
    with pytest.raises(ProgramError, match=r"^data\.rows=10\n  data\.rows is a multiple of 4"):
        config.replace(data=DataConfig(rows=10), optimizer=OptimizerConfig(micro=4)).check()


def test_flags_override_a_file(folder, capsys):
    (folder / "some.toml").write_text(
        'recipe = "translate"\nsteps = 7\n[data]\nrows = 5\n[model]\nd_ff = 48\n'
    )
    code, out, err = weft(capsys, "some.toml --data.rows 6 --optimizer.weight-decay=0.5 --print-config")
    assert (code, err) == (0, "")
    settings = tomllib.loads(out)
    assert (settings["steps"], settings["preset"]) == (7, "tiny-tr")
    assert (settings["data"]["rows"], settings["data"]["kind"]) == (6, "phrases")
    assert (settings["model"]["d_ff"], settings["optimizer"]["weight_decay"]) == (48, 0.5)


@pytest.mark.parametrize("flags", ["--mesh data=2 --layout batch:data", "--mesh=data=2 --layout=batch:data"])
def test_short_flags_of_the_layout(flags, folder, capsys):
    code, out, _ = weft_exactly(capsys, "lm", *flags.split(), "--print-config")
    settings = tomllib.loads(out)["layout"]
    assert code == 0 and (settings["mesh"], settings["rules"]) == ("data=2", "batch:data")


@pytest.mark.parametrize("flags", ["--preset tiny-llama", "--preset=tiny-llama"])
def test_a_preset_brings_its_model_and_flags_change_that(flags, folder, capsys):
    code, out, _ = weft(capsys, f"lm {flags} --model.d-ff 48 --print-config")
    settings = tomllib.loads(out)
    model = dataclasses.asdict(preset("tiny-llama").config.replace(d_ff=48))
    assert code == 0 and settings["preset"] == "tiny-llama"
    assert settings["model"] == {name: value for name, value in model.items() if value is not None}


def test_a_folder_has_a_name(folder, capsys):
    given = ["" if word == "run" else word for word in LINES.split()]
    code, out, err = weft_exactly(capsys, *given)
    assert (code, out) == (2, "") and "--folder is not a path: it is empty" in err, err
    assert not (folder / "checkpoints").exists()


def test_a_flag_that_is_given_twice(folder, capsys, golden):
    twice = "lm --data.train a.txt --data.train=b.txt c.txt --mesh data=2 --layout.mesh data=4 --print-config"
    code, out, err = weft_exactly(capsys, *twice.split())
    assert (code, out) == (2, "")
    golden("cli_flags_given_twice", shown(err), "messages/train")


@pytest.mark.parametrize("start", ["lm", "translate --preset t5-small --data.train a b --steps 3"])
def test_printed_settings_print_the_same(start, folder, capsys):
    _, first, _ = weft(capsys, f"{start} --print-config")
    (folder / "first.toml").write_text(first)
    code, second, err = weft(capsys, "first.toml --print-config")
    assert (code, err, second) == (0, "", first)


def test_every_setting_can_be_had_as_a_flag(folder, capsys):
    code, out, _ = weft(capsys, "lm --help")
    assert code == 0
    missing = [flag for flag in flag_types(TrainConfig) if f"{flag} " not in out]
    assert not missing
    bare = re.findall(r"(--\S+) \S+\s+│?\n?│?\s*\(default", out)
    assert not bare, "settings that nothing is said of"


def test_every_text_is_of_a_test():
    here = {path.stem for path in (Path(__file__).parents[1] / "messages" / "train").glob("cli_*.txt")}
    runs = {"run_of_another_model", "run_of_another_optimizer", "loss_not_finite", "too_many_left_out"}
    runs |= {"tokenizer_of_another_run", "tokenizer_of_another_kind", "tokenizer_by_another_path"}
    runs |= {"flags_given_twice", "model_imported_late", "folder_in_use", "evaluation_not_finite"}
    assert here == {f"cli_{name}" for name in {*MISTAKES, *runs}}
