"""Reading a recipe, checking it against model, data and placement, the dry run and `--help`.

Invariant: nothing here imports torch; bounds stand at the fields in `comm/recipe/`, rules about pairs in `checks/`.
Start reading at `load.py`, then `checks/recipe.py`.
"""
