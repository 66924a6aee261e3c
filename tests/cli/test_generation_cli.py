"""The commands `weft translate`, `generate`, `score` and `eval --bleu`, and the models that they load."""

import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import sacrebleu
from safetensors.numpy import load_file
from trained_runs import limited, lines, strictly, wait_for
from untrained_models import untrained

import weft as wf
from weft import checkpoint, generate, nn
from weft.checkpoint import inspect
from weft.cli import resumable_output
from weft.cli.generation import escape_newlines
from weft.cli.input_lines import read_lines
from weft.cli.main import main
from weft.cli.targets import UsageError
from weft.core.errors import DataError
from weft.data import ByteTokenizer, SentencePiece
from weft.models import Transformer
from weft.train import config_io, data_setup, load
from weft.train.config import recipe
from weft.train.trainer import build_trainer

TINY = "--model.d-model 16 --model.d-ff 32 --model.heads 2 --model.d-kv 8 --model.layers 1"
MESH = ["--mesh", "data=2 model=2", "--layout", "batch:data heads:model"]
PAIRS = [(f"{n} cats sat", f"{n} chats assis") for n in range(40)]
TEXTS = ["3 cats", "", "sat sat 9", "cats", "a mat", "7 sat cats"]
SHORT = ["--limit", "6", "--rows", "4"]


def given(name, line, *more):
    """The settings of a recipe, with flags."""
    return config_io.apply_flags(recipe(name), [*line.split(), *more])


def drawn(folder, config, steps=1):
    """A run's folder as weft train leaves it, of models that have learned nothing."""
    folder.mkdir()
    config = config.replace(folder=folder)
    (folder / "config.toml").write_text(config_io.config_to_toml(config))
    with checkpoint.CheckpointManager(folder / "checkpoints") as checkpoints:
        for step in range(1, steps + 1):
            checkpoints.save(step, untrained(config.model, step), {})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """`fr`: a translation model with three checkpoints, and a tokenizer that came from elsewhere; others."""
    folder = tmp_path_factory.mktemp("speaking")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        patch.chdir(folder)
        texts = [text for pair in PAIRS for text in pair]
        SentencePiece.train(texts, "own.model", 40, byte_fallback=False, kind="bpe")
        flags = f"{TINY} --model.vocab 40 --data.tokenizer own.model"
        drawn(Path("fr"), given("translate", flags), 3)
        data_setup.copy_tokenizer(SentencePiece("own.model"), Path("fr"))
        Path("own.model").unlink()
        drawn(Path("lm"), given("lm", f"{TINY} --model.vocab 259"))
        drawn(Path("bytes"), given("translate", f"{TINY} --model.vocab 259"))
        Path("in.txt").write_text("".join(text + "\n" for text in TEXTS))
    return folder


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("warnings.showwarning", print)
    return home


@pytest.fixture
def weft(here, capsys):
    """A command in this process: exit code, lines of stdout, stderr."""

    def run(*arguments):
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as exit:  # the parser's own
            code = exit.code
        out, err = capsys.readouterr()
        assert not out or out.endswith("\n")
        return code, out.split("\n")[:-1], err

    return run


def make_generator(folder, **more):
    found = load.load_run(folder, **more)
    return generate.TextGenerator(found.model, found.tokenizer, found.mesh, found.layout, rows=4)


# -- translate and generate --------------------------------------------------------------------------


def test_a_file_is_translated_line_by_line(weft):
    code, out, err = weft("translate", "fr", "in.txt", *SHORT)
    config = generate.GenerationConfig(limit=6, beams=generate.Beams(4))
    completions = list(make_generator("fr").generate(TEXTS, config))
    assert (code, out) == (0, [one.text for one in completions])
    assert out[1] == "" and len(set(out)) > 2
    assert "6 lines in" in err

    # The same as objects, with the three best, on a mesh.
    code, out, _ = weft("translate", "fr", "in.txt", *SHORT, *MESH, "--json", "--best", "3")
    assert code == 0
    for line, one in zip(out, completions, strict=True):
        found = json.loads(line)
        assert list(found) == ["text", "score", "tokens", "ended", "cut", "best"]
        assert (found["text"], found["tokens"]) == (one.text, list(one.tokens))
        assert found["score"] == pytest.approx(one.score, rel=1e-4)
        assert [other["text"] for other in found["best"]] == [o.text for o in (one, *one.others)[:3]]


