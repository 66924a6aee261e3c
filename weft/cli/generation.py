"""What weft translate, generate, score and eval --bleu share: models that speak, and how they are asked."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tyro.conf import Positional, UseAppendAction, arg

from . import resumable_output
from .input_lines import STDIN, InputLines, read_lines
from .progress import LineProgress
from .targets import UsageError

if TYPE_CHECKING:
    from ..generate import Completion, GenerationConfig, TextGenerator
    from ..train.load import LoadedRun

DEFAULT_BEAMS = 4  # of a translation, if nothing is said
MAX_BEAMS = 1000  # a step looks at as many continuations as their square

# What the model of a run is called, which commands are for it, and what they do.
MODEL_KINDS = {
    "encoder_decoder": ("a translation model", "weft translate", "translates texts"),
    "decoder": ("a language model", "weft generate", "goes on with texts"),
    "encoder": ("an encoder", "weft eval", "scores it"),
}


@dataclass(frozen=True)
class ModelFlags:
    """Which models, and where they run."""

    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Of which step; by default the newest checkpoint."""
    average: Annotated[int, arg(metavar="N", help_behavior_hint="")] = 1
    """Take the mean of the parameters of the last N checkpoints, up to --step."""
    ensemble: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FOLDER", help_behavior_hint="")] = ()
    """A further run, whose model speaks too: the mean of their probabilities counts. It has the same
    tokenizer; --step and --average hold for it as well. May be given several times."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """The processor mesh, "data=4 model=2"; "" is one device. By default that of training, if there are as
    many devices, else one."""
    layout: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Which dims are split over which axes, "batch:data heads:model". By default as in training."""
    rows: Annotated[int, arg(metavar="N", help_behavior_hint="")] = 32
    """How many texts are worked on at once; memory grows with it, and results don't depend on it."""

    def __post_init__(self) -> None:
        _check({"--average": (self.average, 1), "--rows": (self.rows, 1)})


