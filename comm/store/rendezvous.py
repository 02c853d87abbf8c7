"""How the hosts of a run find its store: the first host writes the address to torchrun's own store, and the others read it there.

    python -m headrace.comm.store.rendezvous publish ADDRESS     writes the address; prints the reason if a host refuses the run
    python -m headrace.comm.store.rendezvous find                prints the address
    python -m headrace.comm.store.rendezvous refuse TEXT         ends the run for this reason

Reading torchrun's store needs torch, so this module runs in a process of its own. The values there are not authenticated. A forged
address does no harm, because client and store prove to each other that they know the run's secret. Anybody who reaches torchrun's
store can end the run with `refuse`; a host without the secret must be able to.
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
    """Entry of the process; the module's docstring describes the arguments."""
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
    """Wait until a host refuses the run, and print its reason. Returns without one when standard input is closed."""
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        if store.check([_REFUSAL_KEY]):
            print(store.get(_REFUSAL_KEY).decode(), flush=True)
            return


def _torchrun_store() -> Any:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise SettingError("not started by torchrun: use torchrun, or set HEADRACE_STORE=HOST:PORT")
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=FIND_S))
    except (OSError, DistError) as error:
        raise StoreGone(f"torchrun's store does not answer at {host}:{port}: {error}") from error


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (SettingError, StoreGone, TimeoutError) as error:
        sys.exit(str(error))
