"""`headrace view RUN`: a local page with the samples and the metrics of a run, which reads the run folder while the run trains.

Invariant: it serves loopback alone, two files of one run folder and its own page, and what a model wrote is shown as text, never as HTML.
Start reading at `command.py`, then `server.py`, `sample_index.py` and `page.html`.
"""
