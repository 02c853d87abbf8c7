"""Checks of a recipe before any process is started: settings that exclude each other, files, data, functions.

Invariant: every check raises `SettingError`, or returns warnings. Bounds of one setting are at its field in `comm/recipe/`.
Start reading at `recipe.py`, which makes all checks of a start.
"""
