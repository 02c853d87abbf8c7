"""The store: one small server to which every process of a run connects. It keeps members, messages and values.

- **Members** are processes. They join, announce facts about themselves and leave. A client that watches a role receives its members,
  then every change at once. A member counts as dead when its connection ends or when it has sent nothing for `comm.expiry_s`.
- **Messages** wait in named inboxes until their reader takes them. The hub confirms its messages once it has handled them; if it dies,
  its next process receives those that were not confirmed.
- **Values** have keys: the recipe, the run's summary, the addresses at which links are opened.

Invariants: a client proves that it knows the run's secret before its first request. The store makes no decisions and outlives the hub;
if the store ends, the run ends. Only `rendezvous.py` imports torch, in a process of its own, so a client connects within milliseconds.

Start reading at `protocol.py`, then `state.py` (what a request changes, without I/O), `server.py` and `client.py`. `rendezvous.py`
passes the store's address to the other hosts through torchrun's own store.
"""
