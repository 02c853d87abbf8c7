"""`headrace tinker`: the Tinker API on one process, with the built-in engine for samples and a trained model for gradients.

A server that is started again on the folder of another one goes on with its scripts.

Invariants: the thread of the event loop never computes, the main thread never waits for a client. The training requests of a model are
carried out in the order of their numbers, each once, and what is not supported is refused by its name.
A request is on the disk before it is acknowledged, and its result before it is given out.
Start reading at `routes.py` (HTTP), then `service.py` (requests as they come), `work.py` (the order), `performer.py` (the work),
`kept.py` and `checkpoints.py` (the disk) and `bodies.py` (the wire).
"""
