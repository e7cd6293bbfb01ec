"""The ground of every typed configuration: one definition serves Python, ``--help``, YAML and validation.

Nothing here imports torch, so that ``frugalvit --help`` answers at once.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pydantic
import yaml

from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils.files import read_error_message


class Config(pydantic.BaseModel):
    """A typed, frozen group of options. Unknown keys are errors and numbers are finite."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _at_home(cls, value: Any) -> Any:
        """``~/photos`` wherever a path may be: a shell leaves it as it is after ``=``, YAML and Python always."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, list):
            return [cls._at_home(one) for one in value]
        return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate nested ``values``; a mistake becomes one clear line that says where it is."""
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            raise UserError(_explain(cls, error)) from None

    @classmethod
    def default_recipes(cls) -> dict[str, dict[str, Any]]:
        """What lies over the defaults where nothing is said: the values of each recipe that may be taken by itself."""
        return {}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def option(
    default: Any = ...,
    help: str = "",
    *,
    short: str | None = None,
    positional: bool = False,
    hidden: bool = False,
    **limits: Any,
) -> Any:
    """A field with its help text; ``short`` is a second, one-word flag for a dotted option.

    A ``hidden`` one is not named in ``--help``: it is there only to be refused with the reason.
    ``limits`` are pydantic's (``ge=0``, ``gt=0``, ``le=1``, ``default_factory=...``).
    """
    extra = {"short": short, "positional": positional, "hidden": hidden}
    if "default_factory" in limits:
        return pydantic.Field(description=help, json_schema_extra=extra, **limits)
    return pydantic.Field(default, description=help, json_schema_extra=extra, **limits)


class DuplicateKeyError(yaml.YAMLError):
    pass


