"""Errors of the project, one tree.

HeadraceError
├── SettingError (ValueError)     a user's mistake; the message names the setting to change
│   └── UnusablePrompt            one prompt cannot become tokens
├── WaitTimeout (TimeoutError)    a named wait passed its deadline
├── PeerGone                      the other side of a connection is gone
│   └── StoreGone                 the run's store is gone
├── StorageFull                   a storage unit has no room for more rows
├── DiskFull                      the run folder's disk had no room until a deadline
├── LinkBroken                    a link failed in the middle of a transfer
│   └── WrongSecret               the other end does not know the run's secret
├── WrongDigest                   bytes are not those that were announced
└── MessageRefused                a message is malformed, foreign or forged
"""

STORE_GONE_EXIT = 69
"""Exit code of a process that found no store at the run's address."""
STORE_LOST_EXIT = 70
"""Exit code of a process whose connection to the store ended."""
MEMORY_FULL_EXIT = 71
"""Exit code of a process that found its GPU full; the last line of its log has the bytes and the settings to change."""


class HeadraceError(Exception):
    """Base of all errors of the project."""


class SettingError(HeadraceError, ValueError):
    """A user's mistake; the message names the setting to change."""


class UnusablePrompt(SettingError):
    """One prompt cannot become tokens; others may."""


class WaitTimeout(HeadraceError, TimeoutError):
    """A named wait passed its deadline."""


class PeerGone(HeadraceError):
    """The other side of a connection is gone."""


class StoreGone(PeerGone):
    """The run's store is gone."""


class StorageFull(HeadraceError):
    """A storage unit has no room for more rows."""


class DiskFull(HeadraceError):
    """The run folder's disk had no room until a deadline."""


class LinkBroken(HeadraceError):
    """A link failed in the middle of a transfer; the other end may have part of the bytes."""


class WrongSecret(LinkBroken):
    """The other end of a connection does not know the run's secret."""


class WrongDigest(HeadraceError):
    """Bytes are not those that were announced."""


class MessageRefused(HeadraceError):
    """A message is malformed, foreign or forged."""


def is_power_of_ten(count: int) -> bool:
    """Whether a count is 1, 10, 100, ...: often enough to print what is counted."""
    return count in (10**power for power in range(len(str(count))))
