"""Malformed input: each reader refuses it with its one type of error, or accepts it, in bounded time and memory.

`--hypothesis-profile nightly` feeds each reader `INPUTS` of them, 50,000 without that variable.
"""

import logging
import resource
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.readers import Reader, all_readers

SLOW_S, MOST_MEGABYTES = 2.0, 64
"""Seconds of CPU time and growth of the process's peak memory from which on a reader of one small input hangs or is flooded."""
LEAST_REFUSED = 0.25
WORDS = (
    b"NaN", b"Infinity", b"-1e999", b"1e400", b"99999999999999999999", b"-1", b"null", b"true", b'""', b"[]", b"{}", b"[[[[[[[[",
    b"\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", "é".encode(), b"\\ud800", b"\n", b"__class__", b"../../x", b"\xdf\xff\xff\xff\xff",
)  # fmt: skip


@st.composite
def malformed(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One of the valid `seeds`, or none, after 1 to 4 changes as accidents and attackers make them; it may be valid by chance."""
    data = draw(st.sampled_from([*seeds, b""]))
    for _ in range(draw(st.integers(1, 4))):
        at, num, other = draw(st.integers(0, len(data))), draw(st.integers(1, 64)), draw(st.sampled_from(seeds))
        word, rest = draw(st.sampled_from(WORDS) | st.binary(max_size=64)), data[at:]
        changed = (
            bytes(byte ^ 1 << num % 8 for byte in rest[:1]) + rest[1:],
            word + rest,
            word + rest[len(word) :],
            word + rest[num:],
            rest[num:],
            rest[:num] * (1 + num % 3) + rest,
            other[draw(st.integers(0, len(other))) :],
            b"",
        )
        data = data[:at] + draw(st.sampled_from(changed))
    return data


def refuses(reader: Reader, data: bytes) -> bool:
    """Whether a reader refuses the data; fails for another error, and where it takes much time or memory."""
    started, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        reader.read(data)
        is_refused = False
    except reader.errors:
        is_refused = True
    assert time.thread_time() - started < SLOW_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEGABYTES << 10
    return is_refused


def share_refused(reader: Reader) -> float:
    """Feed malformed input to a reader; returns the share that it refuses."""
    verdicts: list[bool] = []

    @given(malformed(reader.seeds))
    def feed(data: bytes) -> None:
        verdicts.append(refuses(reader, data))

    feed()
    return sum(verdicts) / len(verdicts)


def test_malformed_input_is_accepted_or_refused_with_the_one_error_of_its_reader(subtests, tmp_path, caplog):
    caplog.set_level(logging.ERROR, "headrace")
    for reader in all_readers(tmp_path):
        with subtests.test(reader.name):
            assert share_refused(reader) > LEAST_REFUSED


def test_what_was_valid_is_accepted_by_its_reader(tmp_path):
    for reader in all_readers(tmp_path):
        for seed in reader.seeds:
            assert not refuses(reader, seed), reader.name


def test_an_error_of_another_type_escapes():
    with pytest.raises(UnicodeDecodeError):
        refuses(Reader("some", [b"x"], lambda data: data.decode(), (KeyError,)), b"\xff")
