"""Errors for the user: what is wrong, the value, what to do."""

import difflib
import operator
from collections.abc import Iterable


class Interrupted(KeyboardInterrupt):
    """A signal stopped one run of several. It is saved, and the same command resumes it."""


class UserError(Exception):
    """A mistake of the user, as one line. The command line prints it and exits with 2."""


class ReportedError(UserError):
    """An error that rank 0 prints; the other ranks end silently."""


class LostRankError(UserError):
    """Another rank has ended or does not answer. Every remaining rank prints it: rank 0 may be the lost one."""


GUARD = "put the code below 'if __name__ == \"__main__\":', because worker processes import the script again"
"""What a user's script needs if processes are spawned."""


def did_you_mean(word: str, options: Iterable[str], count: int = 1) -> str:
    """Return `` Did you mean 'x'?`` for the closest options, or an empty string."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(options)), n=count, cutoff=0.7)
    return f" Did you mean {' or '.join(repr(option) for option in close)}?" if close else ""


def to_count(name: str, value: object, least: int = 1) -> int:
    """Return ``value`` as int if it is an integer (numpy's too) of at least ``least``."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < least:
        raise UserError(f"{name}={value!r}: use an integer of at least {least}.")
    return number
