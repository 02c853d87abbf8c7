"""Which rollout has a conversation in its prefix cache."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 32
"""Tokens of a block: beginnings are compared in whole blocks."""
MOST_BLOCKS = 1 << 17
"""Blocks that are remembered; the oldest are forgotten first."""
LEAST = 0.5
"""The part of a prompt that must be known for it to be the same conversation, and not a system prompt that many share."""


class PrefixHomes:
    """The rollout of each beginning of a conversation, as far as it is remembered. Used under a lock."""

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def note(self, token_ids: Sequence[int], home: str) -> None:
        """A rollout has computed these tokens."""
        for digest in _digests(token_ids):
            self._homes[digest] = home
            self._homes.move_to_end(digest)
        while len(self._homes) > MOST_BLOCKS:
            self._homes.popitem(last=False)

    def find(self, token_ids: Sequence[int]) -> str:
        """The rollout that has computed the longest beginning of these tokens, if that is most of them; else ""."""
        home = ""
        num_known = 0
        for digest in _digests(token_ids):
            found = self._homes.get(digest)
            if found is None:
                break
            home = found
            num_known += BLOCK
        return home if num_known >= LEAST * len(token_ids) else ""


def _digests(token_ids: Sequence[int]) -> Iterator[bytes]:
    """A digest of the tokens up to the end of each whole block."""
    running = hashlib.blake2b(digest_size=16)
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        running.update(array("q", token_ids[start : start + BLOCK]).tobytes())
        yield running.copy().digest()
