"""The console's lines of a step and of the end."""

from headrace.trainer.record.console import console_line, unbeaten_line
from headrace.trainer.record.metrics_log import Value

METRICS: dict[str, Value] = {
    "reward/mean": 0.5, "reward/std": 0.1, "response_length/mean": 7.0, "actor/entropy": 0.3, "actor/grad_norm": 1.0,
    "staleness/mean": 1.0, "staleness/hist": {"1": 4}, "perf/throughput": 900.0, "timing_s/step": 0.4,
    "timing_s/wait_data": 0.1,
}  # fmt: skip


def test_the_console_line_shows_the_distance_of_older_tokens_for_a_step_without_fresh_ones():
    assert "mismatch" not in console_line(0, 10, METRICS)
    assert "  stale kl 2.0e-03  " in console_line(0, 10, METRICS | {"staleness/kl": 2e-3})
    assert "mismatch 1.0e-07" in console_line(0, 10, METRICS | {"mismatch/logprob_abs_diff": 1e-7})
    assert console_line(9, 10, METRICS).startswith("step 10/10  reward 0.500")
    assert console_line(8, 10, METRICS).startswith("step  9/10  reward 0.500")


def test_the_line_of_a_step_has_the_parts_of_a_reward_that_has_several():
    assert "  reward 0.500  length" in console_line(0, 10, METRICS | {"reward/digits": 0.5})
    parts = {"reward/digits": 0.25, "reward/format": 1.0}
    assert "  reward 0.500 (digits 0.250, format 1.000)  length" in console_line(0, 10, METRICS | parts)
    many = {f"reward/r{number}": 0.1 for number in range(9)}
    assert "(r0 0.100, r1 0.100, r2 0.100, r3 0.100, ...)" in console_line(0, 10, METRICS | many)


def test_the_line_of_a_step_says_how_long_the_rest_takes_if_that_is_known():
    assert console_line(1, 10, METRICS, 90.2).endswith("  1 min 30 s left")
    assert console_line(9, 10, METRICS, 0.0).endswith("(waits 0.10)")
    assert console_line(0, 10, METRICS, None).endswith("(waits 0.10)")


def test_a_model_that_no_version_beat_is_named_at_the_end():
    assert unbeaten_line("eval/a/avg@1", {0: 0.857, 2: 0.9, 4: 0.5, 8: 0.714}, {4, 8}) == (
        "no checkpoint beat the model before training: eval/a/avg@1 was 0.857 at step 0, and at most 0.714 in a later"
        " checkpoint"
    ), "version 2 has none"
    assert unbeaten_line("eval/a/avg@1", {0: 0.5, 2: 0.5}, {2}), "an equal score is not a gain"
    for beaten in ({0: 0.5, 2: 0.6, 4: 0.1}, {2: 0.1, 4: 0.1}, {0: 0.5}, {}):
        assert unbeaten_line("eval/a/avg@1", beaten, {2, 4}) == ""
