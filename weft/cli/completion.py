"""`weft completion`: from the commands to a script with which a shell completes them.

The script contains all commands, flags and names of models and hardware, so completing starts no process.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from tyro.conf import Positional, arg

from ..core.field_types import FieldType
from ..core.fields import field_docs
from .completion_scripts import SCRIPTS


@dataclass(frozen=True)
class CompletedFlag:
    """A flag.

    Attributes:
      names: `--out`, and perhaps `-o`.
      about: its description.
      takes_value: whether a value follows it.
      values: the values, if they are known; other values may be files.
    """

    names: tuple[str, ...]
    about: str
    takes_value: bool = True
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompletedCommand:
    """A command, such as `weft hardware show`.

    Attributes:
      path: its words.
      words: its subcommands, or the known values of its first argument, each with a description.
      flags: its flags.
    """

    path: str
    words: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[CompletedFlag, ...] = ()


@dataclass
class CompletionCommand:
    """Print a script with which bash, zsh or fish completes the commands of weft on TAB.

        weft completion bash > ~/.local/share/bash-completion/completions/weft
        weft completion zsh > ~/.zfunc/_weft      # with fpath+=~/.zfunc before compinit in ~/.zshrc
        weft completion fish > ~/.config/fish/completions/weft.fish

    Print it again after an update of Weft. It completes commands, flags, and the names of models and
    hardware."""

    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(metavar="SHELL")]
    """The shell: bash, zsh or fish."""

    def run(self) -> None:
        """Print the script."""
        print(SCRIPTS[self.shell](completed_commands()), end="")


# `weft train` and `weft eval` take the settings of a run as flags, and these.
OWN_FLAGS = {
    "weft train": [CompletedFlag(("--print-config",), "Print all settings as TOML", takes_value=False)],
    "weft eval": [
        CompletedFlag(("--bleu",), "Translate a file and compare it with references"),
        CompletedFlag(("--step",), "The step of the checkpoint"),
        CompletedFlag(("--json",), "Print JSON instead of text", takes_value=False),
    ],
}


def completed_commands() -> list[CompletedCommand]:
    """All commands, the outer ones first."""
    from ..train.config import TrainConfig
    from ..train.config_io import SHORT_FLAGS
    from .dispatch import COMMANDS, subcommands, summary

    names = known_names()
    found = [CompletedCommand("weft", {name: summary(kind) for name, kind in COMMANDS.items()})]
    for name, kind in COMMANDS.items():
        path, inner = f"weft {name}", subcommands(kind)
        if path in OWN_FLAGS:
            flags = list(_flags(TrainConfig, names, switches=False))
            short = [CompletedFlag((one,), f"Short for {full}") for one, full in SHORT_FLAGS.items()]
            found.append(CompletedCommand(path, names.get(path, {}), (*OWN_FLAGS[path], *short, *flags)))
        elif inner:
            words = {one: summary(each) for one, each in inner.items()}
            found.append(CompletedCommand(path, words, tuple(_flags(kind, names))))
            found += [_command(f"{path} {one}", each, names) for one, each in inner.items()]
        else:
            found.append(_command(path, kind, names))
    return found


Names = Mapping[str, Mapping[str, str]]


def known_names() -> Names:
    """Words that the annotations don't list, with descriptions: by flag, or by command for its argument."""
    from ..hardware.profile import known_profiles
    from ..models.presets import presets
    from ..train.config import recipes
    from ..train.optimizer_setup import OPTIMIZERS

    models = dict.fromkeys(presets(), "a known model")
    profiles = dict.fromkeys(known_profiles(), "a hardware profile")
    return {
        **dict.fromkeys(["weft plan", "weft search", "weft verify", "weft models show", "--preset"], models),
        **dict.fromkeys(["weft hardware show", "--hardware", "--layout.hardware"], profiles),
        "weft train": recipes(),
        "--train": dict.fromkeys([*OPTIMIZERS, "sgd"], "an optimizer"),
    }


def _command(path: str, kind: type, names: Names) -> CompletedCommand:
    """A command whose arguments are the fields of its dataclass."""
    positional = (hint for _, hint, _ in _fields(kind) if Positional in get_args(hint))
    choices = [one for hint in positional for one in FieldType.of(hint).choices]
    words = {**names.get(path, {}), **dict.fromkeys(choices, "")}
    return CompletedCommand(path, words, tuple(_flags(kind, names)))


def _flags(kind: type, names: Names, prefix: str = "--", *, switches: bool = True) -> Iterator[CompletedFlag]:
    """The flags of a dataclass. Those of the dataclasses in it have a prefix, unless it is `arg(name="")`.

    Args:
      switches: whether a boolean flag takes no value.
    """
    for one, hint, doc in _fields(kind):
        options = next((each for each in get_args(hint) if hasattr(each, "aliases")), None)
        value = FieldType.of(hint)
        is_switch = value.kind is bool and switches
        no = "no-" if is_switch and one.default is True else ""
        name = (options.name if options is not None else "") or one.name
        flag = f"{prefix}{no}{name.replace('_', '-')}"
        if isinstance(value.kind, type) and dataclasses.is_dataclass(value.kind):
            inner = prefix if options is not None and options.name == "" else f"{flag}."
            yield from _flags(value.kind, names, inner, switches=switches)
        elif Positional not in get_args(hint):
            aliases = (options.aliases if options is not None else None) or ()
            known = value.choices or (("true", "false") if value.kind is bool else names.get(flag, ()))
            yield CompletedFlag((flag, *aliases), first_sentence(doc), not is_switch, tuple(map(str, known)))


def _fields(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Any, str]]:
    """The fields of a dataclass, each with its annotation and documentation, except the subcommands."""
    hints, docs = get_type_hints(kind, include_extras=True), field_docs(kind)
    for one in dataclasses.fields(kind):
        if one.name != "do":
            yield one, hints[one.name], docs.get(one.name, "")


def first_sentence(text: str) -> str:
    """The first sentence of a text, on one line, without the period.

    >>> first_sentence("The number of beams of a beam search; 0\\ngenerates. Beams are slow.")
    'The number of beams of a beam search; 0 generates'
    """
    return re.split(r"\.(?:\s|$)", " ".join(text.split()))[0]
