"""A small model whose weights are split over ranks in two ways."""

import torch
from torch import nn

from headrace.comm.tensor_split import TensorSplit


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(37, 16), nn.Linear(16, 33), nn.LayerNorm(33), nn.Linear(33, 6, bias=False))


CUTS = {"1.weight": TensorSplit(1), "3.weight": TensorSplit(0, (4, 2)), "0.weight": TensorSplit(1)}
"""By columns, by rows of two fused tensors."""
