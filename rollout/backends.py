"""The attention back-ends of decoding: which there are, and which one this policy and this machine take."""

from typing import Protocol

from ..comm.errors import SettingError
from ..trainer.attention import Attention
from ..trainer.model import Policy
from .attention import GatherAttention, PoolAttention
from .batch import DecodeBatch
from .kv_cache import KVCache


class DecodeAttention(Attention, Protocol):
    """Paged attention of one query per row; writes the row's key and value first."""

    name: str

    def prepare(self, batch: DecodeBatch) -> None:
        """Bring the plan up to the batch's positions, once per step."""
        ...


def choose(wanted: str, policy: Policy, cache: KVCache, exact: bool) -> DecodeAttention:
    """The back-end of `generator.attention`; `auto` takes the first that can."""
    able = [name for name, is_able in _abilities(policy).items() if is_able]
    if wanted != "auto" and wanted not in able:
        raise SettingError(
            f"generator.attention: '{wanted}' cannot serve this policy here (able: auto, {', '.join(able)})"
        )
    name = able[0] if wanted == "auto" else wanted
    return PoolAttention(cache, exact) if name == "pool" else GatherAttention(cache)


def _abilities(policy: Policy) -> dict[str, bool]:
    """What can compute this policy's attention here, best first."""
    has_softcap = getattr(policy.config, "attn_logit_softcapping", None) is not None
    return {"pool": policy.device.type == "cpu" and not has_softcap, "gather": True}
