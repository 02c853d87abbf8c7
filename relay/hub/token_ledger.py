"""What became of every token that the run has drawn: the reports of the rollouts beside the journal's account of ended trajectories.

After every step, and at the end, in tokens since the run was last started:

    generated + restored = trained + evaluated + filtered + failed + evicted + superseded + lost + ready + unfinished

*generated* is what the rollouts' generators counted; the ends of trajectories are the journal's (`TokenAccount` in
`relay/journal/records.py`). Tokens for HTTP requests are in no term; they are counted beside the account, as *served*. *superseded* trajectories ended after another rollout had got their lease. *lost* tokens were those of
unfinished trajectories: their rollout died, or they had to start again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...comm.messages import DrawnTokens, HeldRows, LoadReport, Message, RowDone, RowsStreamed, SampleScored
from ..journal import events as ev
from ..journal.records import RowStatus

if TYPE_CHECKING:
    from ..journal.hub_state import HubState
    from .context import HubContext

KINDS = ("restored", "trained", "evaluated", "filtered", "failed", "evicted", "superseded", "lost")
"""Terms of the account that are counted for each step, besides `generated`."""


@dataclass(slots=True)
class _Entry:
    """One incarnation of a rollout."""

    told: DrawnTokens = field(default_factory=DrawnTokens)
    """Its last report."""
    drawn: int = 0
    """Tokens that it has drawn, by its last message of any kind."""
    ended: int = 0
    """Tokens of the trajectories whose end this hub has heard of."""
    served: int = 0
    """Tokens for HTTP requests."""
    is_gone: bool = False

    @property
    def lost(self) -> int:
        """Drawn tokens of which nothing is left; below 0 where it ended trajectories that others had begun."""
        if self.is_gone:
            return self.drawn - self.ended
        return self.told.drawn - self.told.ended - self.told.unfinished


class TokenLedger:
    """The account of tokens, from the messages of rollouts and the state of the hub."""

    def __init__(self, state: "HubState") -> None:
        self._state = state
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._superseded = 0
        self._is_repeated = False
        """Whether the message in hand reports the end of a trajectory that is in the queue already."""
        self._recomputed: dict[str, dict[str, int]] = {}
        """Of each rollout since it started."""
        self._recomputed_before: dict[str, int] = {}
        """Of those that are gone."""
        for name, (drawn, ended) in state.tokens.gone.items():
            rollout, _, incarnation = name.partition("#")
            self._entries[rollout, int(incarnation)] = _Entry(drawn=drawn, ended=ended, is_gone=True)

    @property
    def is_new(self) -> bool:
        """Whether this hub has seen the run from its start."""
        return not self._state.hub_restarts

    def observe(self, sender: str, message: Message) -> None:
        """Note what a message of a rollout says of its tokens, before it is acted on."""
        self._is_repeated = False
        match message:
            case RowDone() | SampleScored() if self._state.has_attempt(message.row, message.attempt):
                self._is_repeated = True  # the hub before has heard it, too
            case RowDone() | SampleScored():
                entry = self._entry(sender, message.drawn)
                entry.ended += message.num_drawn
                if not message.drawn.drawn:  # a client of the project's rollout service does not count
                    entry.drawn += message.num_drawn
            case RowsStreamed() if message.drawn.drawn:
                self._entry(sender, message.drawn)
            case LoadReport() | HeldRows():
                entry = self._entry(sender, message.drawn)
                entry.told = message.drawn
                entry.is_gone = False
                if isinstance(message, LoadReport) and message.recomputed:
                    self._recomputed[sender] = message.recomputed
            case _:
                pass

    def settle(self, message: Message, ended_before: int) -> None:
        """Note what the hub did not accept of a message. ended_before: `tokens.ended` of the state before it acted on it."""
        if isinstance(message, RowDone | SampleScored) and not self._is_repeated:
            self._superseded += message.num_drawn - (self._state.tokens.ended - ended_before)

    def on_process_death(self, process: str, context: "HubContext") -> None:
        """The unfinished trajectories of a rollout are lost, but for what others may continue."""
        for reason, count in self._recomputed.pop(process, {}).items():
            self._recomputed_before[reason] = self._recomputed_before.get(reason, 0) + count
        for (rollout, incarnation), entry in self._entries.items():
            if rollout == process and not entry.is_gone:
                entry.is_gone = True
                name = f"{rollout}#{incarnation}"
                context.commit(ev.RolloutGone(holder=name, drawn=entry.drawn, ended=entry.ended))

    def at_step_end(self) -> dict[str, int]:
        """The terms of the account so far, where the groups that are handed out count as trained."""
        state = self._state
        groups = (state.groups[group_id] for group_id in state.in_training)
        handed = sum(group.rows[sample].num_drawn for group in groups for sample in group.samples(RowStatus.READY))
        out = self.totals()
        again = {f"recomputed/{reason}": count for reason, count in self.recomputed().items()}
        out |= {"trained": out["trained"] + handed, "ready": out["ready"] - handed, "served": self.served}
        return out | again

    @property
    def served(self) -> int:
        """Tokens that the rollouts have drawn for HTTP requests."""
        return sum(entry.served for entry in self._entries.values())

    def totals(self) -> dict[str, int]:
        """The terms of the account so far, by name."""
        tokens = self._state.tokens
        entries = self._entries.values()
        out = {
            "generated": sum(entry.drawn for entry in entries),
            "restored": tokens.restored + tokens.begun,
            "trained": tokens.trained,
            "evaluated": tokens.evaluated,
            "filtered": tokens.filtered,
            "failed": tokens.failed,
            "evicted": tokens.evicted,
            "superseded": self._superseded,
            "lost": tokens.lost + sum(entry.lost for entry in entries),
            "ready": tokens.ready,
        }
        unfinished = 2 * (out["generated"] + out["restored"]) - sum(out.values())
        # What another rollout has continued counts as lost until that one reports again.
        out["lost"] += min(unfinished, 0)
        out["unfinished"] = max(unfinished, 0)
        return out

    def account(self) -> dict[str, int | bool]:
        """The account at the end of the run, when each rollout has told what it leaves unfinished; whether it `holds`."""
        out: dict[str, int | bool] = {**self.totals()}
        told = sum(entry.told.unfinished for entry in self._entries.values() if not entry.is_gone)
        has_gone = any(entry.is_gone for entry in self._entries.values()) or self._state.num_moved > 0
        has_gone = has_gone or not self.is_new
        missing = out["unfinished"] - told
        out["unfinished"] = told
        if has_gone:
            out["lost"] += missing
            missing = 0
        out |= {"served": self.served} if self.served else {}
        return out | {"holds": missing == 0 and out["lost"] >= 0}

    def recomputed(self) -> dict[str, int]:
        """Tokens that the rollouts have prefilled again, by what dropped them from the cache."""
        out = dict(self._recomputed_before)
        for counts in self._recomputed.values():
            for reason, count in counts.items():
                out[reason] = out.get(reason, 0) + count
        return dict(sorted(out.items()))

    def _entry(self, sender: str, drawn: DrawnTokens) -> _Entry:
        key = (sender, drawn.incarnation)
        if key not in self._entries:
            # If this hub is not the first one, the hub before it has heard of the trajectories that had ended.
            self._entries[key] = _Entry(ended=drawn.ended if self._state.hub_restarts else 0)
        entry = self._entries[key]
        entry.drawn = max(entry.drawn, drawn.drawn)
        entry.served = max(entry.served, drawn.served)
        return entry


def step_metrics(now: Mapping[str, int], before: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    """`tokens/*` of a step from the totals at its end and at that of the step before; those of no tokens are left out."""
    yield "tokens/generated", float(now.get("generated", 0) - before.get("generated", 0))
    for kind in (*KINDS, "served", *(kind for kind in now if kind.startswith("recomputed/"))):
        if number := now.get(kind, 0) - before.get(kind, 0):
            yield f"tokens/{kind}", float(number)
    yield "tokens/ready", float(now.get("ready", 0))
    yield "tokens/unfinished", float(now.get("unfinished", 0))
