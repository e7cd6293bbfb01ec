"""A hook of mkdocs: on papers.md every ``file.py::name`` becomes a link to that line of the source.

The site gets a page with numbered lines for every such file.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGE = "papers.md"
WIDE = (PAGE, "FIRST_HOUR.md")
ROOT = Path(__file__).parent.parent.parent
NAMED = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
RECIPE = re.compile(r"`(recipes/[\w-]+\.yaml)`")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for every file that papers.md names."""
    text = (Path(config["docs_dir"]) / PAGE).read_text(encoding="utf-8")
    for name in sorted({match[1] for match in NAMED.finditer(text)} | set(RECIPE.findall(text))):
        language = "python" if name.endswith(".py") else "yaml"
        code = locate(name).read_text(encoding="utf-8")
        head = f'---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# `{name}`\n\n````{language} linenums="1"\n'
        files.append(File.generated(config, f"source/{name}.md", content=f"{head}{code}\n````\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Convert names to links; pages with wide tables have no table of contents."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri != PAGE:
        return markdown
    markdown = NAMED.sub(_link, markdown)
    return RECIPE.sub(lambda match: f"[`{match[1]}`](source/{match[1]}.md)", markdown)


def _link(match: re.Match[str]) -> str:
    file, name = match[1], match[2]
    return f"[`{file}`](source/{file}.md) [`{name}`](source/{file}.md#__codelineno-0-{line_of(locate(file), name)})"


def locate(name: str) -> Path:
    """Return the path of a module or recipe of the package, or of a file in benchmarks/."""
    return (ROOT if name.startswith("benchmarks/") else ROOT / "src" / "frugalvit") / name


def line_of(path: Path, name: str) -> int:
    """Return the first line of a function, class, method or constant."""
    body: list[Any] = ast.parse(path.read_text(encoding="utf-8")).body
    line = 1
    for part in name.split("."):
        match = next(node for node in body if part in _names(node))
        line, body = match.lineno, getattr(match, "body", [])
    return line


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
