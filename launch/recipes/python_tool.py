"""The tool of `tools.yaml`: a Python interpreter for the policy, in the sandbox of the rewards."""

from ...rollout.rewards.sandbox import run_python

SECONDS = 10.0
"""Longest time of a program; less than `environment.timeout_s`, so that the policy learns of it."""
MOST_CHARACTERS = 2000
"""A longer output would fill the response, of which it is a part."""


def python(code: str) -> str:
    """
    Run a Python program and return what it prints.

    Args:
        code: The program. Only what it prints is returned.
    """
    result = run_python(code, timeout_s=SECONDS)
    if result.exit_code is None:
        return f"The program was ended after {SECONDS:g} seconds."
    # The last line of a traceback says what was wrong.
    text = result.stdout if result.exit_code == 0 else result.stdout + (result.stderr.strip().splitlines() or [""])[-1]
    return (
        text[-MOST_CHARACTERS:].strip() or f"The program printed nothing and ended with exit code {result.exit_code}."
    )
