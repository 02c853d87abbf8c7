"""Triton kernels, for CUDA alone; they are imported when a forward pass on a GPU begins.

`gate` and `heads` are of the lean forward pass: several small operators of a layer in one launch, which round once, where the operators
that they replace round after each of them. Start with `decoder`. Those named `exact_*` are of exact mode, whose rows depend on
no other row. Start with `exact.kernels`.
"""
