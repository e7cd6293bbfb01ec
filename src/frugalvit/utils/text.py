"""Format counts and lists for messages."""

from collections.abc import Sequence

_PLURALS = {
    "category": "categories",
    "class": "classes",
    "copy": "copies",
    "exact copy": "exact copies",
    "near copy": "near copies",
}


def pluralize(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 file``, ``2,000 files``."""
    return f"{count:,} {noun if count == 1 else _PLURALS.get(noun, noun + 's')}"


def truncate_list(names: Sequence[str], count: int = 5) -> str:
    """List the first names: ``a, b, c and 7 more``."""
    text = ", ".join(names[:count])
    return text if len(names) <= count else f"{text} and {len(names) - count} more"


def short_message(error: Exception) -> str:
    """Return the message of another library's exception on one line, at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
