"""The decode curve of a rollout: the time of a decode step by its trajectories and cached tokens, from its own steps."""

from collections import deque
from statistics import median

import numpy as np

MIN_STEPS = 50
"""Steps from which on the curve is used."""

_NUM_RECENT = 9
"""Steps of which the median is taken."""
_OUTLIER = 10.0
"""A step that takes more than this many times that median is left out: it was compiled or stopped, or its batch is new."""


class DecodeCurve:
    """Least squares without negative terms: seconds = fixed + per_trajectory x trajectories + per_token x cached tokens."""

    def __init__(self) -> None:
        self._gram = np.zeros((3, 3))
        self._moments = np.zeros(3)
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._terms: tuple[float, float, float] | None = None
        """Those of the steps so far, once they were asked for: an idle rollout reports them again and again."""

    def add(self, num_running: int, kv_load: int, seconds: float) -> None:
        """Record one step that only decodes. The first ones only establish the usual time."""
        is_usual = len(self._recent) == _NUM_RECENT and seconds <= _OUTLIER * median(self._recent)
        self._recent.append(seconds)
        if not is_usual:
            return
        terms = np.array([1.0, num_running, kv_load])
        self._gram += np.outer(terms, terms)
        self._moments += seconds * terms
        self._terms = None

    def terms(self) -> tuple[float, float, float]:
        """Seconds of a step: fixed, for each trajectory, for each cached token. Zeros before `MIN_STEPS` steps."""
        if self._terms is None:
            self._terms = self._solve()
        return self._terms

    @property
    def fixed_tokens(self) -> float | None:
        """Cached tokens that cost as much time as the rest of a step of the mean batch; a small number means that packing gains little.

        The rest has the time for each trajectory in it, since batches that hardly vary do not tell it from the fixed part. None
        before `MIN_STEPS` steps, and where cached tokens cost no time that can be measured, as on small policies.
        """
        fixed, per_trajectory, per_token = self.terms()
        mean_batch = self._gram[0, 1] / max(self._gram[0, 0], 1.0)
        return float(fixed + per_trajectory * mean_batch) / per_token if per_token else None

    def _solve(self) -> tuple[float, float, float]:
        found = np.zeros(3)
        used = [0, 1, 2]
        if self._gram[0, 0] < MIN_STEPS:
            used = []
        scale = np.sqrt(np.maximum(np.diag(self._gram), 1e-30))  # the terms differ by orders of magnitude
        while used:
            part = np.ix_(used, used)
            scaled = self._gram[part] / np.outer(scale[used], scale[used])
            solved = np.linalg.lstsq(scaled, self._moments[used] / scale[used], rcond=1e-9)[0]
            if solved.min() >= 0:
                found[used] = solved / scale[used]
                break
            del used[int(solved.argmin())]
        fixed, per_trajectory, per_token = map(float, found)
        return fixed, per_trajectory, per_token
