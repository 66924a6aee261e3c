"""What weft translate, generate, score and eval --bleu share: loading models, generation flags, line
output."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tyro.conf import Positional, UseAppendAction, arg

from ..core.field_types import NonNegative, NonNegativeInt, PositiveInt
from ..core.fields import check_values, field_types, flag_name
from . import resumable_output
from .flag_errors import naming_flags, validate_flags
from .input_lines import STDIN, InputLines, read_lines
from .progress import LineProgress
from .targets import UsageError

if TYPE_CHECKING:
    from ..data import Tokenizer
    from ..generate import Completion, GenerationConfig, TextGenerator
    from ..train.load import LoadedRun

DEFAULT_BEAMS = 4  # for translations
MAX_BEAMS = 1000  # the work of a step grows with the square of the number of beams

# For each kind of model: its name, the command for it, and what that command does.
MODEL_KINDS = {
    "encoder_decoder": ("a translation model", "weft translate", "translates texts"),
    "decoder": ("a language model", "weft generate", "completes prompts"),
    "encoder": ("an encoder", "weft eval", "evaluates it"),
}


@dataclass(frozen=True)
class ModelFlags:
    """Which models to load, and where to run them."""

    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """The step of the checkpoint (default: the latest)."""
    average: Annotated[PositiveInt, arg(metavar="N", help_behavior_hint="")] = 1
    """Average the parameters of the last N checkpoints up to --step."""
    ensemble: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FOLDER", help_behavior_hint="")] = ()
    """Add another run to the ensemble, which averages the models' probabilities.
    The run must have the same tokenizer; --step and --average apply to it too. May be repeated."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """The device mesh, such as "data=4 model=2"; "" is a single device.
    The default is the mesh of training if there are enough devices, else a single device."""
    layout: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Which dims are split over which axes, "batch:data heads:model" (default: as in training)."""
    rows: Annotated[PositiveInt, arg(metavar="N", help_behavior_hint="")] = 32
    """The number of texts in a batch. It affects memory, not results."""

    def __post_init__(self) -> None:
        validate_flags(self)


