"""The schedules beside each other on emulated devices: `python tests/bench compare`, with docs/develop/lab.md as its page.

The devices and the runs in virtual time are the product's (`launch/lab`); this folder has the variants, figures, tables and plots.
Start reading at `compare.py`.
"""
