"""`weft eval` and `weft demo`: correct numbers on any mesh, and messages of mistakes."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from trained_runs import strictly

import weft as wf
from weft import nn
from weft.checkpoint import CheckpointManager
from weft.cli.main import main
from weft.data import ByteTokenizer
from weft.train import config_io, load
from weft.train.config import recipe
from weft.train.loop import prepare_run, train

TEXTS = ["the cat sat on the mat\nand slept", "a dog barked at the moon all night long"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A language model after two steps, with two held-out files."""
    folder = tmp_path_factory.mktemp("run")
    for n, text in enumerate(TEXTS):
        (folder / f"valid{n}.txt").write_text(text)
    flags = {
        "--folder": str(folder / "lm"),
        "--steps": "2",
        "--data.kind": "text",
        "--data.train": str(folder / "valid0.txt"),
        "--data.valid": str(folder / "valid*.txt"),
        "--data.rows": "2",
        "--data.length": "16",
        "--model.d_model": "8",
        "--model.layers": "1",
    }
    given = [word for pair in flags.items() for word in pair]
    train(config_io.apply_flags(recipe("lm"), given), quiet=True)
    return folder / "lm"


def scored(capsys, *arguments):
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_score_is_that_of_plain_jax(run, capsys):
    found = scored(capsys, run)
    prepared, step, model = load.restore_run(load.load_config(run))
    total = right = count = 0
    for batch, _ in prepared.valid.batches():
        logits = model.logits(batch).numpy("batch", "length", "vocab").astype(np.float64)
        targets, weights = batch.targets.numpy(), batch.weights.numpy()
        chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], -1)[..., 0]
        total -= (chosen * weights).sum()
        right += ((logits.argmax(-1) == targets) * weights).sum()
        count += weights.sum()
    tokens = sum(len(ByteTokenizer().encode(text)) + 1 for text in TEXTS)
    assert found["tokens"] == count == tokens
    assert found["step"] == step == 2
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(right / count)
    assert found["words"] == sum(len(text.split()) for text in TEXTS)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["word_perplexity"] == pytest.approx(math.exp(total / found["words"]), rel=1e-4)


def test_another_mesh_gives_the_same_score(run, capsys):
    alone = scored(capsys, run)
    flags = ["--layout.mesh", "data=2 model=2", "--layout.rules", "batch:data d_ff:model vocab:model"]
    split = scored(capsys, run, *flags, "--step=2")
    assert split == pytest.approx(alone, rel=1e-5)


def test_some_of_the_batches(run, capsys):
    full, some = scored(capsys, run), scored(capsys, run, "--evaluate.batches", "1")
    (batch, _), *others = load.restore_run(load.load_config(run))[0].valid.batches()
    assert others and some["tokens"] == batch.weights.numpy().sum() < full["tokens"]
    assert some["words"] is None and some["word_perplexity"] is None  # which words these were is not known
    assert scored(capsys, run, "--evaluate.batches", str(1 + len(others))) == full
    assert main(["eval", str(run), "--evaluate.batches", "1"]) == 0
    assert capsys.readouterr().err == f"step 2: {some['tokens']} tokens\n"


def test_a_loss_that_is_not_finite_is_a_text_in_json(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "lm")
    prepared = prepare_run(load.load_config(tmp_path / "lm"))
    checkpoints = CheckpointManager(prepared.checkpoints)
    step, model, state, extra = checkpoints.restore(*prepared.trainer.init(nn.specs(prepared.model)))
    broken = jax.tree.map(lambda t: t * math.nan, model, is_leaf=wf.is_tensor)
    checkpoints.save(step, broken, state, extra, wait=True)
    assert main(["eval", str(tmp_path / "lm"), "--json"]) == 0
    assert strictly(capsys.readouterr().out)["loss"] == "nan"


def test_the_score_of_an_imported_model(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "lm")
    file, checkpoints = str(tmp_path / "model.safetensors"), str(tmp_path / "lm" / "checkpoints")
    assert main(["checkpoint", "export", checkpoints, file]) == 0
    assert main(["checkpoint", "import", file, checkpoints, "--step", "0"]) == 0
    capsys.readouterr()
    assert scored(capsys, tmp_path / "lm", "--step", "0") == {**scored(capsys, run), "step": 0}


def test_the_score_for_people(run, capsys):
    assert main(["eval", str(run)]) == 0
    out = capsys.readouterr().out.split()
    assert {"loss", "perplexity", "accuracy", "word"} <= set(out)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "missing FOLDER"),
        (["{run}", "--step", "x"], "--step x"),
        (["{run}", "--step", "7"], "there is no checkpoint of step 7"),
        (["{run}/nowhere"], "there is no run in"),
        (["{run}", "--data.valid", "{run}/no.txt"], "no such file"),
        (["{run}", "--data.lenght", "8"], "did you mean"),
    ],
    ids=["no folder", "no number", "no such step", "no run", "no file", "no such flag"],
)
def test_mistakes(run, capsys, arguments, message):
    assert main(["eval", *(a.format(run=run) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_nothing_to_evaluate_on(run, capsys):
    assert main(["eval", str(run), "--data.valid", ""]) == 2
    assert "each item is a non-empty string" in capsys.readouterr().err


def test_the_demo_trains_nothing_if_no_phrase_is_to_be_translated(tmp_path, capsys):
    assert main(["demo", "--phrases", "0", "--folder", str(tmp_path / "demo")]) == 2
    assert "--phrases 0" in capsys.readouterr().err and not (tmp_path / "demo").exists()


@pytest.mark.timeout(600)
def test_the_demo_runs(tmp_path, capsys):
    assert main(["demo", "--steps", "3", "--phrases", "3", "--folder", str(tmp_path / "demo")]) == 0
    out, err = capsys.readouterr()
    assert out.count("→") == 5 and "3 phrases" in out and "BLEU" in out
    assert 'mesh "data=4 model=2"' in err
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_names_no_folder_that_it_throws_away(capsys):
    assert main(["demo", "--steps", "1", "--phrases", "1"]) == 0
    _, err = capsys.readouterr()
    assert "1 steps in " in err and "; see " not in err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_learns(capsys):
    assert main(["demo"]) == 0
    exact = float(capsys.readouterr().out.split("exact ")[1].split("%")[0])
    assert exact >= 95
