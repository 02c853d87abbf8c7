"""Counterfactual replay: the gradients of other losses on the weights and the rows of a step that is trained again.

Before each update of a step, the actor has the run's gradient. Each variant then computes its own from the same micro-batches and the
same weights, and the run's gradient is applied. So a variant costs a forward and a backward pass, and memory for one more gradient.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...comm.recipe import AlgorithmSettings, Recipe
from ...relay.queue.batch import Batch
from ...relay.weights.layout import local_tensor
from ..actor_group import ActorGroup
from ..algorithms.advantages import open_estimator
from ..algorithms.objective import LossTerms, token_losses
from ..batch import PackedBatch, Trajectory, TrajectoryBatch, trainable
from ..learners.actor import Actor
from ..learners.advantages import add_advantages
from ..step_metrics import StepMetrics
from .comparison import Figures

_PIECE = 1 << 22
"""Elements of a gradient that are in float64 at one time."""
_SUMS: tuple[str, ...] = ("tokens", "clipped", "limited", "pushing", "weight", "weight_squared")


class Tally:
    """Sums over the micro-batches of a step by one loss, and its gradients' norms and cosines."""

    def __init__(self, algorithm: AlgorithmSettings) -> None:
        self.algorithm = algorithm
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._norms: list[float] = []
        self._cosines: list[float] = []

    def add(self, batch: PackedBatch, logprobs: Tensor, terms: LossTerms) -> None:
        """Add a micro-batch: log-probs [R] of the policy in training, without gradient, and its loss."""
        mask = batch.mask > 0
        pushes = mask & (batch.advantages != 0)
        weights = self._weights(batch, logprobs)[pushes]
        figures = {
            "tokens": mask.sum(), "clipped": terms.clipped, "limited": terms.limited + terms.limited_fresh,
            "pushing": pushes.sum(), "weight": weights.sum(), "weight_squared": weights.square().sum(),
        }  # fmt: skip
        for name, figure in figures.items():
            self._sums[name] += float(figure)

    def add_gradient(self, norm: float, cosine: float | None) -> None:
        """Add the gradient of an update; it has no cosine if it or the run's is zero."""
        self._norms.append(norm)
        self._cosines += [] if cosine is None else [cosine]

    def figures(self, group: ActorGroup) -> Figures:
        """The step's figures over all ranks; a collective."""
        sums = dict(zip(_SUMS, group.all_reduce_sum(list(self._sums.values())), strict=True))
        return Figures(
            grad_norm=_ratio(sum(self._norms), len(self._norms)),
            ess=_ratio(sums["weight"] ** 2, sums["pushing"] * sums["weight_squared"]),
            clipped=_ratio(sums["clipped"], sums["tokens"]),
            limited=_ratio(sums["limited"], sums["tokens"]),
            cosine=_ratio(sum(self._cosines), len(self._cosines)),
        )

    def _weights(self, batch: PackedBatch, logprobs: Tensor) -> Tensor:
        """[R] float64: the derivative of each token's loss by its log-prob, divided by -A; without meaning where A is 0."""
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            losses = token_losses(leaf, batch, self.algorithm).loss
            (derivative,) = torch.autograd.grad(losses.sum(), leaf)
        return -derivative.double() / batch.advantages.double()


class TalliedMetrics(StepMetrics):
    """Metrics of a step whose micro-batches are also added to a tally."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def add_batch(self, batch: PackedBatch, logprobs: Tensor, terms: LossTerms) -> None:
        super().add_batch(batch, logprobs, terms)
        self._tally.add(batch, logprobs, terms)


class CounterfactualActor(Actor):
    """An actor that also computes the gradients of variants, which differ from the recipe in `algorithm`."""

    def __init__(self, recipe: Recipe, group: ActorGroup, variants: Sequence[AlgorithmSettings]) -> None:
        super().__init__(recipe, group)
        algorithms = (recipe.algorithm, *variants)
        self._keeps_proximal = self._num_updates > 1 and any(each.proximal == "version" for each in algorithms)
        self._variants: list[tuple[dict[str, Trajectory], Tally]] = []
        """The rows of the step by key, with their advantages, and the tally, of each variant."""
        self._since_update: list[TrajectoryBatch] = []

    def begin(self, batches: Sequence[Batch], variants: Sequence[AlgorithmSettings]) -> None:
        """Prepare a step of these batches for its variants; a collective. Their advantages may need the whole step."""
        values: dict[str, np.ndarray] = {}
        if self.critic is not None and variants:
            for batch in batches:
                keys = [row.key for row in batch.rows]
                values |= dict(zip(keys, self.critic.values(batch), strict=True))
        self._variants = []
        for algorithm in variants:
            taken = [trainable(batch, mask_truncated=algorithm.mask_truncated)[0] for batch in batches]
            rows = {key: row for part in taken for key, row in part.by_key.items()}
            for key, row in rows.items():
                row.values = values.get(key)
            is_whole = open_estimator(algorithm).needs_whole_step
            for part in [taken] if is_whole else [[each] for each in taken]:
                add_advantages(part, algorithm, self.recipe.sampling.max_new_tokens, self.group)
            self._variants.append((rows, Tally(algorithm)))

    def figures(self) -> list[Figures]:
        """The figures of each variant of the step; a collective."""
        return [tally.figures(self.group) for _, tally in self._variants]

    def _train(self, batches: Sequence[TrajectoryBatch], stats: StepMetrics) -> None:
        for batch in batches:  # an update follows at the end of a batch
            self._since_update.append(batch)
            super()._train([batch], stats)

    def _update(self) -> None:
        if not self.is_frozen and self._variants:
            self._compare()
        self._since_update = []
        super()._update()

    def _compare(self) -> None:
        """Compute the gradient of each variant; the run's is there before and afterwards."""
        self.sum_gradients()
        own = self.updater.take()
        for rows, tally in self._variants:
            weight = self._add_gradients(rows, tally)
            self.sum_gradients()
            (weight,) = self.group.all_reduce_sum([weight])
            found = self.updater.take()
            products = [_inner_product(*pair) for pair in ((own, found), (own, own), (found, found))]
            product, own_square, square = self.group.all_reduce_sum(products)
            self.updater.put(found)
            norm = self.updater.norm(self.group.size / max(weight, 1.0))
            self.updater.discard()
            root = math.sqrt(own_square * square)  # of equal gradients the product itself, so their cosine is exactly 1
            tally.add_gradient(norm, product / root if root else None)
        self.updater.put(own)

    def _add_gradients(self, rows: dict[str, Trajectory], tally: Tally) -> float:
        """Accumulate a variant's gradient over the micro-batches since the last update; returns this rank's part of the divisor."""
        weight = 0.0
        for batch in self._since_update:
            for part in batch.batch.micro_batches:
                for ref in part:
                    rows[ref.key].proximal_logprobs = batch.by_key[ref.key].proximal_logprobs
                packed = self.pack(batch.batch, [rows[ref.key] for ref in part], is_updated=bool(self.updates))
                logprobs, terms, _ = self._forward(packed, tally.algorithm)
                self.add_gradient(terms.loss)
                weight += float(terms.weight)
                tally.add(packed, logprobs.detach(), terms)
        return weight


def _inner_product(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """The inner product of two gradients in float64, over this rank's shards; one that is not there is 0."""
    found = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one is not None and other is not None:
            pieces = zip(*(local_tensor(each).flatten().split(_PIECE) for each in (one, other)), strict=True)
            found += sum(float(torch.dot(a.double(), b.double())) for a, b in pieces)
    return found


def _ratio(number: float, divisor: float) -> float:
    return number / divisor if divisor else math.nan
