"""A storage unit of experience rows: the server in a relay, the client in every other process.

Invariant: a reader checks a digest after each read, so a row is read whole or not found.
Start reading at `server.py`, then `client.py`; `arena.py` holds the bytes, `index.py` says where.
"""
