"""The relay's process: a storage unit for rows and a keeper of weight versions.

Consumes its mailbox; waits for letters only; woken by the hub (rows to drop or count, the end). Weights and rows come and
go on threads and stores of their own.
"""

import time
from typing import Protocol

from ..comm.fleet import Fleet
from ..comm.messages import CountRows, DropRows, Load, Stop, UnitCount
from ..comm.rows import RowUnit
from ..comm.segment import Segment
from ..comm.settings import CommSettings
from .weights_keeper import WeightKeeper

REPORT_S = 1.0


class RelayRecipe(Protocol):
    """The sections of a recipe that a relay reads."""

    comm: CommSettings


def run(fleet: Fleet, recipe: RelayRecipe) -> None:
    """The relay's process, until the hub's `Stop`."""
