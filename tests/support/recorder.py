"""A journal of made-up steps, and the state after its last event."""

from pathlib import Path

from headrace.comm.messages import GroupId
from headrace.relay.journal import events as ev
from headrace.relay.journal.hub_state import HubState
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.state import apply

SAMPLES = 2


class Recorder:
    """A journal, its snapshots, and the fold of its events."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path)
        self.state = HubState()
        self.commit(ev.Opened(epoch=1, samples_per_prompt=SAMPLES))

    def commit(self, event: ev.Event) -> None:
        self.journal.append(event)
        apply(event, self.state)
        if self.journal.needs_snapshot(event):
            self.journal.keep(self.state)

    def train_step(self, fails: bool = False) -> None:
        group, step = GroupId(0, self.state.cursor), self.state.step
        self.commit(ev.Leased(group=group, samples=[0, 1], attempt=1, version=step, holder="rollout-0"))
        row = group.row(0)
        for sample in range(SAMPLES):
            row = group.row(sample)  # the last one never fails
            if fails and sample == 0:
                self.commit(ev.RowFailed(row=row, reason="the verifier hung"))
            else:
                self.commit(ev.RowReady(row=row, units=["relay-0"], version=step, num_tokens=9, reward=0.5))
        number = step + 1
        self.commit(ev.TaskHanded(task="reference", number=number, consumer="reference-0", rows=[row], attempts=[1]))
        self.commit(
            ev.ColumnsReady(task="reference", number=number, columns=["ref_logprobs"], rows=[row], units=[["relay-0"]])
        )
        self.commit(ev.Handed(step=step, groups=[group]))
        self.commit(ev.Trained(step=step))
