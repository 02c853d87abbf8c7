"""Where the metrics of a run go beside `metrics.jsonl`: TensorBoard, and trackers such as Weights & Biases (`run.report_to`).

Invariant: nothing that a tracker does stops or slows training. Its package is imported in a process of its own, which is fed through a
pipe that never blocks, and is ended when its time is over. TensorBoard's file is written by the trainer itself, as `metrics.jsonl` is.
Start reading at `tracker.py`, then `feed.py`, `process.py` and `packages.py`.
"""
