"""The attention back-ends of decoding, and the choice for a policy on this machine."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ....comm.errors import SettingError
from ....trainer.policy.attention import Attention
from ....trainer.policy.exact.operators import PAGE, ExactOperators
from ....trainer.policy.families import cap_of, family_of
from .cpu import GatherAttention, PoolAttention
from .cuda import FLASH_PAGE, ExactTableAttention, FlashAttention, TritonAttention, VarlenAttention, has_varlen

if TYPE_CHECKING:
    from ....trainer.policy.model import Policy
    from ..batch import DecodeBatch
    from ..kv_cache import KVCache


class DecodeAttention(Attention, Protocol):
    """Paged attention of one query [B, heads, d] per row; first writes the row's key and value into the cache."""

    name: str

    def prepare(self, batch: "DecodeBatch") -> None:
        """Update the plan to the batch's positions, once per step."""
        ...


def page_size_for(attention: str) -> int:
    """Tokens per page of a back-end, by default."""
    return FLASH_PAGE if attention in ("flash", "varlen") else PAGE


def choose(wanted: str, policy: "Policy", cache: "KVCache", exact: ExactOperators | None) -> DecodeAttention:
    """The back-end that `generator.attention` names; `auto` takes the first that can serve the policy here."""
    if exact is not None:
        return _exact(wanted, cache, exact)
    able = [name for name, is_able in _abilities(policy, cache).items() if is_able]
    if wanted != "auto" and wanted not in able:
        raise SettingError(
            f"generator.attention: '{wanted}' does not support this policy here (supported: auto, {', '.join(able)})"
        )
    name = able[0] if wanted == "auto" else wanted
    if name == "pool":
        return PoolAttention(cache)
    classes: tuple[Any, ...] = (FlashAttention, TritonAttention, VarlenAttention, GatherAttention)
    return next(each for each in classes if each.name == name)(cache)


def _exact(wanted: str, cache: "KVCache", operators: ExactOperators) -> DecodeAttention:
    attention = ExactTableAttention(cache) if operators.has_tables else PoolAttention(cache, is_exact=True)
    if wanted not in ("auto", attention.name):
        raise SettingError(f"generator.attention: exact mode runs on '{attention.name}', not on '{wanted}'")
    if cache.page_size != PAGE:
        raise SettingError(f"generator.exact: pages have {PAGE} tokens, not {cache.page_size}")
    return attention


def _abilities(policy: "Policy", cache: "KVCache") -> dict[str, bool]:
    """Whether each back-end can compute this policy's attention here, best first."""
    family = family_of(policy.config)
    has_softcap = cap_of(policy.config, family.score_cap) is not None
    sinks = family.has_sinks
    is_cuda = policy.device.type == "cuda"
    is_half = policy.dtype in (torch.bfloat16, torch.float16)
    takes_flash = is_cuda and is_half and policy.head_dim <= 256 and cache.page_size % FLASH_PAGE == 0
    return {
        "pool": policy.device.type == "cpu" and not has_softcap,
        "flash": takes_flash and not sinks and find_spec("flash_attn") is not None,
        "triton": is_cuda and find_spec("triton") is not None,
        "varlen": takes_flash and not has_softcap and not sinks and has_varlen(),
        "gather": True,
    }
