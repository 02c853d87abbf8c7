"""Files that tests read: a small policy that tells stories, and some rows of a published data set."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "assets"
GSM8K = ASSETS / "gsm8k" / "test.jsonl"
"""The first 84 questions of the test set, and those of the others whose answers have a sign or a comma."""
