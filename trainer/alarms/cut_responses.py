"""A warning for runs whose responses do not fit into their longest length."""


class CutResponses:
    """Warns once of a run whose responses are nearly all cut at their longest length: such a policy cannot show its answers."""

    SHARE = 0.9
    STEPS = 5

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._num_steps = 0

    def warning(self, share: float) -> str:
        """The text after the last of so many steps in a row whose `share` of cut responses is above SHARE; else empty."""
        self._num_steps = self._num_steps + 1 if share > self.SHARE else 0
        if self._num_steps != self.STEPS:
            return ""
        return (
            f"warning: in each of the last {self.STEPS} steps more than {self.SHARE:.0%} of the responses were cut at the maximum"
            f" length; raise sampling.max_new_tokens={self._longest}, or leave more room in the model's context"
        )
