"""Malformed input: bytes that were valid, changed as accidents and attackers change them."""

from collections.abc import Callable, Sequence
from random import Random

_WORDS = (
    b"NaN", b"Infinity", b"-1e999", b"1e400", b"99999999999999999999", b"-1", b"null", b"true", b'""', b"[]", b"{}", b"[[[[[[[[",
    b"\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", "é".encode(), b"\\ud800", b"\n", b"__class__", b"../../x", b"\xdf\xff\xff\xff\xff",
)  # fmt: skip
_MOST_CHANGES = 4
_LONGEST = 64


def _flip(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _replace(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = random.randrange(len(data))
    data[at : at + random.randrange(1, 9)] = random.randbytes(random.randrange(1, 9))


def _insert(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.choice(_WORDS)


def _overwrite(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at, word = random.randrange(len(data)), random.choice(_WORDS)
    data[at : at + len(word)] = word


def _cut(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    del data[random.randrange(len(data)) :]


def _remove(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = random.randrange(len(data))
    del data[at : at + random.randrange(1, _LONGEST)]


def _repeat(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = random.randrange(len(data))
    data[at:at] = data[at : at + random.randrange(1, _LONGEST)] * random.randrange(1, 4)


def _splice(data: bytearray, random: Random, seeds: Sequence[bytes]) -> None:
    other = random.choice(seeds)
    data[random.randrange(len(data)) :] = other[random.randrange(len(other) + 1) :]


_CHANGES: Sequence[Callable[[bytearray, Random, Sequence[bytes]], None]] = (
    _flip, _replace, _insert, _overwrite, _cut, _remove, _repeat, _splice,
)  # fmt: skip


def malformed(seeds: Sequence[bytes], random: Random) -> bytes:
    """One of the valid `seeds` after 1 to 4 changes, now and then random bytes; it may be valid by chance."""
    if random.random() < 0.02:
        return random.randbytes(random.randrange(_LONGEST))
    data = bytearray(random.choice(seeds))
    for _ in range(random.randrange(1, _MOST_CHANGES + 1)):
        if data:
            random.choice(_CHANGES)(data, random, seeds)
    return bytes(data)
