"""Recipes that come with the project, and the small task and policy of the quickstart.

Invariant: each recipe runs without a GPU, and without a network once `smollm2` has its model.
Start reading at `quickstart.yaml`, then `sort_digits.py`.
"""
