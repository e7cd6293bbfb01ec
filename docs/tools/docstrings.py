"""Convert docstrings for the API pages.

Our docstrings explain parameters in aligned columns ("name    what it is"), which Markdown would join. Such paragraphs
become lists; Sphinx roles become code.
"""

import re
from typing import Any

import griffe

_COLUMNS = re.compile(r"^\S.*?\S? {2,}\S", re.MULTILINE)
_SECTION = re.compile(r"^\w[\w ]*:\n {4}")  # "Args:", which the docstring parser handles


class Docstrings(griffe.Extension):
    """A griffe extension, named in mkdocs.yml."""

    def on_package(self, *, pkg: griffe.Module, **keywords: Any) -> None:
        _walk(pkg)


def _walk(node: griffe.Object) -> None:
    if node.docstring is not None:
        node.docstring.value = tidy(node.docstring.value)
    for member in node.members.values():
        if not member.is_alias:
            _walk(member)  # type: ignore[arg-type]


def tidy(text: str) -> str:
    """Convert paragraphs in columns to lists, and roles to code."""
    paragraphs = []
    for number, paragraph in enumerate(re.split(r"\n{2,}", text)):
        aligned = number > 0 and _COLUMNS.search(paragraph) and not _SECTION.match(paragraph)
        plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", paragraph)
        paragraphs.append(_to_list(plain) if aligned and not paragraph.startswith((" ", "```", "- ", "| ")) else plain)
    return "\n\n".join(paragraphs)


def _to_list(paragraph: str) -> str:
    """Convert ``name   text`` lines to list items; indented lines continue the item above."""
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
