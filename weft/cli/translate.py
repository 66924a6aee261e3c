"""`weft translate`: a file in, its translation out, line by line."""

from __future__ import annotations

from dataclasses import dataclass

from .generation import GenerationCommand


@dataclass
class TranslateCommand(GenerationCommand):
    """Translate a file, line by line, with a trained model.

    FOLDER is that of a run of weft train, or one of Hugging Face with a model and its tokenizer.
    Each line of the input gives one line of output, and an empty line an empty one. Should a translation have
    several lines, \\n stands between them; --json gives it as it is.

        weft translate runs/fr news.en > news.fr
        weft translate runs/fr news.en --json --best 4 --ensemble runs/other --average 5
        weft translate runs/fr news.en --mesh "data=4 model=2" --layout "batch:data heads:model" -o news.fr
        echo "A cat." | weft translate runs/fr --beams 0

    With -o the lines go to OUT.part until all are there. Run the same command again to resume, on any
    mesh."""

    kind = "encoder_decoder"
