"""The text of each token of a row, so that all of them together are the row's text."""

from collections.abc import Sequence
from typing import Any

_CUT = "\ufffd"
"""What a tokenizer puts in the place of bytes that are no whole character."""


class TokenTexts:
    """The texts of a tokenizer's tokens, special ones included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        anchors = tokenizer.encode("a", add_special_tokens=False)
        self._anchor: list[int] = anchors[-1:]
        """A token before the one that is decoded: some tokenizers leave out a space at the beginning of a text."""
        self._before = self.whole(self._anchor)

    def whole(self, ids: Sequence[int]) -> str:
        """Tokens as text."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def each(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds. Of the tokens that share a character, the last one has it, and the others have none."""
        texts = [self._text(token) for token in ids]
        start = None
        for index, text in enumerate([*texts, ""]):
            if _CUT in text:
                start = index if start is None else start
            elif start is not None:
                texts[start:index] = [""] * (index - start - 1) + [self._joined(ids[start:index])]
                start = None
        return texts

    def _text(self, token: int) -> str:
        if (text := self._known.get(token)) is None:
            text = self._known[token] = self._joined([token])
        return text

    def _joined(self, ids: Sequence[int]) -> str:
        return self.whole([*self._anchor, *ids]).removeprefix(self._before)
