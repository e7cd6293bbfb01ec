"""Option values from YAML files and texts, loaded safely."""

import re
from pathlib import Path
from typing import Any

import yaml

from frugalvit.errors import UserError
from frugalvit.utils.files import read_error_message

_NAME = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")


class DuplicateKeyError(yaml.YAMLError):
    """A mapping has the same key twice."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that rejects duplicate keys, as the YAML standard asks."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise DuplicateKeyError(f"'{key.value}' is set twice, in lines {lines[key.value]} and {line}")
                lines[key.value] = line
        return node


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read nested options from a YAML file; names may be written as flags (``localization.lr-scale``)."""
    try:
        values = _UniqueKeyLoader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.") from None
    except DuplicateKeyError as error:
        raise UserError(f"{path}: {error}. Remove one of them.") from None
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must map option names to values, but holds a {type(values).__name__}.")
    try:
        return _nest(values, path)
    except RecursionError:
        raise UserError(f"{path} is not readable YAML: a mapping contains itself.") from None


def read_yaml_text(text: str) -> Any:
    """Read a flag's value as YAML, e.g. ``{depths: [1, 1]}``; invalid YAML stays text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _nest(values: dict[Any, Any], path: str | Path, prefix: str = "") -> dict[str, Any]:
    """Convert flag names to nested options: ``a.b`` to group a, option b; dashes to underscores."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise UserError(f"{path}: {prefix}{key!r} is not an option name.")
        *groups, leaf = key.replace("-", "_").split(".")
        inner = _nest(value, path, f"{prefix}{key}.") if isinstance(value, dict) else value
        for group in (leaf, *reversed(groups)):
            inner = {group: inner}
        _add_values(nested, inner, path, prefix)
    return nested


def _add_values(nested: dict[str, Any], more: dict[str, Any], path: str | Path, prefix: str) -> None:
    """Merge ``more`` into ``nested``; an option that both set is an error."""
    for name, value in more.items():
        if isinstance(nested.get(name), dict) and isinstance(value, dict):
            _add_values(nested[name], value, path, f"{prefix}{name}.")
        elif name in nested:
            raise UserError(f"{path}: '{prefix}{name}' is set twice, in two spellings. Remove one of them.")
        else:
            nested[name] = value
