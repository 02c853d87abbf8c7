"""The HTTP front: OpenAI's chat and text completions, and generation from token ids, on a generator in the same process.

Invariants: the thread of the generator never waits for a client, and no field of a request is ignored silently.
Start reading at `app.py` (the routes), then `requests.py`, `desk.py` (between HTTP and generator) and `responses.py`.
"""
