"""The benchmarks: `python -m headrace.launch.bench [WORKLOAD ...]`.

Each figure is measured beside a peer (another program, or a lower bound) in the same run. Start at `__main__.py`.
"""
