"""Feeds malformed input to every decoder: it is accepted, or refused with the reader's one type of error."""

import logging
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from ...processes.child import print_message
from ..harness import Measurement, Options
from .decoders import Decoder, all_decoders
from .mutations import malformed

_SLOW_S = 2.0
"""A reader that computes longer for one input, in seconds, hangs; the time that other processes take does not count."""
_SHOWN = 5


def fuzz(name: str, options: Options) -> list[Measurement]:
    """A row for each decoder: inputs, the share that is refused, and whether another error or a slow input escaped."""
    logging.getLogger("headrace").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as folder:
        decoders = all_decoders(Path(folder))
        count = -(-options.inputs // len(decoders))
        return [
            _row(f"{name}-{decoder.name}", decoder, count, Random(f"{options.seed} {decoder.name}"))
            for decoder in decoders
        ]


def _row(name: str, decoder: Decoder, count: int, random: Random) -> Measurement:
    num_refused, escaped = feed(decoder, count, random)
    for where, times in escaped.most_common(_SHOWN):
        print_message(f"{name}: {times} x {where}")
    return Measurement(name, "all inputs: refused", count, "inputs", num_refused / count, holds=not escaped)


def feed(decoder: Decoder, count: int, random: Random) -> tuple[int, Counter[str]]:
    """Feed so many malformed inputs; returns how many were refused, and what escaped with the place in the code."""
    num_refused, escaped = 0, Counter[str]()
    for _ in range(count):
        data = malformed(decoder.seeds, random)
        started = time.thread_time()
        try:
            decoder.read(data)
        except decoder.errors:
            num_refused += 1
        except Exception as error:  # noqa: BLE001 - any other error is the find
            last = traceback.extract_tb(error.__traceback__)[-1]
            escaped[f"{type(error).__name__} at {last.filename}:{last.lineno}, first by {data[:80]!r}"] += 1
        if time.thread_time() - started > _SLOW_S:
            escaped[f"more than {_SLOW_S:g} s, first by {data[:80]!r}"] += 1
    return num_refused, _by_place(escaped)


def _by_place(escaped: Counter[str]) -> Counter[str]:
    """One entry for each error and place, with the first input that caused it."""
    first: dict[str, str] = {}
    merged = Counter[str]()
    for text, times in escaped.items():
        merged[first.setdefault(text.partition(", first by ")[0], text)] += times
    return merged
