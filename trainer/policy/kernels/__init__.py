"""Triton kernels of the lean forward pass: several small operators of a layer in one launch, for CUDA alone.

They round once, where the operators that they replace round after each of them. Exact mode does not use them. Only
`decoder` and the generator's paged attention import them, when a forward pass on a GPU begins: start with `decoder`.
"""
