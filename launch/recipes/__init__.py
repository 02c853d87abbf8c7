"""Recipes that come with the project, and the small task and policy of the quickstart.

Invariant: each recipe runs without a network and without a GPU.
Start reading at `quickstart.yaml`, then `sort_digits.py`.
"""
