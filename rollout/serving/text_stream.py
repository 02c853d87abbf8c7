"""The text of a response as far as it is certain, while its tokens still come."""

import re
from collections.abc import Sequence
from typing import Any

_CUT = "\ufffd"
"""What a tokenizer writes for a character whose bytes have not all come."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token of one byte. Bytes in a row are decoded together: if they are not characters, none of them is."""


class TextStream:
    """Turns the tokens of one response into pieces of text, which together are the text of the whole response.

    A piece is held back while it may be the beginning of a mark: of a stop string, which is not part of the text, or of a tool call.
    Only the newest tokens are decoded, together with those of the piece before them, on which spaces may depend.
    """

    def __init__(self, tokenizer: Any, marks: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._token_ids: list[int] = []
        self._start = 0
        self._read = 0
        self._text = ""
        self._num_sent = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Take tokens; returns the next piece, which may be empty."""
        self._token_ids += token_ids
        before = self._decode(self._token_ids[self._start : self._read])
        now = self._decode(self._token_ids[self._start :])
        if len(now) > len(before) and not now.endswith(_CUT) and not self._ends_with_byte():
            self._text += now[len(before) :]
            self._start = self._read
            self._read = len(self._token_ids)
        certain = self._certain()
        piece = self._text[self._num_sent : certain]
        self._num_sent = max(self._num_sent, certain)
        return piece

    def rest(self, text: str) -> str:
        """The last piece. text: the whole response's, up to a stop string or the first tool call."""
        return text[self._num_sent :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _ends_with_byte(self) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(self._token_ids[-1])
        return token is not None and _BYTE.fullmatch(token) is not None

    def _certain(self) -> int:
        """Characters of the text before a mark, or before what may become one."""
        found = [place for mark in self._marks if (place := self._text.find(mark, self._num_sent)) >= 0]
        if found:
            return min(found)
        longest = max(map(len, self._marks), default=0)
        for start in range(max(self._num_sent, len(self._text) - longest + 1), len(self._text)):
            if any(mark.startswith(self._text[start:]) for mark in self._marks):
                return start
        return len(self._text)
