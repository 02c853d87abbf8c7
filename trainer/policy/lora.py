"""LoRA (Hu et al., arXiv 2106.09685, section 4.1): a weight is W0 + alpha / rank * B A, of which B and A are trained.

A forward pass makes the whole weight, in the type that the rollouts keep, and multiplies with it. Rollouts make the same weight
once per version, so trainer and generator compute with equal numbers, rounding to bfloat16 included. The backward pass
makes it again, and never the gradient of a whole weight, so a trainer keeps no more than W0, B and A.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...comm.errors import SettingError

if TYPE_CHECKING:
    from ...comm.recipe import LoraSettings

A = "lora_A"
"""Name of the matrix [rank, in] below the name of its layer, as in peft."""
B = "lora_B"
"""Name of the matrix [out, rank]."""
ALL_LINEAR = "all-linear"

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., in], weight [out, in] and bias -> [..., out]."""


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """weight [out, in] + scaling * b a, summed in fp32 and rounded to the weight's type."""
    return torch.addmm(weight.float(), b, a, alpha=scaling).to(weight.dtype)


class LoraLinear(nn.Linear):
    """A linear layer with a frozen weight and bias, and an adapter in fp32."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor, scaling: float) -> None:
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(b)
        self.scaling = scaling

    def forward(self, input: Tensor, product: Product = F.linear) -> Tensor:
        """The layer of x [..., in], by a product such as that of exact mode; as under autocast where that is on."""
        x = input
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        result = _LowRankProduct.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scaling, product)
        assert isinstance(result, Tensor)
        return result


class _LowRankProduct(torch.autograd.Function):
    """x W^T + bias with W = `merged(...)`. The gradients of a and b come from products with x and the output's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, product: Product
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scaling = scaling
        with torch.autocast(x.device.type, enabled=False):
            return product(x, merged(weight, a, b, scaling).to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        grad = grads[0]
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ merged(weight, a, b, ctx.scaling).to(grad.dtype)
        rows = x.flatten(0, -2)
        grad = grad.flatten(0, -2)
        of_a = ctx.scaling * (grad @ b.to(grad.dtype)).t() @ rows
        of_b = ctx.scaling * grad.t() @ (rows @ a.to(rows.dtype).t())
        return of_x, None, None, of_a.to(a.dtype), of_b.to(b.dtype), None, None


def target_layers(model: nn.Module, targets: str | tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers of `lora.targets`, by name. Raises SettingError for a name that no layer has."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if targets == ALL_LINEAR:
        return layers
    wanted = (targets,) if isinstance(targets, str) else targets
    for target in wanted:
        if not any(_is_named(name, target) for name in layers):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise SettingError(
                f"lora.targets: no linear layer is named '{target}'; the policy has {known}"
                " (embedding, LM head and experts, which are fused, take no adapter)"
            )
    return {name: layer for name, layer in layers.items() if any(_is_named(name, target) for target in wanted)}


@torch.no_grad()
def add_adapter(
    model: nn.Module,
    settings: "LoraSettings",
    seed: int,
    base_dtype: torch.dtype,
    start: Mapping[str, Tensor] | None = None,
) -> None:
    """Freeze a model whose weights are not read yet, and give its target layers adapters, the same ones for the same seed.

    Their frozen weights are kept in `base_dtype`. As in peft A is kaiming uniform with a = sqrt(5), which is +-1 / sqrt(in), and B is zero;
    or `start` has the matrices, by `adapter_weights`'s names.
    """
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for name, layer in target_layers(model, settings.targets).items():
        a, b = (torch.zeros(shape) for shape in _shapes(layer, settings.rank))
        bound = 1 / math.sqrt(layer.in_features)
        a.uniform_(-bound, bound, generator=random)  # `nn.init` does nothing while transformers makes another model
        if start is not None:
            a = start[f"{name}.{A}"]
            b = start[f"{name}.{B}"]
        layer.weight.data = torch.empty_like(layer.weight, dtype=base_dtype)
        model.set_submodule(name, LoraLinear(layer, a, b, settings.alpha / settings.rank))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is of an adapter."""
    return name.rpartition(".")[2] in (A, B)


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The matrices of a model's adapter, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}


def adapter_shapes(layers: dict[str, nn.Linear], rank: int) -> dict[str, Tensor]:
    """What `adapter_weights` gives for these target layers, without values."""
    return {
        f"{name}.{matrix}": torch.empty(shape, device="meta")
        for name, layer in layers.items()
        for matrix, shape in zip((A, B), _shapes(layer, rank), strict=True)
    }


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The model of the frozen weights alone."""
    scalings = {layer: layer.scaling for layer in model.modules() if isinstance(layer, LoraLinear)}
    for layer in scalings:
        layer.scaling = 0.0
    try:
        yield
    finally:
        for layer, scaling in scalings.items():
            layer.scaling = scaling


def _shapes(layer: nn.Linear, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (rank, layer.in_features), (layer.out_features, rank)


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