@dataclass(frozen=True)
class GenerationFlags:
    """How texts are said."""

    beams: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Beams of a search; 0: tokens are chosen one by one. By default 4 for translations (unless one of the
    flags below asks for something else), and 0 for other texts."""
    alpha: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """How much a search prefers longer texts; by default 0.6, and 0 is not at all."""
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many tokens at most. By default 10 more than one and a half times those of a text that is
    translated, and no more than 256; after a prompt 128, and no more than half of what the model can read."""
    temperature: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """Draw tokens, from probabilities that are the sharper the lower it is; by default 0: the likeliest."""
    top_k: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Draw from the K likeliest tokens only."""
    top_p: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """Draw from the likeliest tokens only, as few as have the probability P together."""
    penalty: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """Make tokens that are in the text already less likely; above 1, such as 1.2."""
    seed: Annotated[int, arg(metavar="N", help_behavior_hint="")] = 0
    """What is drawn depends on it, and on the number of the line."""

    def __post_init__(self) -> None:
        _check({"--beams": (self.beams, 0), "--seed": (self.seed, 0), "--alpha": (self.alpha, 0)})

    def ask(self, translates: bool) -> GenerationConfig:
        """The same in one word, with what is not said filled in; an error if a flag has no effect."""
        from ..core.errors import ModelError
        from ..generate import Beams, GenerationConfig

        by_token = {
            _flag(name): value
            for name in ("temperature", "top_k", "top_p", "penalty")
            if (value := getattr(self, name)) is not None
        }
        beams = self.beams
        if beams is None:
            beams = DEFAULT_BEAMS if translates and not by_token else 0
        if beams and by_token:
            raise UsageError(
                f"--beams {beams} with {' and '.join(by_token)}",
                rule="a search takes the likeliest texts; nothing is drawn or made less likely",
                hint="leave out one of them; --beams 0 is no search",
            )
        if not beams and self.alpha is not None:
            raise UsageError(
                f"--alpha {self.alpha} without beams",
                rule="it is the length penalty of a beam search",
                hint=f"--beams {DEFAULT_BEAMS}",
            )
        if not self.temperature and (wrong := {"--top-k", "--top-p"} & set(by_token)):
            raise UsageError(
                f"{' and '.join(sorted(wrong))} without a temperature",
                rule="the likeliest token is taken, and nothing is drawn",
                hint="--temperature 1 draws from the model's own probabilities",
            )
        given = {name.removeprefix("--").replace("-", "_"): value for name, value in by_token.items()}
        alpha = Beams.alpha if self.alpha is None else self.alpha
        search = Beams(beams, alpha) if beams else None
        try:
            return GenerationConfig(limit=self.limit, seed=self.seed, beams=search, **given)
        except ModelError as error:  # in Python's words: limit=0
            raise UsageError(
                re.sub(r"(\w+)=", lambda found: f"{_flag(found[1])} ", error.fact),
                rule=re.sub(r"\btop_[kp]\b", lambda found: _flag(found[0]), error.rule),
                hint="what is left out is as usual; --help says what that is",
            ) from None


def check_beams(folder: str, asked: GenerationConfig) -> None:
    """An error if a search has more beams than there are tokens to begin with, or than is sensible."""
    from ..train import load

    size, vocab = asked.beams.size if asked.beams else 0, load.load_model_config(folder).vocab
    most = min(vocab, MAX_BEAMS)
    if size > most:
        raise UsageError(
            f"--beams {size}, and the model has {vocab} tokens",
            rule=f"there are no more beams than tokens, nor than {MAX_BEAMS}: work grows with their square",
            hint=f"--beams {DEFAULT_BEAMS} is usual; {most} is the most here",
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check(least: dict[str, tuple[float | None, float]]) -> None:
    wrong = [
        f"{flag} {value}: it is at least {low}" for flag, (value, low) in least.items() if _below(value, low)
    ]
    if wrong:
        raise UsageError(*wrong, hint="--help says what each is")


def _below(value: float | None, least: float) -> bool:
    return value is not None and not value >= least


# Models


@dataclass(frozen=True)
class LoadedGenerator:
    """Models that are ready to speak, and by what they are told from others."""

    speaker: TextGenerator
    made_of: dict[str, Any]


def load_generator(folder: str, models: ModelFlags, *kinds: str) -> LoadedGenerator:
    """Load the models of runs.

    Args:
      folder: of the run.
      models: which checkpoints, which other runs, and where.
      kinds: the kinds of model that the command is for.
    """
    from ..generate import TextGenerator
    from ..train import load

    check_single_process()
    for one in (folder, *models.ensemble):
        _check_kind(one, load.load_model_config(one).kind, kinds)
    first = load.load_run(folder, models.step, models.average, models.mesh, models.layout)
    report_mesh_fallback(first, models.mesh)
    where = (first.mesh, first.layout)
    every = [first, *(load.load_run(one, models.step, models.average, *where) for one in models.ensemble)]
    _check_tokenizers(every)
    speaker = TextGenerator([one.model for one in every], first.tokenizer, *where, rows=models.rows)
    return LoadedGenerator(
        speaker,
        {"steps": [list(one.steps) for one in every], "checkpoints": [list(one.checksums) for one in every]},
    )


def check_single_process() -> None:
    """An error if this process is one of several."""
    from ..distributed import rendezvous

    said = os.environ.get(rendezvous.PROCESSES_VARIABLE) or "1"
    if not said.isdecimal() or int(said) > 1:
        raise UsageError(
            f"this command is one of {said} processes, as {rendezvous.PROCESSES_VARIABLE} says",
            rule="it runs in one, on all devices of its machine",
            hint="leave weft launch out; or give each process a file of its own",
        )


def report_mesh_fallback(run: LoadedRun, mesh: str | None) -> None:
    """Say so if a model does not run on the mesh that it was trained on, and nobody asked for another."""
    if mesh is None and run.config and run.mesh != type(run.mesh)(run.config.layout.mesh):
        print(f'there are too few devices for "{run.config.layout.mesh}": one is used', file=sys.stderr)


def _check_kind(folder: str, kind: str, kinds: tuple[str, ...]) -> None:
    from ..core.errors import ModelError

    if kind not in kinds:
        name, command, does = MODEL_KINDS[kind]
        raise ModelError(
            f"{folder} has {name}",
            rule=f"this command is for {' or '.join(MODEL_KINDS[one][0] for one in kinds)}",
            hint=f"{command} {folder} {does}",
        )


def _check_tokenizers(every: list[LoadedRun]) -> None:
    from ..core.errors import ModelError

    def content(one: LoadedRun) -> Any:
        path = getattr(one.tokenizer, "path", None)
        return Path(path).read_bytes() if path else one.tokenizer

    for other in every[1:]:
        if content(other) != content(every[0]):
            raise ModelError(
                f"{every[0].folder} and {other.folder} have different tokenizers",
                *(f"{one.folder}: {_tokenizer(one)}" for one in (every[0], other)),
                rule="models that speak together have the same tokens",
                hint="train the second with the first one's tokenizer: "
                f"--data.tokenizer {every[0].folder}/tokenizer.model",
            )


def _tokenizer(one: LoadedRun) -> str:
    name = one.config.data.tokenizer if one.config else "tokenizer.json"
    return f"{name}, {one.tokenizer.vocab} ids"


# Lines


def process_lines(
    lines: InputLines,
    said: Callable[[Iterable[Any], int], Iterator[str]],
    out: Path | None,
    made_of: dict[str, Any],
) -> None:
    """Hand lines on, and write down what is said to each.

    Args:
      lines: those of the input.
      said: from lines, and the number of the first, to results.
      out: the file that they go to; None: stdout.
      made_of: what results depend on, beside the input.
    """
    made_of = {**made_of, "input": lines.sum, "lines": lines.count}
    bar = out is not None or not sys.stdout.isatty()
    with (
        resumable_output.resumable_writer(out, made_of) as (done, write),
        LineProgress(lines.count, done, bar=bar) as progress,
    ):
        for one in said(itertools.islice(lines.texts, done, None), done):
            write(one)
            progress.step()


@dataclass
class CompletionFormatter:
    """From what was said to a line, with those counted that were not read whole."""

    as_json: bool
    best: int | None
    cut: int = 0

    def line(self, one: Completion) -> str:
        """A text, or an object."""
        from ..train.plain_json import plain_json

        self.cut += one.cut
        if not self.as_json:
            return escape_newlines(one.text)
        found = _object(one)
        if self.best is not None:
            found["best"] = [_object(other) for other in (one, *one.others)[: self.best]]
        return plain_json(found)

    def tell(self, speaker: TextGenerator, asked: GenerationConfig) -> None:
        """Say what was not read whole."""
        if not self.cut:
            return
        left = ""
        if not speaker.translates:
            limit = speaker.encode_prompt(0, "", asked.limit).limit
            left = f", and {limit} of them are left to what is said (--limit)"
        print(
            f"warning: {self.cut:,} texts were cut: at most {speaker.longest} tokens are read{left}",
            file=sys.stderr,
        )


def _object(one: Completion) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("text", "score", "tokens", "ended", "cut")}


def escape_newlines(text: str) -> str:
    """A text on one line."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


