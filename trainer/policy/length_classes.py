"""Classes of sequences of about equal length, to be padded into one batch."""

from collections.abc import Sequence


def length_classes(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` by class, the longest first in each; a class pads by at most an eighth of its longest, or 8 tokens."""
    classes: list[list[int]] = []
    shortest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not classes or lengths[index] < shortest:
            classes.append([])
            shortest = lengths[index] - max(8, lengths[index] // 8)
        classes[-1].append(index)
    return classes
