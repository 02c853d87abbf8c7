"""The text of each token of a row, so that all of them together are the row's text."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

_CUT = "\ufffd"
"""What a tokenizer puts in the place of bytes that are no whole character."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for one byte, as vocabularies with a fallback to bytes have them."""


class TokenTexts:
    """The texts of a tokenizer's tokens, special ones included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bool]] = {}
        """The text of each token that was decoded, and whether it may be a part of a character."""
        anchors = tokenizer.encode("a", add_special_tokens=False)
        self._anchor: list[int] = anchors[-1:]
        """A token before the one that is decoded: some tokenizers leave out a space at the beginning of a text."""
        self._before = self.whole(self._anchor)

    def whole(self, ids: Sequence[int]) -> str:
        """Tokens as text."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def spoken(self, ids: Sequence[int]) -> str:
        """Tokens as the text that an environment gets: without special ones."""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def each(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds. Of the tokens that share a character, the last one has it, and the others have none."""
        known = [self._of(token) for token in ids]
        texts: list[str] = []
        for is_part, run in groupby(range(len(ids)), key=lambda index: known[index][1]):
            places = [*run]
            own = [known[place][0] for place in places]
            if is_part and any(_CUT in text for text in own):
                own = [""] * (len(own) - 1) + [self._joined(ids[places[0] : places[-1] + 1])]
            texts += own
        return texts

    def _of(self, token: int) -> tuple[str, bool]:
        if (known := self._known.get(token)) is None:
            text = self._joined([token])
            is_part = _CUT in text or _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))) is not None
            known = self._known[token] = (text, is_part)
        return known

    def _joined(self, ids: Sequence[int]) -> str:
        return self.whole([*self._anchor, *ids]).removeprefix(self._before)
