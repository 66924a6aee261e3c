"""From tokens that come a few at a time to text that can be shown at once, and ends at a stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.data.tokenizers import decode_continuation

REPLACEMENT = "\ufffd"  # what the first bytes of a character are read as
MAX_CHARACTER_BYTES = 4  # that a character has at most
MAX_PENDING_TOKENS = 24  # tokens after which an unfinished character is taken to stay so


class Detokenizer:
    """The text of one answer as it grows.

    Args:
      tokenizer: reads the tokens.
      ends: tokens that end an answer, and are not part of its text.
      stops: texts before which it ends.
      after: the last tokens of the text that it follows.

    Attributes:
      tokens, logs: of the answer, its end too.
      offsets: how long the text before each token is.
      text: what can be shown.
      stopped: whether a stop was found.

    >>> from weft.data import Bytes
    >>> reading = Reading(Bytes(), stops=["END"])
    >>> [reading.more(Bytes().encode(text)) for text in ("one E", "two EN", "D three")]
    ['one ', 'Etwo ', '']
    >>> reading.text, reading.stopped
    ('one Etwo ', True)
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Sequence[int] = (),
        stops: Sequence[str] = (),
        after: Sequence[int] = (),
    ):
        self.tokenizer, self.ends, self.stops = tokenizer, {tokenizer.end, *ends}, tuple(stops)
        self.after = after
        self.tokens: list[int] = []
        self.logs: list[float] = []
        self.offsets: list[int] = []
        self.text = ""
        self.stopped = False
        # All that was read, and how much of it more tokens can't change; the tokens of the rest, and those
        # that they are read after.
        self._whole, self._settled = "", 0
        self._open: list[int] = []
        self._before = after

    @property
    def ended(self) -> bool:
        """Whether the last token is one that ends an answer."""
        return bool(self.tokens) and self.tokens[-1] in self.ends

    def read(self, tokens: Sequence[int]) -> str:
        """The text of some tokens as part of an answer."""
        return decode_continuation(self.after, tokens, self.tokenizer)

    def more(self, tokens: Sequence[int], logs: Sequence[float] = (), over: bool = False) -> str:
        """What can be shown now that was not shown before.

        Args:
          tokens: the next ones.
          logs: the logarithms of their probabilities.
          over: whether they are the last ones: then nothing is held back.
        """
        before = self.text
        # One by one: how many tokens are counted must not depend on how many came at once.
        for n, token in enumerate(tokens):
            if self.stopped:
                break
            self.offsets.append(len(self._whole))
            self.tokens.append(token)
            self.logs += logs[n : n + 1]
            if not self.ended:
                self._read(token)
            self._show(False)
        if over and not self.stopped:
            self._show(True)
        return self.text[len(before) :]

    def _read(self, token: int) -> None:
        """Read one token more, with the few before it that it may change; an answer may have thousands."""
        self._open.append(token)
        text = decode_continuation(self._before, self._open, self.tokenizer)
        self._whole = self._whole[: self._settled] + text
        half, is_long = len(self._open) // 2, len(self._open) >= 2 * MAX_PENDING_TOKENS
        if half < 2 * MAX_CHARACTER_BYTES or (text.endswith(REPLACEMENT) and not is_long):
            return
        for at in range(half, half + MAX_CHARACTER_BYTES):  # one of these is between two characters
            first, last = self._open[:at], self._open[at:]
            # Behind nothing a tokenizer drops a space.
            before = first if self.tokenizer.decode(first) else self._before
            begun = decode_continuation(self._before, first, self.tokenizer)
            whole = begun + decode_continuation(before, last, self.tokenizer)
            if whole == text and (is_long or not begun.endswith(REPLACEMENT)):
                self._settled += len(begun)
                self._before, self._open = before, last
                return

    def _show(self, over: bool) -> None:
        text, shown = self._whole, len(self.text)  # in what was shown no stop begins
        found = [at for at in (text.find(stop, shown) for stop in self.stops) if at >= 0]
        if found:
            self.text, self.stopped = text[: min(found)], True
            return
        if not over:
            text = text.rstrip(REPLACEMENT)
            text = text[: len(text) - max((_begun(text, stop) for stop in self.stops), default=0)]
        if len(text) > len(self.text) or over:
            self.text = text


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
