"""`weft generate`: complete prompts line by line with a language model."""

from __future__ import annotations

from dataclasses import dataclass

from .generation import GenerationCommand


@dataclass
class GenerateCommand(GenerationCommand):
    """Complete prompts line by line with a trained language model.

    FOLDER is the folder of a run of weft train, or a Hugging Face folder with a model and its tokenizer. Each
    line of the input is a prompt, even an empty one, and produces one line of output: the completion, without
    the prompt. A line break in a completion is printed as \\n; --json prints the text unchanged.

        weft generate runs/lm prompts.txt > completions.txt
        echo "To be" | weft generate runs/lm --temperature 0.8 --top-p 0.95 --seed 3
        weft generate runs/lm prompts.txt -o completions.jsonl --json --beams 4 --best 4

    With -o, lines go to OUT.part until all are done. Run the same command again to resume, on any mesh."""

    kind = "decoder"
