"""The command line: recipes, placement, supervisors, reports and benchmarks.

Invariant: a mistake in the settings ends with one message that names the setting and exit code 2.
Start reading at `run.py`, then `processes/supervisor.py` and `config/load.py`.
"""
