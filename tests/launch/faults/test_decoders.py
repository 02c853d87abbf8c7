"""Malformed input: each reader refuses it with its one type of error, or accepts it."""

from collections import Counter
from random import Random

import pytest

from headrace.launch.bench.faults.decoders import Decoder, all_decoders
from headrace.launch.bench.faults.fuzz import feed
from headrace.launch.bench.faults.mutations import malformed


def test_no_malformed_input_escapes_from_a_reader(tmp_path):
    for decoder in all_decoders(tmp_path):
        num_refused, escaped = feed(decoder, 400, Random(f"test {decoder.name}"))
        assert not escaped, (decoder.name, escaped)
        assert num_refused > 100, f"{decoder.name} accepts most of what is malformed"


def test_what_was_valid_is_accepted_by_its_reader(tmp_path):
    for decoder in all_decoders(tmp_path):
        for seed in decoder.seeds if decoder.name != "version-frames" else decoder.seeds[:1]:
            decoder.read(seed)


def test_an_error_of_another_type_is_found_with_its_place_and_its_input():
    def read(data: bytes) -> object:
        if b"x" not in data:
            raise IndexError
        raise ValueError

    num_refused, escaped = feed(Decoder("some", [b"xxxx"], read, (ValueError,)), 200, Random(1))
    ((text, times),) = escaped.items()
    assert "IndexError at " in text and "test_decoders.py" in text
    assert num_refused + times == 200


def test_malformed_inputs_repeat_with_their_seed_and_differ_from_the_valid_ones():
    seeds = [b'{"a": 1}', b"other"]
    first, again = ([malformed(seeds, random) for _ in range(100)] for random in (Random(3), Random(3)))
    assert first == again
    assert Counter(data in seeds for data in first)[True] < 10


@pytest.mark.slow
def test_malformed_inputs_in_great_numbers(tmp_path):
    for decoder in all_decoders(tmp_path):
        assert not feed(decoder, 5000, Random(f"many {decoder.name}"))[1], decoder.name
