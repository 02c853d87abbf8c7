"""Recipes that come with the project, and the small task and policy of the quickstart.

Invariants: the recipes of the quickstart run without a GPU, and without a network once `smollm2` has its model. A recipe that has
not run on the GPUs it is for says so in its first line; its head names those GPUs and the source of its figures.
Start reading at `quickstart.yaml`, then `sort_digits.py`; of the recipes for GPUs at `gsm8k.yaml`.
"""