def test_prompts_are_gone_on_with(weft, monkeypatch):
    draw = ["--temperature", "1.5", "--seed", "3", *SHORT]
    completions = list(
        make_generator("lm").generate(["ab", ""], generate.GenerationConfig(limit=6, temperature=1.5, seed=3))
    )
    stdin = io.TextIOWrapper(io.BytesIO(b"ab\n\n"))
    monkeypatch.setattr("sys.stdin", stdin)
    code, out, _ = weft("generate", "lm", *draw)
    assert code == 0
    assert out == [one.text.replace("\r", "\\r").replace("\n", "\\n") for one in completions]
    assert out[0] != out[1] and all(len(one.tokens) for one in completions)


def test_a_text_that_is_too_long_is_reported(weft, here):
    (here / "long.txt").write_text("ab " * 200 + "\n")
    code, out, err = weft("generate", "lm", "long.txt", "--json", *SHORT)
    assert code == 0 and json.loads(out[0])["cut"]
    assert "1 texts were truncated: the context length is 128 tokens, with 6 reserved for" in err
    code, out, err = weft(
        "generate", "lm", "in.txt", "--json", "--rows", "8"
    )  # 128 tokens, without a warning
    assert code == 0 and not any(json.loads(line)["cut"] for line in out) and "cut" not in err


def test_a_text_is_one_line():
    assert escape_newlines("a\nb\r\nc\\n") == "a\\nb\\r\\nc\\n"


# -- files that go on --------------------------------------------------------------------------------


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also where tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_was_interrupted_goes_on(weft, here, interruptible):
    """SIGINT leaves complete lines; the same command, resumed on another mesh, completes the output of one call."""
    (here / "many.txt").write_text("".join(f"{n} cats\n" for n in range(600)))
    command = ["translate", "fr", "many.txt", "--limit", "6", "--temperature", "1", "--seed", "5"]
    part, out = here / "many.fr.part", here / "many.fr"
    over, lock = [], threading.Lock()

    def interrupt():
        wait_for(lambda: lines(part) > 20 or over)
        with lock:
            if not over:
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code, printed, err = weft(*command, "-o", out, "--rows", "2")
    with lock:
        over.append(True)
    thread.join()
    done = lines(part)
    assert (code, printed) == (130, []) and f"{done} lines are in" in err
    assert 20 < done < 600 and part.read_bytes().endswith(b"\n") and not out.exists()

    code, _, err = weft(*command[:-1], "6", "-o", out)  # another seed
    assert code == 2 and "seed: 5 before, 6 now" in err and lines(part) == done

    with part.open("ab") as file:
        file.write(b"half a line")  # as a crash may leave it
    assert weft(*command, "-o", out, "--rows", "16", *MESH)[0] == 0
    assert not part.exists() and not Path(f"{part}.json").exists()
    _, complete, _ = weft(*command, "--rows", "16", *MESH)
    assert out.read_text().splitlines() == complete and len(complete) == 600
    assert len(set(complete)) > 20


@pytest.mark.parametrize("seconds", [0.1, 0.6, 1.2])
def test_a_process_that_is_interrupted_exits_with_130(here, seconds):
    """Without Python's own exit, which may be a segmentation fault while devices are at work."""
    script = [
        "import atexit, os, signal, sys; from weft.cli.main import main",
        "atexit.register(os._exit, 139); signal.signal(signal.SIGINT, signal.default_int_handler)",
        "sys.exit(main())",
    ]
    command = [sys.executable, "-c", "; ".join(script), "generate", "lm", "--limit", "60", "--rows", "2"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=here, **pipes)
    try:
        process.stdin.write(b"3 cats\n" * 9_500)  # a little more than a pipe holds: by now it reads
        process.stdin.flush()
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and b"Traceback" not in err


