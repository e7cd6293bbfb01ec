"""For the API pages: docstrings as they are meant to be read.

Ours explain parameters in aligned columns ("name    what it is"). Markdown would run those lines together, so such
paragraphs become lists; Sphinx roles become plain code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_COLUMNS = re.compile(r"^\S.*?\S? {2,}\S", re.MULTILINE)
_SECTION = re.compile(r"^\w[\w ]*:\n {4}")  # "Args:" and the like: the docstring parser's own


class Docstrings(griffe.Extension):
    """A griffe extension, named in mkdocs.yml."""

    def on_package(self, *, pkg: griffe.Module, **keywords: Any) -> None:
        _walk(pkg)


def _walk(thing: griffe.Object) -> None:
    if thing.docstring is not None:
        thing.docstring.value = tidy(thing.docstring.value)
    for member in thing.members.values():
        if not member.is_alias:
            _walk(member)  # type: ignore[arg-type]


def tidy(text: str) -> str:
    """Paragraphs in columns as lists, roles as code."""
    kept = []
    for number, paragraph in enumerate(re.split(r"\n{2,}", text)):
        aligned = number > 0 and _COLUMNS.search(paragraph) and not _SECTION.match(paragraph)
        plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", paragraph)
        kept.append(_listed(plain) if aligned and not paragraph.startswith((" ", "```", "- ", "| ")) else plain)
    return "\n\n".join(kept)


def _listed(paragraph: str) -> str:
    """``name   text`` lines as list items; lines that begin with spaces go on with the item above."""
    lines = paragraph.splitlines()
    column = min(match.end() - 1 for match in map(_COLUMNS.match, lines) if match)
    items: list[str] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1] += " " + line.strip()
        elif line[:column].strip() and line[column - 1 : column] == " ":
            items.append(f"- **{line[:column].strip().rstrip(':').replace('`', '')}**: {line[column:].strip()}")
        else:  # a sentence among them
            items.append(line)
    return "\n".join(items)
