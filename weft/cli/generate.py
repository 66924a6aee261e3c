"""`weft generate`: prompts in, what a language model goes on with out, line by line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from .speaking import How, Models, say


@dataclass
class Generate:
    """Go on with texts, line by line, with a trained language model.

    FOLDER is that of a run of weft train; nothing else of the run is needed. Each line of the input is a
    prompt, also an empty one. It gives one line of output: what comes after the prompt, without it. Where
    that has an end of line, \\n stands for it; --json gives it as it is.

        weft generate runs/lm prompts.txt > said.txt
        echo "To be" | weft generate runs/lm --temperature 0.8 --top-p 0.95 --seed 3
        weft generate runs/lm prompts.txt -o said.jsonl --json --beams 4 --best 4

    With -o the lines go to OUT.part until all are there. What was stopped goes on when the same command is
    given again, on any mesh."""

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run."""
    file: Annotated[Positional[str], arg(metavar="[FILE]", help_behavior_hint="")] = "-"
    """Prompts, one to a line, in UTF-8; - or nothing is stdin. One that ends in .gz is unpacked."""
    out: Annotated[Path | None, arg(metavar="OUT", aliases=["-o"], help_behavior_hint="")] = None
    """Write to this file instead of stdout; a call that was stopped goes on."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """An object to a line: text, score, tokens, ended (by itself, not by --limit), cut (it was too long)."""
    best: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """With --json and beams, the N best texts, as `best`."""
    models: Annotated[Models, arg(name="")] = field(default_factory=Models)
    how: Annotated[How, arg(name="")] = field(default_factory=How)

    def run(self) -> None:
        """Go on with the prompts."""
        say("decoder", self.folder, self.file, self.models, self.how, self.out, self.json, self.best)