def test_files_of_results(tmp_path):
    out, part = tmp_path / "out", tmp_path / "out.part"

    def write(made_of, *texts, fails=False):
        with resumable_output.resumable_writer(out, made_of) as (done, append):
            for text in texts:
                append(text)
            if fails:
                raise ValueError
        return done

    with pytest.raises(ValueError):
        write({"a": 1}, fails=True)
    assert list(tmp_path.iterdir()) == []  # there was nothing to keep
    with pytest.raises(ValueError):
        write({"a": 1}, "é", "b", fails=True)
    with pytest.raises(UsageError, match="a: 1 before, 2 now"):
        write({"a": 2}, "c")
    with resumable_output.resumable_writer(out, {"a": 1}), pytest.raises(UsageError, match="another process"):
        write({"a": 1})
    assert out.read_text() == "é\nb\n"
    link = tmp_path / "link"
    link.symlink_to(out)
    with resumable_output.resumable_writer(link, {}) as (_, append):
        append("c")
    assert link.is_symlink() and out.read_text() == "c\n"
    out.write_text("old\n")
    part.write_text("a\n")
    with pytest.raises(UsageError, match="origin is unknown"):
        write({"a": 1}, "c")
    assert out.read_text() == "old\n"


def test_a_file_that_was_finished_meanwhile_is_left_alone(tmp_path, monkeypatch):
    """The other process gives the file its name between our opening it and our turn."""
    out, part = tmp_path / "out", tmp_path / "out.part"
    part.write_text("a\n")
    monkeypatch.setattr("fcntl.flock", lambda *_: part.exists() and part.replace(out))
    with pytest.raises(UsageError, match="another process"), resumable_output.resumable_writer(out, {}):
        pass
    assert out.read_text() == "a\n" and list(tmp_path.iterdir()) == [out]


def test_a_full_disk_takes_no_half_line(tmp_path):
    part = tmp_path / "out.part"
    with pytest.raises(OSError, match=r"out\.part"):
        with resumable_output.resumable_writer(tmp_path / "out", {}) as (_, append), limited(25):
            for _ in range(10):
                append("123456789")
    assert part.read_bytes() == b"123456789\n" * 2
    with resumable_output.resumable_writer(tmp_path / "out", {}) as (done, append):
        assert done == 2
        append("last")
    assert (tmp_path / "out").read_text().endswith("9\nlast\n")


def test_the_reader_has_enough(here, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main(["translate", "fr", "in.txt", *SHORT]) == 0
        monkeypatch.undo()


# -- several models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh, layout",
    [("", None), ("data=2 model=2", wf.Layout("batch:data d_ff:model", params="d_model:data"))],
    ids=["one device", "mesh"],
)
def test_the_mean_of_checkpoints_is_that_of_numpy(here, mesh, layout):
    found = load.load_run("fr", average=2, mesh=mesh, layout=layout)
    assert found.steps == (3, 2) and len(set(found.checksums)) == 2
    checkpoints = [inspect.open_checkpoint("fr/checkpoints", step) for step in (2, 3)]
    names = [name for name in checkpoints[0].entries if name.startswith("model")]
    arrays = [dict(one.arrays(dict.fromkeys(names))) for one in checkpoints]
    ours = nn.parameters({"model": found.model})
    assert set(ours) == set(names)
    for name, tensor in ours.items():
        both = np.stack([one[name] for one in arrays])
        np.testing.assert_allclose(tensor.numpy(), both.mean(0), rtol=1e-6, atol=1e-8)
        assert tensor.dtype == both.dtype
    moved = [name for name in names if (arrays[0][name] != arrays[1][name]).any()]
    assert len(moved) > len(names) / 2


def test_several_models_generate_together(weft, here):
    alone = weft("score", "bytes", "in.txt", "in.txt")
    both = weft("score", "bytes", "in.txt", "in.txt", "--ensemble", "bytes")
    assert (alone[0], both[0]) == (0, 0)
    np.testing.assert_allclose([float(x) for x in both[1]], [float(x) for x in alone[1]], rtol=1e-5)


# -- score and eval ----------------------------------------------------------------------------------