@dataclass(frozen=True)
class GenerationFlags:
    """How to generate text. Flags with the names of `GenerationConfig`'s fields have their ranges."""

    beams: Annotated[NonNegativeInt | None, arg(metavar="K", help_behavior_hint="")] = None
    """The number of beams of a beam search; 0 generates token by token.
    The default is 4 for translations (0 with one of the sampling flags below) and 0 otherwise."""
    alpha: Annotated[NonNegative | None, arg(metavar="X", help_behavior_hint="")] = None
    """The length penalty of beam search: higher values prefer longer texts (default: 0.6)."""
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """The maximum number of tokens to generate. The default for translations is
    1.5 times the input's length plus 10, at most 256; for prompts 128, at most half of the context length."""
    temperature: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """The sampling temperature; 0, the default, always takes the most likely token."""
    top_k: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Sample from the K most likely tokens only."""
    top_p: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """Nucleus sampling: sample from the most likely tokens with total probability P."""
    penalty: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """The repetition penalty: values above 1, such as 1.2, make tokens already in the text less likely."""
    seed: Annotated[int, arg(metavar="N", help_behavior_hint="")] = 0
    """The random seed. Samples depend on it and on the line number."""

    def to_config(self, translates: bool) -> GenerationConfig:
        """Fill in the defaults; raise an error if a flag has no effect."""
        from ..generate import Beams, GenerationConfig

        given = dataclasses.asdict(self)
        # A flag that is not given is None. --beams is a number here, and a Beams there.
        shared = {n: t for n, t in field_types(GenerationConfig).items() if n in given and n != "beams"}
        optional = {n: dataclasses.replace(t, optional=True) for n, t in shared.items()}
        with naming_flags():
            check_values(field_types(GenerationFlags) | optional, given)
        sampling = {
            flag_name([name]): given[name]
            for name in ("temperature", "top_k", "top_p", "penalty")
            if given[name] is not None
        }
        beams = self.beams
        if beams is None:
            beams = DEFAULT_BEAMS if translates and not sampling else 0
        if beams and sampling:
            raise UsageError(
                f"--beams {beams} with {' and '.join(sampling)}",
                rule="beam search finds the most likely texts; it neither samples nor penalizes repetition",
                hint="omit one of them; --beams 0 disables beam search",
            )
        if not beams and self.alpha is not None:
            raise UsageError(
                f"--alpha {self.alpha} without beams",
                rule="--alpha is the length penalty of beam search",
                hint=f"--beams {DEFAULT_BEAMS}",
            )
        if not self.temperature and (wrong := {"--top-k", "--top-p"} & set(sampling)):
            raise UsageError(
                f"{' and '.join(sorted(wrong))} without a temperature",
                rule="at temperature 0 the most likely token is taken, with no sampling",
                hint="--temperature 1 samples from the model's probabilities",
            )
        alpha = Beams.alpha if self.alpha is None else self.alpha
        search = Beams(beams, alpha) if beams else None
        settings = {name: given[name] for name in shared if given[name] is not None}
        return GenerationConfig(beams=search, **settings)


def check_beams(folder: str, config: GenerationConfig) -> None:
    """Raise an error if a beam search has more beams than the vocabulary has tokens, or than is sensible."""
    from ..train import load

    size, vocab = config.beams.size if config.beams else 0, load.load_model_config(folder).vocab
    most = min(vocab, MAX_BEAMS)
    if size > most:
        raise UsageError(
            f"--beams {size}, but the model has {vocab} tokens",
            rule=f"the number of beams is at most the number of tokens, and at most {MAX_BEAMS}, "
            "because the work grows with its square",
            hint=f"--beams {DEFAULT_BEAMS} is usual; the maximum here is {most}",
        )


# Models


@dataclass(frozen=True)
class LoadedGenerator:
    """A text generator, and the checkpoints that its results depend on."""

    generator: TextGenerator
    provenance: dict[str, Any]


def load_generator(folder: str, models: ModelFlags, *kinds: str) -> LoadedGenerator:
    """Load the model of a run, or an ensemble of several runs.

    Args:
      folder: the folder of the run.
      models: which checkpoints, which further runs, and where to run them.
      kinds: the kinds of model that the command supports.
    """
    from ..generate import TextGenerator
    from ..train import load

    check_single_process()
    for one in (folder, *models.ensemble):
        _check_kind(one, load.load_model_config(one).kind, kinds)
    first = load.load_run(folder, models.step, models.average, models.mesh, models.layout)
    report_mesh_fallback(first, models.mesh)
    where = (first.mesh, first.layout)
    runs = [first, *(load.load_run(one, models.step, models.average, *where) for one in models.ensemble)]
    _check_same_tokenizer(runs)
    generator = TextGenerator([run.model for run in runs], first.tokenizer, *where, rows=models.rows)
    return LoadedGenerator(
        generator,
        {"steps": [list(run.steps) for run in runs], "checkpoints": [list(run.checksums) for run in runs]},
    )


def check_single_process() -> None:
    """Raise an error if this process is one of several."""
    from ..distributed import rendezvous

    count = os.environ.get(rendezvous.PROCESSES_VARIABLE) or "1"
    if not count.isdecimal() or int(count) > 1:
        raise UsageError(
            f"this command is one of {count} processes, according to {rendezvous.PROCESSES_VARIABLE}",
            rule="it runs in a single process, on all devices of the machine",
            hint="run it without weft launch, or give each process its own file",
        )


def report_mesh_fallback(run: LoadedRun, mesh: str | None) -> None:
    """Print a note if the model can't run on the mesh it was trained on, and no other mesh was given."""
    if mesh is None and run.config and run.mesh != type(run.mesh)(run.config.layout.mesh):
        print(f'not enough devices for "{run.config.layout.mesh}": using one device', file=sys.stderr)


def _check_kind(folder: str, kind: str, kinds: tuple[str, ...]) -> None:
    from ..core.errors import ModelError

    if kind not in kinds:
        name, command, does = MODEL_KINDS[kind]
        raise ModelError(
            f"{folder} contains {name}",
            rule=f"this command needs {' or '.join(MODEL_KINDS[one][0] for one in kinds)}",
            hint=f"{command} {folder} {does}",
        )


def _check_same_tokenizer(runs: list[LoadedRun]) -> None:
    from ..core.errors import ModelError

    def content(run: LoadedRun) -> bytes | Tokenizer:
        path = getattr(run.tokenizer, "path", None)
        return Path(path).read_bytes() if path else run.tokenizer

    for other in runs[1:]:
        if content(other) != content(runs[0]):
            raise ModelError(
                f"{runs[0].folder} and {other.folder} have different tokenizers",
                *(f"{run.folder}: {_describe_tokenizer(run)}" for run in (runs[0], other)),
                rule="the models of an ensemble must share a tokenizer",
                hint="train the second model with the tokenizer of the first: "
                f"--data.tokenizer {runs[0].folder}/tokenizer.model",
            )


def _describe_tokenizer(run: LoadedRun) -> str:
    name = run.config.data.tokenizer if run.config else "tokenizer.json"
    return f"{name}, {run.tokenizer.vocab} ids"


