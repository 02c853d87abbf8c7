"""Sums and maxima that stay on a device are those of the numbers under their masks."""

import math

import pytest
import torch

from headrace.trainer.policy.device import DeviceSums, finish_work, to_device


def test_sums_are_in_float64_over_all_that_was_added():
    sums = DeviceSums()
    for _ in range(1000):
        sums.add(loss=torch.tensor(0.1), weight=torch.tensor(1 << 24))
    found, _ = sums.read()
    assert found["loss"] == pytest.approx(1000 * float(torch.tensor(0.1)), rel=1e-12)
    assert found["weight"] == 1000 * (1 << 24)


def test_a_number_counts_where_its_mask_is_set_and_need_not_be_finite_elsewhere():
    sums = DeviceSums()
    numbers, mask = torch.tensor([1.0, math.nan, -3.0, math.inf]), torch.tensor([True, False, True, False])
    for _ in range(2):
        sums.add_by_token(a=(numbers, mask), b=(torch.ones(4), ~mask))
        sums.raise_by_token(largest=(numbers, mask))
    assert sums.read() == ({"a": -4.0, "b": 4.0}, {"largest": 1.0})
    assert sums.read() == ({}, {}), "read once"


def test_a_number_that_is_none_hides_no_maximum():
    sums = DeviceSums()
    mask = torch.ones(2, dtype=torch.bool)
    for numbers in ([1.0, 3.0], [math.nan, 2.0], [math.nan, math.nan]):
        sums.raise_by_token(finite=(torch.tensor(numbers), mask), infinite=(torch.tensor([math.inf, numbers[0]]), mask))
    assert sums.read() == ({}, {"finite": 3.0, "infinite": math.inf})


def test_work_that_a_gpu_has_queued_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        finish_work(device)
    assert waited == [torch.device("cuda", 1)]


def test_a_tensor_stays_on_its_host_where_there_is_no_gpu():
    tensor = torch.arange(3)
    assert to_device(tensor, "cpu").data_ptr() == tensor.data_ptr()