@dataclass
class GenerationCommand:
    """A command that says something to each line of a file: all of weft translate and weft generate."""

    kind: ClassVar[str]  # the kind of model that it is for

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run, or one of Hugging Face."""
    file: Annotated[Positional[str], arg(metavar="[FILE]", help_behavior_hint="")] = STDIN
    """Texts, one to a line, in UTF-8; - or nothing is stdin. .gz, .bz2, .xz and .zst are unpacked."""
    out: Annotated[Path | None, arg(metavar="OUT", aliases=["-o"], help_behavior_hint="")] = None
    """Write to this file instead of stdout; run the same command again to resume."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """An object to a line: text, score, tokens, ended (by itself, not by --limit), cut (it was too long)."""
    best: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """With --json and beams, the N best results, as `best`."""
    models: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)
    how: Annotated[GenerationFlags, arg(name="")] = field(default_factory=GenerationFlags)

    def run(self) -> None:
        """Say something to each line."""
        asked = self.how.ask(self.kind == "encoder_decoder")
        _check_best(self.best, self.json, asked)
        resumable_output.check_resumable(self.out, (self.file,))
        if self.file == STDIN and sys.stdin.isatty():
            print("lines are read from the terminal; Ctrl-D ends them", file=sys.stderr)
        lines = read_lines(self.file, as_they_come=self.out is None)
        check_beams(self.folder, asked)
        found = load_generator(self.folder, self.models, self.kind)
        writing = CompletionFormatter(self.json, self.best)

        def said(texts: Iterable[str], first: int) -> Iterator[str]:
            return map(writing.line, found.speaker.generate(texts, asked, first))

        settings = dataclasses.asdict(asked) | {
            "ends": list(asked.ends),
            "json": self.json,
            "best": self.best,
        }
        process_lines(
            lines, said, self.out, {"command": MODEL_KINDS[self.kind][1], **found.made_of, **settings}
        )
        writing.tell(found.speaker, asked)


def _check_best(best: int | None, as_json: bool, asked: GenerationConfig) -> None:
    if best is None:
        return
    size = asked.beams.size if asked.beams else 0
    if not as_json or not 1 <= best <= size:
        raise UsageError(
            f"--best {best} {'without --json' if not as_json else f'of {size} beams'}",
            rule="the best results of a beam search are as many as its beams at most, and a list in JSON",
            hint=f"--json --beams {max(best, DEFAULT_BEAMS)} --best {max(best, 1)}",
        )
