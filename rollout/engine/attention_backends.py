"""The attention back-ends of decoding: which there are, and which one this policy and this machine take."""

from typing import Any, Protocol

import torch

from ...comm.errors import SettingError
from ...trainer.policy.attention import Attention
from ...trainer.policy.exact_attention import PAGE
from ...trainer.policy.model import Policy
from .attention_cpu import GatherAttention, PoolAttention
from .attention_cuda import (
    FLASH_PAGE,
    FlashAttention,
    TritonAttention,
    VarlenAttention,
    has_flash,
    has_triton,
    has_varlen,
)
from .batch import DecodeBatch
from .kv_cache import KVCache


class DecodeAttention(Attention, Protocol):
    """Paged attention of one query per row; writes the row's key and value first."""

    name: str

    def prepare(self, batch: DecodeBatch) -> None:
        """Bring the plan up to the batch's positions, once per step."""
        ...


def page_size_for(attention: str) -> int:
    """Tokens per page that a back-end likes."""
    return FLASH_PAGE if attention in ("flash", "varlen") else PAGE


def choose(wanted: str, policy: Policy, cache: KVCache, exact: bool) -> DecodeAttention:
    """The back-end of `generator.attention`; `auto` takes the first that can."""
    able = [name for name, is_able in _abilities(policy, cache).items() if is_able]
    if wanted != "auto" and wanted not in able:
        raise SettingError(
            f"generator.attention: '{wanted}' cannot serve this policy here (able: auto, {', '.join(able)})"
        )
    name = able[0] if wanted == "auto" else wanted
    if name == "pool":
        return PoolAttention(cache, exact)
    makers: dict[str, Any] = {
        "flash": FlashAttention,
        "triton": TritonAttention,
        "varlen": VarlenAttention,
        "gather": GatherAttention,
    }
    return makers[name](cache)


def _abilities(policy: Policy, cache: KVCache) -> dict[str, bool]:
    """What can compute this policy's attention here, best first."""
    has_softcap = getattr(policy.config, "attn_logit_softcapping", None) is not None
    is_cuda = policy.device.type == "cuda"
    is_half = policy.dtype in (torch.bfloat16, torch.float16)
    takes_flash = is_cuda and is_half and policy.head_dim <= 256 and cache.page_size % FLASH_PAGE == 0
    return {
        "pool": policy.device.type == "cpu" and not has_softcap,
        "flash": takes_flash and has_flash(),
        "triton": is_cuda and has_triton(),
        "varlen": takes_flash and not has_softcap and has_varlen(),
        "gather": True,
    }
