"""Lines for the user about a run that goes wrong or could go faster: collapse, cut responses, idle roles.

Invariant: an alarm reads the metrics of the steps alone, so it changes nothing, and a restarted trainer repeats its judgement.
Start reading at `collapse.py`.
"""
