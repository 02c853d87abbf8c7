"""Layers that read a sequence through a state of fixed size in place of keys and values: gated delta nets.

Invariant: one arithmetic, that of `delta_rule.py` between the projections of transformers' modules, trains and generates.
Start reading at `network.py` (the layer), then `packed.py` (training); `rollout.engine.recurrent` has the states of the generator.
"""
