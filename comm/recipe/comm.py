"""`comm`: addresses, deadlines and links of the processes."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .fields import MAX_SECONDS


class CommSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`comm.*`: addresses, deadlines and links of the processes."""

    interface: str = "auto"
    """Where each host listens: an interface, an address, a network (`10.0.0.0/8`), or `auto`: by the route to the first host."""
    expiry_s: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 10.0
    """Seconds without a sign of life, of which there are ten in this time, after which a process counts as dead; the end of its connection
    counts at once."""
    deadline_s: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 300.0
    """Longest blocking wait in seconds. A longer one ends the run with a message that names both sides. The trainer's wait for groups
    starts again with each answer of the hub."""
    tls: bool = False
    """Encrypt connections and messages between processes (extra `tls`); keys are made for each start of the run."""
    link: Literal["auto", "shm", "tcp", "nccl"] = "auto"
    """Transport of the weights; `auto` is shared memory on one host and tcp between hosts; `nccl` needs a GPU for the relays of each host."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two signs of life of a process."""
        return self.expiry_s / 10
