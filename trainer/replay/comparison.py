"""A step that was trained again beside the step that was recorded, and beside other losses, as lines of text."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

COMPARED = ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "is/mean")
"""The metrics that must be equal bit for bit on the machine of the run."""
_JUDGED = ("actor/pg_loss", "actor/grad_norm")
"""Those that must be nearly equal on another machine."""


class Figures(NamedTuple):
    """A step by one loss; NaN where there is nothing to divide by.

    grad_norm: of the gradient before it is clipped, as `actor/grad_norm`. ess: effective sample size of the importance weights w, as
    a share: (sum w)^2 / (n sum w^2) over the n tokens with loss whose advantage is not 0, where w is what a token's gradient has of
    A grad(log p): the weight of its correction times the ratio of its loss, and 0 where the clip stops it; the other terms of the loss
    (`pull_to_generator`, entropy, KL, routers) are left out. clipped: share of the tokens with loss whose ratio is bounded by the clip.
    limited: share whose importance weight is truncated or masked. cosine: of the gradient to that of the run. With several updates,
    norm and cosine are means over them, the cosine over those where both gradients are not zero.
    """

    grad_norm: float
    ess: float
    clipped: float
    limited: float
    cosine: float


class Difference(NamedTuple):
    """The differences between two times that a step was trained, in words, and whether they are more than rounding."""

    text: str
    is_real: bool


def difference(recorded: Mapping[str, Any], found: Mapping[str, Any], tolerance: float = 0.0) -> Difference:
    """The differences in `COMPARED`; real are all without a tolerance.

    tolerance: bound of the difference of loss and gradient norm, relative to the larger number; of the loss also absolute, since it is
    a mean of terms of both signs that may cancel.
    """
    changed = [name for name in COMPARED if repr(recorded[name]) != repr(found[name])]  # NaN is NaN
    if not changed:
        return Difference("the same", is_real=False)
    text = "; ".join(f"{name} {recorded[name]!r} -> {found[name]!r}" for name in changed)
    far = [name for name in _JUDGED if name in changed and not _is_close(name, recorded[name], found[name], tolerance)]
    if far or not tolerance:
        return Difference(text, is_real=True)
    return Difference(f"within the tolerance of {tolerance:g}: {text}", is_real=False)


def _is_close(name: str, one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance if name == "actor/pg_loss" else 0.0)


def figure_lines(figures: Sequence[Figures]) -> Iterator[str]:
    """The figures of a step side by side, those by the run's loss first; a figure without a value is `-`."""
    if figures:
        yield f"           {'':10}  {'grad norm':>10}  {'ESS':>7}  {'clipped':>8}  {'at bound':>8}  {'cosine':>9}"
    for number, row in enumerate(figures):
        name = f"variant {number}" if number else "the run"
        shown = (
            f"{row.grad_norm:10.4g}", f"{row.ess:7.2%}", f"{row.clipped:8.2%}", f"{row.limited:8.2%}", f"{row.cosine:+9.6f}",
        )  # fmt: skip
        columns = [f"{'-':>{len(text)}}" if math.isnan(value) else text for text, value in zip(shown, row, strict=True)]
        yield f"           {name:10}  {'  '.join(columns)}"
