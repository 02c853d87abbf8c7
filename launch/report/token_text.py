"""The account of tokens in the table at the end of a run: what was generated, and what became of it."""

from collections.abc import Mapping
from typing import Any

_ENDS = ("trained", "evaluated", "filtered", "failed", "evicted", "superseded", "lost", "ready", "unfinished")


def tokens_text(summary: Mapping[str, Any]) -> str:
    """Both sides of the account with the terms that are not 0, and what was served and prefilled again; "" where nothing was generated."""
    tokens = summary.get("tokens") or {}
    if not tokens.get("generated"):
        return ""
    source = f"{tokens['generated']:,} generated"
    if tokens.get("restored"):
        source += f" + {tokens['restored']:,} restored"
    total = tokens["generated"] + tokens.get("restored", 0)
    parts = [f"{tokens[end]:,} {end} ({tokens[end] / total:.0%})" for end in _ENDS if tokens.get(end)]
    text = f"{source} = {' + '.join(parts)}" + ("" if tokens.get("holds") else ": DOES NOT HOLD")
    again = summary.get("tokens_recomputed") or {}
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in again.items())
    text += f"; {tokens['served']:,} served" if tokens.get("served") else ""
    return text + (f"; prefilled again: {reasons}" if reasons else "")
