"""The tokens that a rollout's policy has drawn, and what became of them: its part of the run's account of tokens."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..comm.messages import DrawnTokens
from .leased_row import LeasedRow

if TYPE_CHECKING:
    from .generators.base import Generator
    from .leases import HeldLeases
    from .migration.codec import MovedRow


class TokenAccount:
    """Counts the tokens of one incarnation of a rollout, from `begin` on, evaluations included.

    The generator counts what it draws (`num_sampled`). That number is compared with those of the trajectories, so that none is lost
    without notice. A generator of a user's may lack it: then what is known of the trajectories stands for it.
    """

    def __init__(self, generator: "Generator", leases: "HeldLeases", incarnation: int) -> None:
        self._generator = generator
        self._leases = leases
        self._incarnation = incarnation
        self._before = 0
        """Tokens drawn to measure the generator."""
        self._ended = 0
        """Tokens of the trajectories whose end was reported."""
        self._known = 0

    def begin(self) -> None:
        """Leave out what was drawn so far."""
        self._before = getattr(self._generator, "num_sampled", 0)

    def end(self, held: LeasedRow) -> None:
        """Count a trajectory whose end is reported next."""
        held.tokens_then = self.report(())
        self._ended += held.num_from_policy

    def report(self, moving: "Iterable[MovedRow]", *, is_whole: bool = False) -> DrawnTokens:
        """The tokens so far. moving: trajectories offered to other rollouts. is_whole: with those of unfinished trajectories."""
        unfinished = self._unfinished(moving) if is_whole else 0
        drawn = getattr(self._generator, "num_sampled", None)
        if drawn is None:
            drawn = self._known = max(self._known, self._ended + unfinished)
        return DrawnTokens(self._incarnation, drawn - self._before, self._ended, unfinished)

    def _unfinished(self, moving: "Iterable[MovedRow]") -> int:
        held = self._leases.held
        ended = sum(row.num_from_policy for row in held.values() if row.completion is not None)
        sent = sum(len(row.state.token_ids) - _inserted(row.held) for row in moving)
        parts = ((held.get(part.trajectory_id), part.num_response) for part in self._generator.unfinished())
        begun = sum(num - _inserted(row) for row, num in parts if row is not None and row.completion is None)
        return ended + sent + begun


def _inserted(row: LeasedRow) -> int:
    return 0 if row.episode is None else row.episode.num_inserted()
