"""The weights at the start of a version, for the proximal log-probs of rows that arrive after its first update."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..policy.model import Policy


class StartWeights:
    """A copy of this rank's share of the trained weights, from the first update of a version until its last rows have arrived."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the present weights."""
        self._copies = [weight.clone() for weight in self._weights()]

    def drop(self) -> None:
        """Free the copy."""
        self._copies = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The policy with the weights that were kept; afterwards with those that it had before."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, copy in zip(self._weights(), self._copies, strict=True):
            present = weight.clone()
            weight.copy_(copy)
            copy.copy_(present)

    def _weights(self) -> list[Tensor]:
        trained = [parameter for parameter in self._policy.parameters() if parameter.requires_grad]
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in trained]
