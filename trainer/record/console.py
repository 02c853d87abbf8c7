"""What the console says of a step, of an evaluation, and of the best checkpoint."""

from collections.abc import Collection, Mapping

from ...comm.clock import estimate
from ...comm.recipe.run import REWARD_STATISTICS
from .metrics_log import Value

_MOST_PARTS = 4
"""Most parts of the reward in the line of a step."""


def console_line(step: int, num_steps: int, metrics: Mapping[str, Value], left_s: float | None = None) -> str:
    """The line of a step on the console. left_s: the time that the steps after it will take, if that is known.

    It has the mismatch of generator and trainer, or, where no token is of the version in training, the KL divergence of the older ones.
    """
    m = metrics
    distance = ""
    if "mismatch/logprob_abs_diff" in m:
        distance = f"  mismatch {m['mismatch/logprob_abs_diff']:.1e}"
    elif "staleness/kl" in m:
        distance = f"  stale kl {m['staleness/kl']:.1e}"
    left = f"  {estimate(left_s)} left" if left_s else ""
    return (
        f"step {step + 1:>{len(str(num_steps))}}/{num_steps}  reward {m['reward/mean']:.3f}{_parts(m)}"
        f"  length {m['response_length/mean']:.1f}"
        f"  entropy {m['actor/entropy']:.3f}  grad {m['actor/grad_norm']:.2f}  staleness {m['staleness/mean']:.2f}"
        f"{distance}"
        f"  {m['perf/throughput']:.0f} tok/s  {m['timing_s/step']:.2f} s (waits {m['timing_s/wait_data']:.2f}){left}"
    )


def _parts(metrics: Mapping[str, Value]) -> str:
    """The parts of the reward, of a reward that has more than one."""
    names = [name.removeprefix("reward/") for name in metrics if name.startswith("reward/") and name.count("/") == 1]
    values = {name: metrics[f"reward/{name}"] for name in names if name not in REWARD_STATISTICS}
    shown = [f"{name} {value:.3f}" for name, value in values.items() if isinstance(value, float | int)]
    if len(shown) < 2:
        return ""
    return f" ({', '.join([*shown[:_MOST_PARTS], *['...'] * (len(shown) > _MOST_PARTS)])})"


def evaluation_line(metrics: Mapping[str, Value]) -> str:
    """The line of a complete evaluation on the console; `avg@k` and `pass@k` of each file, and its mean length."""
    files = dict.fromkeys(name.split("/")[1] for name in metrics if name.startswith("eval/") and name.count("/") > 1)
    parts = [f"evaluation of version {metrics['eval/version']:.0f}"]
    for file in files:
        found = {
            name.removeprefix(f"eval/{file}/"): value for name, value in metrics.items() if f"eval/{file}/" in name
        }
        shown = [f"{name} {value:.3f}" for name, value in found.items() if "@" in name]
        shown += [f"length {found['response_length/mean']:.1f}"] if "response_length/mean" in found else []
        shown += [f"{found['missing']:.0f} missing"] if found["missing"] else []
        parts.append(f"{file}: {' '.join(shown)}")
    return "  ".join(parts)


def unbeaten_line(metric: str, scores: Mapping[int, float], saved: Collection[int]) -> str:
    """Where no `saved` version has beaten the model before training, which has no checkpoint; "" otherwise. `scores` are by version."""
    later = [score for version, score in scores.items() if version and version in saved]
    if not later or 0 not in scores or max(later) > scores[0]:
        return ""
    return (
        f"no checkpoint beat the model before training: {metric} was {scores[0]:.3f} at step 0, and at most"
        f" {max(later):.3f} in a later checkpoint"
    )
