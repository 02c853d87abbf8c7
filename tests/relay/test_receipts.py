"""Receipts: equal content has an equal one, and every change another one."""

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.relay.receipts import (
    KEY_FILE,
    Said,
    digests_used,
    note_digest,
    open_key,
    row_receipt,
    seal,
    tokens_digest,
)

KEY = b"k" * 32
SAID = Said("0f", 0, [3, 3, 4], {"3": "aa", "4": "bb"}, "hello", (), "stop", [-0.5, 0.0, -1e-7])


def test_the_key_is_made_once_and_is_the_owners_alone(tmp_path: Path):
    key = open_key(tmp_path)
    assert len(key) == 32 and open_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / KEY_FILE).parent.stat().st_mode) == 0o700
    assert [*(tmp_path / KEY_FILE).parent.iterdir()] == [tmp_path / KEY_FILE]


@pytest.mark.parametrize(
    "change",
    [
        {"id": "0e"}, {"sample": 1}, {"versions": [3, 4, 4]}, {"digests": {"3": "aa", "4": "bc"}}, {"text": "hallo"},
        {"reason": "length"}, {"logprobs": [-0.5, 0.0, -2e-7]}, {"logprobs": None},
        {"calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]},
    ],
    ids=str,
)  # fmt: skip
def test_each_field_of_a_response_is_sealed(change: dict[str, Any]):
    true = SAID.receipt(KEY, "p", "t")
    assert SAID.receipt(KEY, "p", "t") == true
    assert SAID._replace(**change).receipt(KEY, "p", "t") != true
    assert SAID.receipt(KEY, "q", "t") != true and SAID.receipt(b"other", "p", "t") != true


def test_other_programs_may_write_the_same_numbers_otherwise():
    told = {"reward": 1.0, "metrics": {"a": 0.25, "zero": -0.0}, "turns": 2}
    other = json.loads('{"turns": 2.0, "metrics": {"zero": 0, "a": 2.5e-1}, "reward": 1}')
    assert seal(KEY, told) == seal(KEY, other) != seal(KEY, {**told, "reward": 1.5})


def test_a_changed_column_has_another_receipt():
    row = {"tokens": np.array([1, 2, 3], np.int32), "reward": np.array([0.5], np.float32)}
    true = row_receipt(row)
    assert row_receipt({name: row[name].copy() for name in reversed(row)}) == true
    for name, column in row.items():
        changed = column.copy()
        changed[-1] += 1
        assert row_receipt({**row, name: changed}) != true
    assert row_receipt({**row, "tokens": row["tokens"].astype(np.int64)}) != true
    assert row_receipt({"tokens": row["tokens"]}) != true


def test_tokens_have_a_digest_of_their_order():
    assert tokens_digest([1, 2]) == tokens_digest(iter((1, 2))) != tokens_digest([2, 1])
    assert tokens_digest([]) != tokens_digest([0])


def test_a_version_with_two_weights_has_no_digest():
    digests: dict[int, str] = {}
    for version, digest in ((3, "aa"), (4, "bb"), (3, "aa"), (4, "cc"), (4, "bb")):
        note_digest(digests, version, digest)
    assert digests_used(digests, [4, 3, 5]) == {"3": "aa", "4": "", "5": ""}
