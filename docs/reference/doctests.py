"""Examples in docstrings as blocks of code: the site's reader of docstrings (griffe) takes them for quotations."""

import griffe


class Fenced(griffe.Extension):
    """Puts a fence around each paragraph that begins with `>>>`, whatever its indent."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(fenced, paragraphs))


def fenced(paragraph: str) -> str:
    indent = paragraph[: len(paragraph) - len(paragraph.lstrip())].lstrip("\n")
    if not paragraph.lstrip().startswith(">>>"):
        return paragraph
    return f"{indent}```pycon\n{paragraph.strip(chr(10))}\n{indent}```"
