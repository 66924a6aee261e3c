"""`weft translate`: translate a file line by line."""

from __future__ import annotations

from dataclasses import dataclass

from .generation import GenerationCommand


@dataclass
class TranslateCommand(GenerationCommand):
    """Translate a file line by line with a trained model.

    FOLDER is the folder of a run of weft train, or a Hugging Face folder with a model and its tokenizer. Each
    line of the input produces one line of output; the translation of an empty line is empty. A line break in
    a translation is printed as \\n; --json prints the text unchanged.

        weft translate runs/fr news.en > news.fr
        weft translate runs/fr news.en --json --best 4 --ensemble runs/other --average 5
        weft translate runs/fr news.en --mesh "data=4 model=2" --layout "batch:data heads:model" -o news.fr
        echo "A cat." | weft translate runs/fr --beams 0

    With -o, lines go to OUT.part until all are done. Run the same command again to resume, on any mesh."""

    kind = "encoder_decoder"