def test_texts_are_scored(weft, here):
    (here / "out.txt").write_text("".join(text[::-1] + "\n" for text in TEXTS))
    code, out, err = weft("score", "bytes", "in.txt", "out.txt", "--rows", "4")
    expected = list(make_generator("bytes").score([(text, text[::-1]) for text in TEXTS]))
    assert code == 0
    np.testing.assert_allclose([float(x) for x in out], [sum(logs) for logs in expected], atol=1e-3)
    total, count = sum(map(sum, expected)), sum(map(len, expected))
    assert f"perplexity per token {math.exp(-total / count):.2f}" in err

    (here / "both.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in TEXTS))
    code, again, _ = weft("score", "bytes", "both.tsv", "--rows", "4", "--json")
    found = [json.loads(line) for line in again]
    assert code == 0 and [one["score"] for one in found] == pytest.approx([float(x) for x in out], abs=1e-5)
    assert found[0]["tokens"] == [*ByteTokenizer().encode(TEXTS[0][::-1]), ByteTokenizer().end]
    assert sum(found[0]["logs"]) == pytest.approx(found[0]["score"])


def test_scores_of_continuations_count_only_their_tokens(weft, here, monkeypatch):
    usual = resumable_output.resumable_writer

    @contextlib.contextmanager
    def full(out, made_of):
        """A disk that is full after two lines."""
        with usual(out, made_of) as (done, append):

            def write(line):
                if lines(here / "scores.part") == 2:
                    raise OSError("full")
                append(line)

            yield done, write

    command = ["score", "lm", "in.txt", "-o", here / "scores"]
    with monkeypatch.context() as patch:
        patch.setattr("weft.cli.resumable_output.resumable_writer", full)
        assert weft(*command)[0] == 1
    code, _, err = weft(*command)
    assert code == 0 and f"{sum(len(text) + 1 for text in TEXTS[2:])} tokens after line 2; perplexity" in err
    assert (here / "scores").read_text().splitlines() == weft(*command[:3])[1]


def test_texts_of_a_language_model_are_scored(weft):
    complete, after = weft("score", "lm", "in.txt"), weft("score", "lm", "in.txt", "in.txt")
    assert complete[0] == after[0] == 0
    expected = list(make_generator("lm").score([("", TEXTS[0]), (TEXTS[0], TEXTS[0])]))
    assert [float(complete[1][0]), float(after[1][0])] == pytest.approx([sum(x) for x in expected], abs=1e-3)


def test_numbers_that_are_not_finite_are_texts_in_json(weft, tmp_path):
    config = given("lm", f"{TINY} --model.vocab 259").replace(folder=tmp_path)
    (tmp_path / "config.toml").write_text(config_io.config_to_toml(config))
    model = jax.tree.map(lambda t: t * math.nan, untrained(config.model), is_leaf=wf.is_tensor)
    with checkpoint.CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, model, {})
    code, out, _ = weft("score", tmp_path, "in.txt", "--rows", "4", "--json")
    assert code == 0 and [strictly(line)["score"] for line in out] == ["nan"] * len(TEXTS)
    code, out, _ = weft("generate", tmp_path, "in.txt", *SHORT, "--json")
    assert code == 0 and [strictly(line)["score"] for line in out] == ["nan"] * len(TEXTS)
    code, out, err = weft("generate", tmp_path, "in.txt", *SHORT, "--beams", "2")
    assert (code, out) == (
        2,
        [],
    ) and "ModelError: a beam search found no text: the model's logits are not" in err


def test_bleu_is_that_of_sacrebleu(weft, here):
    flags = [*SHORT, "--beams", "0"]
    completions = weft("translate", "fr", "in.txt", *flags)[1]
    right = [text if n != 2 else "other words" for n, text in enumerate(completions)]
    (here / "right.txt").write_text("".join(text + "\n" for text in right))
    code, out, _ = weft("eval", "fr", "--bleu", "in.txt", "right.txt", "in.txt", *flags, "--json")
    found = json.loads(out[0])
    assert code == 0 and found["steps"] == [[3]] and found["lines"] == 6
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(completions, [right, TEXTS]).score, abs=1e-3)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(completions, [right, TEXTS]).score, abs=1e-3)
    assert found["exact"] == pytest.approx(5 / 6)
    code, out, _ = weft("eval", "fr", "--bleu", "in.txt", "right.txt", *flags)
    assert code == 0 and [line.split()[0] for line in out] == ["exact", "BLEU", "chrF"]
    assert "nrefs:1|" in out[1] and "nrefs:1|" in out[2]


# -- what is loaded ----------------------------------------------------------------------------------


