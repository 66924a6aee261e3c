"""Incremental detokenization: from tokens that arrive a few at a time to text, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from weft.data import Tokenizer
from weft.data.tokenizers import decode_continuation

REPLACEMENT = "\ufffd"  # the decoded form of an incomplete character
MAX_CHARACTER_BYTES = 4  # of UTF-8
MAX_PENDING_TOKENS = 24  # after these an incomplete character is assumed to stay incomplete


class Detokenizer:
    """The text of one completion as it grows.

    Args:
      tokenizer: decodes the tokens.
      ends: tokens that end a completion and are not part of its text.
      stops: texts before which it ends.
      after: the last tokens of the text that it continues.

    Attributes:
      tokens, logprobs: those of the completion, including its end token.
      offsets: the length of the text before each token.
      text: the text that can be shown.
      stopped: True if a stop text was found.

    >>> from weft.data import ByteTokenizer
    >>> detokenizer = Detokenizer(ByteTokenizer(), stops=["END"])
    >>> [detokenizer.add(ByteTokenizer().encode(text)) for text in ("one E", "two EN", "D three")]
    ['one ', 'Etwo ', '']
    >>> detokenizer.text, detokenizer.stopped
    ('one Etwo ', True)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: Sequence[int] = (),
        stops: Sequence[str] = (),
        after: Sequence[int] = (),
    ):
        self.tokenizer, self.ends, self.stops = tokenizer, {tokenizer.end, *ends}, tuple(stops)
        self.after = after
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.offsets: list[int] = []
        self.text = ""
        self.stopped = False
        # All decoded text; how much of it is final, that is, can't be changed by more tokens; the tokens of
        # the rest; and the tokens that these are decoded after.
        self._decoded, self._final = "", 0
        self._pending: list[int] = []
        self._context = after

    @property
    def ended(self) -> bool:
        """Whether the last token is an end token."""
        return bool(self.tokens) and self.tokens[-1] in self.ends

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens as part of a completion."""
        return decode_continuation(self.after, tokens, self.tokenizer)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] = (), finished: bool = False) -> str:
        """Add tokens and return the text that can be shown in addition.

        Args:
          tokens: the next tokens.
          logprobs: their log-probabilities.
          finished: True if they are the last: no text is held back then.
        """
        before = self.text
        # One by one: the number of tokens before a stop must not depend on how many arrive at once.
        for n, token in enumerate(tokens):
            if self.stopped:
                break
            self.offsets.append(len(self._decoded))
            self.tokens.append(token)
            self.logprobs += logprobs[n : n + 1]
            if not self.ended:
                self._append(token)
            self._update_text(False)
        if finished and not self.stopped:
            self._update_text(True)
        return self.text[len(before) :]

    def _append(self, token: int) -> None:
        """Decode one more token.

        Decoding all tokens each time would be quadratic, and decoding one alone would be wrong: a character
        may span tokens, and SentencePiece drops a leading space. So only the pending tokens are decoded, and
        once there are enough of them, a first part becomes final where that doesn't change the text.
        """
        self._pending.append(token)
        text = decode_continuation(self._context, self._pending, self.tokenizer)
        self._decoded = self._decoded[: self._final] + text
        half, is_long = len(self._pending) // 2, len(self._pending) >= 2 * MAX_PENDING_TOKENS
        if half < 2 * MAX_CHARACTER_BYTES or (text.endswith(REPLACEMENT) and not is_long):
            return
        for at in range(half, half + MAX_CHARACTER_BYTES):  # one of these is between two characters
            first, rest = self._pending[:at], self._pending[at:]
            # A tokenizer drops the leading space of `rest` if `first` decodes to nothing: keep the context.
            context = first if self.tokenizer.decode(first) else self._context
            prefix = decode_continuation(self._context, first, self.tokenizer)
            joined = prefix + decode_continuation(context, rest, self.tokenizer)
            if joined == text and (is_long or not prefix.endswith(REPLACEMENT)):
                self._final += len(prefix)
                self._context, self._pending = context, rest
                return

    def _update_text(self, finished: bool) -> None:
        text, shown = self._decoded, len(self.text)  # no stop begins in text that was shown
        found = [at for at in (text.find(stop, shown) for stop in self.stops) if at >= 0]
        if found:
            self.text, self.stopped = text[: min(found)], True
            return
        if not finished:
            text = text.rstrip(REPLACEMENT)
            text = text[: len(text) - max((_partial_stop(text, stop) for stop in self.stops), default=0)]
        if len(text) > len(self.text) or finished:
            self.text = text


def _partial_stop(text: str, stop: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a stop text."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
