"""What rank 0 of the trainer records of a run: metrics, samples, TensorBoard, and the lines of the console.

Invariant: a step is recorded once. A trainer that starts again removes the lines of steps that it will record, and no others.
Start reading at `recorder.py`, then `samples_file.py` and `shown_rows.py`.
"""