def test_training_leaves_all_that_is_needed(here, tmp_path, weft):
    """The data and the tokenizer, which lay elsewhere, may go."""
    (here / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))
    (here / "own.model").write_bytes((here / "fr/tokenizer.model").read_bytes())
    run = f"train translate --steps 1 --data.kind tsv --data.train pairs.tsv {TINY} --data.rows 4"
    run += f" --data.length 16 --data.tokenizer own.model --folder {tmp_path}/run"
    assert weft(*run.split())[0] == 0
    (here / "pairs.tsv").unlink()
    (here / "own.model").unlink()
    code, out, _ = weft("translate", tmp_path / "run", "in.txt", "--beams", "0", *SHORT)
    assert code == 0 and len(out) == len(TEXTS)


def test_a_run_keeps_all_that_it_needs(here):
    found = load.load_run("fr")
    assert found.tokenizer.path == "fr/tokenizer.model" and found.tokenizer.vocab == 40
    assert found.config.model.vocab == 40 and found.steps == (3,)
    (here / "fr/tokenizer.model").rename(here / "moved")
    with pytest.raises(Exception, match=r"there is no tokenizer\.model in fr"):
        load.load_run("fr")
    (here / "moved").rename(here / "fr/tokenizer.model")


def test_a_mesh_that_is_too_large_becomes_one_device(here, weft, tmp_path):
    config = load.load_config("lm")
    assert load.resolve_placement(config).mesh.size == 1
    large = config_io.apply_flags(config, ["--layout.mesh", "data=16", "--layout.rules", "batch:data"])
    assert load.resolve_placement(large).mesh.size == 1
    assert load.resolve_placement(large, "data=4").mesh.size == 4
    drawn(tmp_path / "large", large)
    code, _, err = weft("score", tmp_path / "large", "in.txt", "--rows", "4")
    assert code == 0 and 'not enough devices for "data=16": using one device' in err


@pytest.mark.parametrize("flag", ["--optimizer.average 0.9", "--diloco.replicas 2"])
def test_models_in_the_optimizer_state_are_used(tmp_path, flag):
    """The running mean of the parameters, and that of DiLoCo's replicas as they last met."""
    config = given("lm", f"{TINY} --model.vocab 259 {flag}").replace(folder=tmp_path)
    (tmp_path / "config.toml").write_text(config_io.config_to_toml(config))
    how = build_trainer(config, load.resolve_placement(config))
    declared = Transformer(config.model)
    model, state = how.init(nn.init(declared, jax.random.key(0)))
    if "average" in state:
        state["average"] = {name: tensor + 1 for name, tensor in state["average"].items()}
    with checkpoint.CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, model, state)
    ours = nn.parameters(load.load_run(tmp_path).model)
    for name, spec in nn.parameters(nn.specs(declared)).items():
        assert ours[name].dims == spec.dims  # without replicas
        expected = nn.parameters(how.eval_model(model, state))[name].numpy()
        np.testing.assert_allclose(ours[name].numpy(), expected, rtol=1e-6)
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert main(["checkpoint", "export", str(folder), str(tmp_path / "a.safetensors")]) == 0
        exported = load_file(tmp_path / "a.safetensors")
        assert set(exported) == set(ours)
        assert all(np.array_equal(exported[name], ours[name].numpy()) for name in ours)
    assert main(["checkpoint", "import", str(tmp_path / "a.safetensors"), str(tmp_path), "--step", "0"]) == 0
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "b.safetensors"), "--step", "0"]) == 0
    again = load_file(tmp_path / "b.safetensors")
    assert all(np.array_equal(again[name], exported[name]) for name in exported)


# -- mistakes ----------------------------------------------------------------------------------------

