"""The console's lines about the start of a run: one for each thing that happens for the first time."""

from collections.abc import Collection

from ...comm.disk import tell
from ...comm.mailbox import Envelope
from ...comm.messages import LoadReport, RowDone, VersionReady, WeightsPulled
from ...comm.messages.base import process_of
from ..journal.hub_state import HubState

_LINES = ("joined", "version", "weights", "prompts", "tokens", "response", "reward", "update")
_MOST_NAMES = 4


class StartLines:
    """Prints each line once; `is_told` if a hub before this one has printed them."""

    def __init__(self, expected: Collection[str], *, is_told: bool) -> None:
        self._missing = {*expected}
        self._told = {*_LINES} if is_told else set[str]()

    def joined(self, names: Collection[str]) -> None:
        """Look at the members that have joined."""
        if "joined" in self._told or not self._missing:
            return
        self._missing -= {*names}
        if not self._missing:
            self._tell("joined", "all processes have joined; the policy is loading")

    def look(self, envelope: Envelope, state: HubState) -> None:
        """Look at a message that the hub has handled."""
        if "update" in self._told:
            return
        sender = process_of(envelope.sender)
        match envelope.message:
            case VersionReady(version=version):
                self._tell("version", f"{sender} has the weights of version {version}, the first for the rollouts")
            case WeightsPulled(version=version):
                self._tell("weights", f"{sender} has taken version {version}")
            case LoadReport(num_scoring=num_scoring, tokens=tokens):
                if tokens:
                    self._tell("tokens", f"first tokens, by {sender}")
                if num_scoring:
                    self._tell("response", f"first response, by {sender}; its reward is being computed")
            case RowDone(reward=float(reward), num_tokens=num_tokens):
                what = "reward" if "response" in self._told else "response and reward"
                self._told |= {"tokens", "response"}
                self._tell("reward", f"first {what}, by {sender}: {reward:.3f} for {num_tokens} tokens")
            case _:
                pass
        if state.held:
            self._tell("prompts", f"first prompts handed out, to {', '.join(sorted(state.held)[:_MOST_NAMES])}")
        if state.in_training:
            self._told |= {"tokens", "response", "reward"}
            self._tell("update", f"first groups with the trainer: step {state.step + 1} begins")

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            tell(text)
