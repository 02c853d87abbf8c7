"""The store: one small server that all processes of a run are connected to. It has members, messages and values.

- **Members** join, announce facts and leave. Who asks for a role sees its members and hears of each change at once. A member is
  dead when its connection ends, or when it has sent nothing for `comm.expiry_s`.
- **Messages** wait in named inboxes until their reader takes them. Those to the hub stay until the hub says that it has handled
  them, so the hub's next process gets the rest.
- **Values** under a key: the recipe, the run's summary, addresses at which links are opened.

Invariants: a client proves the run's secret before its first request. The store decides nothing and outlives the hub; if it ends,
the run ends. Nothing here imports torch or numpy, so a process is connected within milliseconds.

Start reading at `protocol.py`, then `state.py` (what a request changes, pure), `server.py` and `client.py`. `rendezvous.py` passes
the store's address to other hosts through torchrun's own store.
"""
