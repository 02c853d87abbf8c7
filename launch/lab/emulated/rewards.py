"""Rewards of emulated trajectories, which have no text."""

from ....rollout.leased_row import LeasedRow


class EmulatedRewards:
    """Rewards 0 or 1, a function of the trajectory's number."""

    backlog = 0

    def __init__(self) -> None:
        self.done: list[LeasedRow] = []
        """The rows that `finished` has not returned yet."""

    def submit(self, *rows: LeasedRow) -> None:
        for row in rows:
            row.reward = float(row.row_id.number * 0x9E3779B97F4A7C15 >> 40 & 1)
        self.done += rows

    def finished(self) -> list[LeasedRow]:
        done = self.done
        self.done = []
        return done

    def close(self) -> None:
        pass
