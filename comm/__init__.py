"""How processes find each other and talk: membership, mailboxes, links, row storage, shared memory, named waits.

Invariant: nothing here knows a role, nothing on a wire is pickled, and every blocking wait has a deadline.
Start reading at `fleet.py` (membership), then `mailbox.py` (control messages) and `links/` (bulk bytes).
"""
