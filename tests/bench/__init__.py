"""The benchmarks: `python tests/bench [WORKLOAD ...]` from a checkout. They are not part of the package.

Each figure is measured beside a peer (another program, or a lower bound) in the same run. Start at `__main__.py`.
"""