def _loaded(text: str) -> Any:
    """What a YAML text says, with YAML's own rule that its usual readers pass over: a key stands once in a mapping."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, seen: set[int]) -> None:
    if id(node) in seen or not isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        return
    seen.add(id(node))  # an alias is the node itself again, even within itself
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _check_keys(part, seen)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            line = key.start_mark.line + 1
            if key.value in lines:
                raise DuplicateKeyError(f"'{key.value}' twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        _check_keys(value, seen)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, safely loaded; ``localization.weight`` and ``img-size`` mean what the flags mean."""
    try:
        values = _loaded(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.") from None
    except DuplicateKeyError as error:
        raise UserError(f"{path} gives {error}: leave one of them out.") from None
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not a readable YAML file: {reason}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a mapping of option names to values, not a {type(values).__name__}.")
    try:
        return _nested(values, path)
    except RecursionError:
        raise UserError(f"{path} is not a readable YAML file: a mapping in it holds itself.") from None


def _nested(values: dict[Any, Any], path: str | Path, prefix: str = "") -> dict[str, Any]:
    """The values under their plain names: ``a.b`` is ``b`` of the group ``a``, and a dash an underscore."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise UserError(f"{path}: {prefix}{key!r} is no name of an option.")
        *groups, leaf = key.replace("-", "_").split(".")
        inner = _nested(value, path, f"{prefix}{key}.") if isinstance(value, dict) else value
        for group in (leaf, *reversed(groups)):
            inner = {group: inner}
        _join(made, inner, path, prefix)
    return made


_NAME = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")


def _join(made: dict[str, Any], more: dict[str, Any], path: str | Path, prefix: str) -> None:
    """``merge`` into ``made``, where nothing may be said twice."""
    for name, value in more.items():
        if isinstance(made.get(name), dict) and isinstance(value, dict):
            _join(made[name], value, path, f"{prefix}{name}.")
        elif name in made:
            raise UserError(f"{path} gives '{prefix}{name}' twice, written in two ways: leave one of them out.")
        else:
            made[name] = value


def with_file(message: str, file: str, written: Mapping[str, Any]) -> str:
    """A mistake with the file it was made in, where ``written``, which is in it, holds what the message begins with."""
    found = re.match(r"(?:There is no option ')?([\w.]+)", message)
    flags = re.findall(r"--([\w.-]*\w)", message) if message.startswith("--") else []
    names = [found[1]] if found else [flag.replace("-", "_") for flag in flags]
    known = flatten(written)
    here = any(option == name or option.startswith(f"{name}.") for option in known for name in names)
    return f"{file}: {message}" if here else message


def read_yaml_text(text: str) -> Any:
    """What a flag says in YAML: ``{depths: [1, 1]}``; what is no YAML stays the text it is."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def set_dotted(values: dict[str, Any], name: str, value: Any) -> None:
    """``values["a"]["b"] = value`` for the name ``a.b``, making the groups on the way."""
    *groups, leaf = name.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise UserError(f"{name}: '{group}' is a single value, not a group of options.")
    values[leaf] = value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted names, ``set_dotted`` the other way round; an empty group stays a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` on top, groups merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        both_groups = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_groups else value
    return merged


def flat_fields(model: type[Config], prefix: str = "") -> dict[str, pydantic.fields.FieldInfo]:
    """Every leaf option of a configuration by its dotted name."""
    fields: dict[str, pydantic.fields.FieldInfo] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            fields |= flat_fields(inner, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


def _explain(model: type[Config], error: pydantic.ValidationError) -> str:
    """One line for the first mistake: where, what, and the nearest right word."""
    first = error.errors()[0]
    # A union's branch names end a location ("lr.float"); the option's own name is what people know.
    known = flat_fields(model)
    location = ".".join(str(part) for part in first["loc"])
    name = next((n for n in sorted(known, key=len, reverse=True) if (location + ".").startswith(n + ".")), location)
    if first["type"] == "extra_forbidden":
        group = location.rpartition(".")[0]
        groups = {n.rpartition(".")[0]: None for n in known if "." in n}
        here = [n for n in (*known, *groups) if n.rpartition(".")[0] == group] or list(known)
        return f"There is no option '{location}'.{did_you_mean(location, here) or did_you_mean(location, known)}"
    if first["type"] == "missing" and location == name:
        return f"'{name}' is needed and was not given."
    if name not in known and first["type"] == "value_error":  # options that do not go together: the message names them
        return f"{_wanted(None, first)}."
    here = [e for e in error.errors() if ".".join(map(str, e["loc"])).startswith(name)] or [first]
    reason = " or ".join(dict.fromkeys(_wanted(known.get(name), e) for e in here))
    if not any(e["type"] == "value_error" for e in here):
        reason = f"it must be {reason}"
    choices = [
        word for e in here if e["type"] == "literal_error" for word in _choices(e.get("ctx", {}).get("expected", ""))
    ]
    given = first.get("input")
    words = did_you_mean(str(given), choices) if choices else _instead(name, given)
    return f"{name} = {_shown(given)}: {reason}.{words}"


_INSTEAD = {
    "data": "Write what is in memory once with fv.save_data, and give the folder that it returns.",
    "model": "Give the run, folder or file that it was loaded from.",
    "init": "Give the run, folder or file that the weights lie in.",
    "backbone": "Give the name of the network.",
}


def _instead(name: str, given: object) -> str:
    """What to give for something that only a program can have given: arrays, datasets, models."""
    plain = given is None or isinstance(given, str | int | float)
    return f" {_INSTEAD[name]}" if name in _INSTEAD and not plain else ""


_LONGEST = 200  # letters of a value in a message


def _shown(value: object) -> str:
    """A value in a message; of an array, an object or the like its kind."""
    text = repr(value)
    telling = len(text) < _LONGEST and "\n" not in text and " object at 0x" not in text
    return text if telling else f"a {type(value).__name__}"


_KINDS = {
    "finite": "a finite number",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a group, {name: value}",
    "model": "a group of options, {name: value}",
}
_LIMITS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def _wanted(field: pydantic.fields.FieldInfo | None, error: Any) -> str:
    """What a value should have been, in our words where pydantic's are a programmer's."""
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind in _LIMITS:
        return _LIMITS[kind].format(
            **{name: f"{limit:{',' if limit > 1e6 else 'g'}}" for name, limit in context.items()}
        )
    if kind == "literal_error":
        return context["expected"]
    if kind in ("missing", "too_long", "tuple_type") and field is not None:
        parts = [
            getattr(part, "__origin__", part) if typing.get_origin(part) is typing.Annotated else part
            for part in (field.annotation, *typing.get_args(field.annotation))
        ]
        tuples = [typing.get_args(part) for part in parts if typing.get_origin(part) is tuple]
        if not tuples or ... in tuples[0]:
            return "several values"
        example = (
            f", e.g. {','.join(f'{part:.3g}' for part in field.default)}" if isinstance(field.default, tuple) else ""
        )
        return f"{len(tuples[0])} values{example}"
    word = _KINDS.get(kind.partition("_")[0])
    if word is not None and kind.endswith(("_parsing", "_type", "_from_float", "_number")):
        return word
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _choices(expected: str) -> list[str]:
    """The words of pydantic's "'a', 'b' or 'c'"."""
    return re.findall(r"'([^']*)'", expected)


def positive(value: Any) -> Any:
    """A check for numbers that may also be "auto": zero images or minus three epochs are no length of anything."""
    if any(isinstance(part, int | float) and part <= 0 for part in (value if isinstance(value, tuple) else (value,))):
        raise ValueError("it must be more than 0")
    return value


def check_max_side(value: Any) -> Any:
    """A check for sides of images: what is larger than any picture is a slip, and would take all the memory."""
    if any(
        isinstance(side, int) and side > _LARGEST_SIDE for side in (value if isinstance(value, tuple) else (value,))
    ):
        raise ValueError(f"it must be at most {_LARGEST_SIDE:,} pixels")
    return value


_LARGEST_SIDE = 8192


def split_commas(value: object) -> object:
    """Several values said as one word, as the settings of a comparison do: ``0.1,2``."""
    return value.split(",") if isinstance(value, str) else value


def check_ordered(value: tuple[float, float]) -> tuple[float, float]:
    """A check for ranges."""
    if value[0] > value[1]:
        raise ValueError("the smaller of the two comes first")
    return value
