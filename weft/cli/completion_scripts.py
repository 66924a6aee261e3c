"""From the completed commands to a script for bash, zsh or fish.

Each script finds the command on the line, `weft hardware show`, then completes the value of a flag, a flag,
or a word; where nothing is known, a file.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .completion import CompletedCommand

BASH = """\
# Completion of weft for bash; written by `weft completion bash`.
_weft() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} at=weft word known=
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$at $word" in
      COMMANDS) at="$at $word" ;;
      *) break ;;
    esac
  done
  case "$at $prev" in
VALUES
    *)
      case "$cur" in
        -*)
          case "$at" in
FLAGS
          esac ;;
        *)
          case "$at" in
WORDS
          esac ;;
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$known" -- "$cur"))
}
complete -o default -F _weft weft
"""

ZSH = """\
#compdef weft
# Completion of weft for zsh; written by `weft completion zsh`.
_weft() {
  local at=weft word
  local -a known
  for word in "${(@)words[2,CURRENT-1]}"; do
    case "$at $word" in
      COMMANDS) at="$at $word" ;;
      *) break ;;
    esac
  done
  case "$at ${words[CURRENT-1]}" in
VALUES
    *)
      case "${words[CURRENT]}" in
        -*)
          case "$at" in
FLAGS
          esac ;;
        *)
          case "$at" in
WORDS
          esac ;;
      esac ;;
  esac
  (( $#known )) && _describe weft known && return
  _files
}
if [[ $funcstack[1] == _weft ]]; then _weft "$@"; else compdef _weft weft; fi
"""

FISH = """\
# Completion of weft for fish; written by `weft completion fish`.
function __weft_at
    set -l at weft
    for word in (commandline -opc)[2..]
        switch "$at $word"
            case COMMANDS
                set at "$at $word"
            case '*'
                break
        end
    end
    test "$at" = "$argv"
end
"""


def bash_script(commands: Sequence[CompletedCommand]) -> str:
    """The script for bash, which shows no descriptions."""
    return _fill(BASH, commands, lambda words: f"known={shlex.quote(' '.join(name for name, _ in words))}")


def zsh_script(commands: Sequence[CompletedCommand]) -> str:
    """The script for zsh."""

    def known(words: Iterable[tuple[str, str]]) -> str:
        shown = (name.replace(":", r"\:") + (f":{about}" if about else "") for name, about in words)
        return f"known=({' '.join(map(shlex.quote, shown))})"

    return _fill(ZSH, commands, known)


Known = Callable[[Iterable[tuple[str, str]]], str]  # from words and descriptions to an assignment


def _fill(template: str, commands: Sequence[CompletedCommand], known: Known) -> str:
    """The script with its tables filled in. Each has a row for the keys with the same text."""
    values, flags, words = (defaultdict[str, list[str]](list) for _ in range(3))
    for command in commands:
        for flag in command.flags:
            if flag.takes_value:
                text = known((value, "") for value in flag.values) if flag.values else ":"
                values[text] += [f"{command.path} {name}" for name in flag.names]
        flags[known((name, flag.about) for flag in command.flags for name in flag.names)].append(command.path)
        words[known(command.words.items())].append(command.path)
    for name, table in {"VALUES": values, "FLAGS": flags, "WORDS": words}.items():
        indent = " " * (4 if name == "VALUES" else 12)
        rows = (f"{indent}{'|'.join(map(shlex.quote, keys))}) {text} ;;" for text, keys in table.items())
        template = template.replace(f"{name}\n", "\n".join(rows) + "\n", 1)
    return template.replace("COMMANDS", "|".join(shlex.quote(one.path) for one in commands[1:]), 1)


def fish_script(commands: Sequence[CompletedCommand]) -> str:
    """The script for fish."""
    paths = " ".join(_fish_quote(one.path) for one in commands[1:])
    rows = (row for command in commands for row in _fish_rows(command))
    return FISH.replace("COMMANDS", paths) + "\n".join(rows) + "\n"


def _fish_rows(command: CompletedCommand) -> Iterator[str]:
    start = f"complete -c weft -n {_fish_quote(f'__weft_at {command.path}')}"
    for word, about in command.words.items():
        yield f"{start} -a {_fish_quote(word)} -d {_fish_quote(about)}"
    for flag in command.flags:
        names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names]
        values = f"-a {_fish_quote(' '.join(flag.values))}" if flag.values and flag.takes_value else ""
        kinds = ["-r"] if flag.takes_value else []
        yield " ".join([start, *names, *kinds, *filter(None, [values]), "-d", _fish_quote(flag.about)])


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", r"\\").replace("'", r"\'") + "'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