# Lines


def process_lines(
    lines: InputLines,
    process: Callable[[Iterable[Any], int], Iterator[str]],
    out: Path | None,
    provenance: dict[str, Any],
) -> None:
    """Process input lines and write the results.

    Args:
      lines: the input.
      process: from lines, and the number of the first line, to results.
      out: the output file; None is stdout.
      provenance: everything that the results depend on, besides the input.
    """
    provenance = {**provenance, "input": lines.sum, "lines": lines.count}
    bar = out is not None or not sys.stdout.isatty()
    with (
        resumable_output.resumable_writer(out, provenance) as (done, write),
        LineProgress(lines.count, done, bar=bar) as progress,
    ):
        for result in process(itertools.islice(lines.texts, done, None), done):
            write(result)
            progress.step()


@dataclass
class CompletionFormatter:
    """Formats completions as lines, and counts those whose input was truncated."""

    as_json: bool
    best: int | None
    truncated: int = 0

    def format(self, completion: Completion) -> str:
        """A line of text, or a JSON object."""
        from ..train.plain_json import plain_json

        self.truncated += completion.cut
        if not self.as_json:
            return escape_newlines(completion.text)
        data = _completion_data(completion)
        if self.best is not None:
            best = (completion, *completion.others)[: self.best]
            data["best"] = [_completion_data(one) for one in best]
        return plain_json(data)

    def report_truncated(self, generator: TextGenerator, config: GenerationConfig) -> None:
        """Print a warning if inputs were truncated."""
        if not self.truncated:
            return
        reserved = ""
        if not generator.translates:
            limit = generator.encode_prompt(0, "", config.limit).limit
            reserved = f", with {limit} reserved for the completion (--limit)"
        print(
            f"warning: {self.truncated:,} texts were truncated: the context length is "
            f"{generator.longest} tokens{reserved}",
            file=sys.stderr,
        )


def _completion_data(completion: Completion) -> dict[str, Any]:
    return {name: getattr(completion, name) for name in ("text", "score", "tokens", "ended", "cut")}


def escape_newlines(text: str) -> str:
    """A text on one line."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


@dataclass
class GenerationCommand:
    """A command that generates one line of output per line of input: weft translate and weft generate."""

    kind: ClassVar[str]  # the kind of model

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run, or a Hugging Face folder."""
    file: Annotated[Positional[str], arg(metavar="[FILE]", help_behavior_hint="")] = STDIN
    """Texts in UTF-8, one per line (default: -, stdin). .gz, .bz2, .xz and .zst files are decompressed."""
    out: Annotated[Path | None, arg(metavar="OUT", aliases=["-o"], help_behavior_hint="")] = None
    """Write to this file instead of stdout; run the same command again to resume."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print one JSON object per line with text, score, tokens,
    ended (false if --limit cut it off) and cut (true if the input was truncated)."""
    best: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """With --json and beam search, add the N best results as `best`."""
    models: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)
    generation: Annotated[GenerationFlags, arg(name="")] = field(default_factory=GenerationFlags)

    def run(self) -> None:
        """Generate a line of output for each line of input."""
        config = self.generation.to_config(self.kind == "encoder_decoder")
        _check_best(self.best, self.json, config)
        resumable_output.check_resumable(self.out, (self.file,))
        if self.file == STDIN and sys.stdin.isatty():
            print("reading lines from the terminal; end with Ctrl-D", file=sys.stderr)
        lines = read_lines(self.file, streamed=self.out is None)
        check_beams(self.folder, config)
        loaded = load_generator(self.folder, self.models, self.kind)
        formatter = CompletionFormatter(self.json, self.best)

        def complete(texts: Iterable[str], first: int) -> Iterator[str]:
            return map(formatter.format, loaded.generator.generate(texts, config, first))

        settings = dataclasses.asdict(config) | {
            "ends": list(config.ends),
            "json": self.json,
            "best": self.best,
        }
        provenance = {"command": MODEL_KINDS[self.kind][1], **loaded.provenance, **settings}
        process_lines(lines, complete, self.out, provenance)
        formatter.report_truncated(loaded.generator, config)


def _check_best(best: int | None, as_json: bool, config: GenerationConfig) -> None:
    if best is None:
        return
    size = config.beams.size if config.beams else 0
    if not as_json or not 1 <= best <= size:
        raise UsageError(
            f"--best {best} {'without --json' if not as_json else f'of {size} beams'}",
            rule="--best is at most the number of beams, and needs --json",
            hint=f"--json --beams {max(best, DEFAULT_BEAMS)} --best {max(best, 1)}",
        )
