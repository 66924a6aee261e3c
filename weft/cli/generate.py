"""`weft generate`: prompts in, what a language model goes on with out, line by line."""

from __future__ import annotations

from dataclasses import dataclass

from .generation import GenerationCommand


@dataclass
class GenerateCommand(GenerationCommand):
    """Go on with texts, line by line, with a trained language model.

    FOLDER is that of a run of weft train, or one of Hugging Face with a model and its tokenizer.
    Each line of the input is a prompt, also an empty one. It gives one line of output: what comes after the
    prompt, without it. Where that has an end of line, \\n stands for it; --json gives it as it is.

        weft generate runs/lm prompts.txt > said.txt
        echo "To be" | weft generate runs/lm --temperature 0.8 --top-p 0.95 --seed 3
        weft generate runs/lm prompts.txt -o said.jsonl --json --beams 4 --best 4

    With -o the lines go to OUT.part until all are there. Run the same command again to resume, on any
    mesh."""

    kind = "decoder"