MISTAKES = {
    "no_run": "translate nowhere in.txt",
    "no_file": "translate fr inn.txt",
    "folder_for_a_file": "translate fr fr",
    "not_utf8": "translate fr latin.txt",
    "language_model_to_translate": "translate lm in.txt",
    "translation_model_to_generate": "generate fr in.txt",
    "no_folder_for_out": "translate fr in.txt -o none/out.fr",
    "folder_as_out": "translate fr in.txt -o fr",
    "input_as_out": "translate fr in.txt -o in.txt",
    "stdout_as_out": "translate fr in.txt -o -",
    "pipe_as_out": "translate fr in.txt -o pipe",
    "unequal_lines": "score fr in.txt one.txt",
    "no_columns": "score fr in.txt",
    "three_files": "score fr in.txt in.txt in.txt",
    "text_too_long_to_score": "score lm long.txt",
    "best_without_json": "translate fr in.txt --best 2",
    "best_of_too_few": "translate fr in.txt --json --best 9",
    "beams_and_temperature": "translate fr in.txt --beams 4 --temperature 1",
    "alpha_without_beams": "generate lm in.txt --alpha 1",
    "top_k_without_temperature": "generate lm in.txt --top-k 5",
    "negative_numbers": "translate fr in.txt --rows 0 --average 0",
    "negative_beams": "translate fr in.txt --beams -1 --seed -1",
    "too_many_beams": "generate lm in.txt --beams 100000",
    "more_beams_than_tokens": "eval fr --bleu in.txt in.txt --beams 41",
    "top_p_above_one": "generate lm in.txt --temperature 1 --top-p 1.5",
    "seed_too_large": "generate lm in.txt --temperature 1 --seed 9223372036854775808",
    "penalty_too_large": "generate lm in.txt --penalty 1e300",
    "temperature_that_is_no_number": "generate lm in.txt --temperature nan",
    "negative_temperature_and_limit": "generate lm in.txt --temperature -3 --limit 0",
    "limit_too_large": "generate lm in.txt --limit 128",
    "step_that_is_no_number": "eval fr --step ²",
    "no_such_step": "translate fr in.txt --step 7",
    "too_few_checkpoints": "translate fr in.txt --average 9",
    "other_tokenizer": "translate fr in.txt --ensemble bytes",
    "unknown_axis": "translate fr in.txt --mesh data=2 --layout batch:dta",
    "bleu_without_references": "eval fr --bleu in.txt",
    "bleu_of_unequal_lines": "eval fr --bleu in.txt one.txt",
    "bleu_of_nothing": "eval fr --bleu empty.txt empty.txt",
    "bleu_of_a_language_model": "eval lm --bleu in.txt in.txt",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_exits_with_2(name, weft, here, golden):
    (here / "latin.txt").write_bytes("un\ndéjà\n".encode("latin1"))
    (here / "one.txt").write_text("one\n")
    (here / "empty.txt").write_text("")
    if not (here / "pipe").exists():
        os.mkfifo(here / "pipe")
    (here / "long.txt").write_text("short\n" + "ab " * 200 + "\n")
    before = set(here.rglob("*"))
    code, out, err = weft(*MISTAKES[name].split())
    completions = re.sub(rf"\n  at \S*{Path(__file__).name}:\d+(?=\n|$)", "", err.replace(str(here), "HERE"))
    golden(name, completions, "messages/speaking")
    assert (code, out) == (2, [])
    assert set(here.rglob("*")) == before


@pytest.mark.parametrize("line", ["translate fr in.txt --beems 3", "eval fr --bleu in.txt in.txt --beems 3"])
def test_unknown_flags(weft, line):
    code, out, err = weft(*line.split())
    assert (code, out) == (2, []) and "--beams" in err


def test_references_end_where_flags_begin(weft):
    code, out, err = weft("eval", "fr", "--bleu", "in.txt", "in.txt", "-o", "out.txt")
    assert (code, out) == (2, []) and "-o" in err and "no file" not in err


def test_several_processes_raise(weft, monkeypatch):
    monkeypatch.setenv("WEFT_PROCESSES", "2")
    code, out, err = weft("translate", "fr", "in.txt")
    assert (code, out) == (2, []) and "one of 2 processes" in err
    monkeypatch.setenv("WEFT_PROCESSES", "abc")
    code, out, err = weft("translate", "fr", "in.txt")
    assert (code, out) == (2, []) and "one of abc processes, according to WEFT_PROCESSES" in err
    monkeypatch.setenv("WEFT_PROCESSES", "")  # as unset
    assert weft("translate", "fr", "in.txt", *SHORT)[0] == 0


def test_lines_are_read_as_they_are(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa b\r\n\n\u2028c".encode())
    found = read_lines(str(path))
    assert found.texts == ["a b", "", "\u2028c"] and found.count == 3
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_lines(str(packed)) == dataclasses.replace(found, name=str(packed))
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match="can't decompress"):
        read_lines(str(packed))
