"""How the ranks of a tensor-parallel replica share one tensor. The policy, the layout of the weights and the rollouts use it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """Equal slices along `dim` (0 rows, 1 columns).

    Where several tensors are fused by rows, `blocks` are their numbers of rows, and each is sliced by itself.
    """

    dim: int
    blocks: tuple[int, ...] = ()

    def slice_for_rank(
        self, shape: tuple[int, ...], rank: int, tp: int
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, int] | None]:
        """Rows and columns of one rank's slice; columns None for all."""
        if self.dim == 1:
            return ((0, shape[0]),), _slice_bounds(0, shape[1], rank, tp)
        starts = [sum(self.blocks[:i]) for i in range(len(self.blocks))] or [0]
        sizes = self.blocks or (shape[0],)
        return tuple(_slice_bounds(start, size, rank, tp) for start, size in zip(starts, sizes, strict=True)), None


def _slice_bounds(start: int, size: int, rank: int, tp: int) -> tuple[int, int]:
    assert size % tp == 0, f"{size} does not divide by {tp} ranks"
    return start + rank * size // tp, start + (rank + 1) * size // tp
