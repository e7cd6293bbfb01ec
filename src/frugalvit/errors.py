"""Errors written for their reader: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Interrupted(KeyboardInterrupt):
    """Somebody stopped a run of several, and it is saved: the same command goes on."""


class UserError(Exception):
    """A mistake of the user: one line that says what is wrong and what to do. The command line exits with 2."""


GUARD = "a script works below 'if __name__ == \"__main__\":', since processes that decode its images read it again"
"""What a program of somebody's own needs where processes are spawned."""


def did_you_mean(word: str, options: Iterable[str], count: int = 1) -> str:
    """`` Did you mean 'x'?`` for the options closest to ``word``, or an empty string when nothing is close."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(options)), n=count, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(option) for option in close)}?" if close else ""
