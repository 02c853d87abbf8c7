"""`eval`: held-out prompts that the rollouts answer during training, and how the answers are scored."""

from msgspec import Struct

from .fields import Count, Finite, NotNegative, OptionalCount


class EvalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`eval.*`: evaluation during training: before the first step, every `every` steps and after the last (docs/use/evaluation.md)."""

    path: str | tuple[str, ...] = ()
    """Prompts in the form of `data.path`: one file or data set, or a list; metrics are `eval/NAME/...`, NAME a file's stem."""
    split: str = "test"
    """Split of a Hugging Face data set."""
    every: OptionalCount = 50
    """Steps between two evaluations; 0 is off."""
    samples: Count = 1
    """Responses per prompt: avg@k is the mean reward of k responses, pass@k the probability that at least one of k succeeds."""
    temperature: NotNegative = 0.0
    """Divisor of the logits, instead of `sampling.temperature`; 0 takes the most probable token."""
    threshold: Finite = 1.0
    """Smallest reward that counts as a success, for pass@k."""
    max_prompts: Count | None = None
    """Number of prompts of each file, from the first on; null takes all."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Each file or data set; none if evaluation is off."""
        given = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(path for path in given if path) if self.every else ()
