"""How the hosts of a run find its store: the first host gives the address to torchrun's own store, the others look there.

    python -m headrace.comm.store.rendezvous publish ADDRESS     then prints a refusal, and waits until stdin is closed
    python -m headrace.comm.store.rendezvous find                prints the address
    python -m headrace.comm.store.rendezvous refuse TEXT         ends the run for this reason

torchrun's store speaks a protocol of torch, so this imports torch, in a process of its own. Its values are not signed: who reads the
address proves the run's secret to the store, which has to prove it too. A host without the secret refuses the run in this way.
"""

import os
import select
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..errors import SettingError, StoreGone
from ..waits import waiting

_ADDRESS_KEY = "headrace/store"
_REFUSAL_KEY = "headrace/refusal"
FIND_S = 120.0
_LOOK_S = 0.5


def main(words: Sequence[str]) -> None:
    """Entry of the process; the module's docstring describes the words."""
    store = _torchrun_store()
    try:
        match words:
            case ["publish", address]:
                store.set(_ADDRESS_KEY, address)
                _watch_for_refusal(store)
            case ["find"]:
                with waiting("the first supervisor", "the store's address", FIND_S) as wait:
                    wait.until(lambda: store.check([_ADDRESS_KEY]), interval_s=0.02)
                print(store.get(_ADDRESS_KEY).decode())
            case ["refuse", text]:
                store.set(_REFUSAL_KEY, text)
                store.check([_REFUSAL_KEY])
            case _:
                raise SettingError(__doc__ or "")
    except DistError as error:
        raise StoreGone(f"torchrun's store is gone: {error}") from error


def _watch_for_refusal(store: Any) -> None:
    """Print the text of the host that refuses the run; returns then, and when standard input is closed."""
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        if store.check([_REFUSAL_KEY]):
            print(store.get(_REFUSAL_KEY).decode(), flush=True)
            return


def _torchrun_store() -> Any:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise SettingError("not started by torchrun: use torchrun, or set HEADRACE_STORE=HOST:PORT")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=FIND_S))
    except (OSError, DistError) as error:
        raise StoreGone(f"torchrun's store does not answer at {host}:{port}: {error}") from error


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (SettingError, StoreGone, TimeoutError) as error:
        sys.exit(str(error))
