"""`weft translate`: a file in, its translation out, line by line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from .speaking import How, Models, say


@dataclass
class Translate:
    """Translate a file, line by line, with a trained model.

    FOLDER is that of a run of weft train; nothing else of the run is needed. Each line of the input gives one
    line of output, and an empty line an empty one. Should a translation have several lines, \\n stands
    between them; --json gives it as it is.

        weft translate runs/fr news.en > news.fr
        weft translate runs/fr news.en --json --best 4 --ensemble runs/other --average 5
        weft translate runs/fr news.en --mesh "data=4 model=2" --layout "batch:data heads:model" -o news.fr
        echo "A cat." | weft translate runs/fr --beams 0

    With -o the lines go to OUT.part until all are there. What was stopped goes on when the same command is
    given again, on any mesh."""

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run."""
    file: Annotated[Positional[str], arg(metavar="[FILE]", help_behavior_hint="")] = "-"
    """Texts, one to a line, in UTF-8; - or nothing is stdin. One that ends in .gz is unpacked."""
    out: Annotated[Path | None, arg(metavar="OUT", aliases=["-o"], help_behavior_hint="")] = None
    """Write to this file instead of stdout; a call that was stopped goes on."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """An object to a line: text, score, tokens, ended (by itself, not by --limit), cut (it was too long)."""
    best: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """With --json and beams, the N best translations, as `best`."""
    models: Annotated[Models, arg(name="")] = field(default_factory=Models)
    how: Annotated[How, arg(name="")] = field(default_factory=How)

    def run(self) -> None:
        """Translate."""
        say(
            "encoder_decoder",
            self.folder,
            self.file,
            self.models,
            self.how,
            self.out,
            self.json,
            self.best,
        )
