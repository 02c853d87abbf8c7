"""`headrace tinker`: the Tinker API on one process, with the built-in engine for samples and a trained model for gradients.

Invariants: the thread of the event loop never computes, the main thread never waits for a client. The training requests of a model are
carried out in the order of their numbers, each once, and what is not supported is refused by its name.
Start reading at `routes.py` (HTTP), then `service.py` (the work), `work.py` (the order) and `bodies.py` (the wire).
"""
