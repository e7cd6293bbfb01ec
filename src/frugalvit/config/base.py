"""The base of all configurations: one definition serves Python, ``--help``, YAML and validation.

Nothing here imports torch, so that ``frugalvit COMMAND --help`` is fast.
"""

import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Self

import pydantic
import yaml

from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils.files import expand_home

SYNONYMS = {
    "localization.weight": ("drloc",),
    "lr": ("learning-rate",),
    "batch": ("batch-size",),
    "backbone": ("model", "arch"),
    "img-size": ("input-size", "image-size", "size"),
    "out": ("output",),
    "init": ("checkpoint", "weights-from"),
    "devices": ("gpus",),
    "precision": ("amp",),
}
"""Our options, and what other programs call them."""


class Config(pydantic.BaseModel):
    """A typed, frozen group of options: unknown names are errors, numbers are finite."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Expand ``~/photos``: a shell does not do this after ``=``, and YAML and Python never do."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, list):
            return [cls._expand_home(item) for item in value]
        return str(expand_home(value)) if isinstance(value, str) and value.startswith("~/") else value

    @pydantic.model_validator(mode="after")
    def _check_partners(self) -> Self:
        """Reject an option that has no effect because the option it ``needs`` is not set."""
        fields = type(self).model_fields
        for name in self.changed_options():
            needs = option_extras(fields[name]).get("needs")
            partners = [part.partition("=") for part in needs.split(" or ")] if needs else []
            if needs and not any(
                getattr(self, key) == wanted if wanted else getattr(self, key) for key, _, wanted in partners
            ):
                flags = [f"{_flag(key, fields[key])} {wanted}".strip() for key, _, wanted in partners]
                raise ValueError(f"{_flag(name, fields[name])} has no effect without {' or '.join(flags)}")
        return self

    def changed_options(self) -> list[str]:
        """Return the names of the options with another value than the default."""

        def plain(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        defaults = {
            name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()
        }
        return [name for name, default in defaults.items() if plain(getattr(self, name)) != plain(default)]

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate nested ``values``; the first mistake is raised as a one-line ``UserError``."""
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            raise UserError(_explain(cls, error)) from None

    @classmethod
    def default_recipes(cls) -> dict[str, dict[str, Any]]:
        """Return the values of each recipe that the command may choose itself; they override the defaults."""
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
    needs: str | None = None,
    **limits: Any,
) -> Any:
    """Define an option with its help text.

    short: a second flag for a dotted or long option, e.g. ``--continue``
    hidden: not in ``--help``; the option exists to be refused with a reason
    needs: the option is refused unless one of these options of its group is set: ``"select or features=grid"``
    limits: pydantic's (``ge=0``, ``gt=0``, ``le=1``, ``default_factory=...``)
    """
    extra = {"short": short, "positional": positional, "hidden": hidden, "needs": needs}
    if "default_factory" in limits:
        return pydantic.Field(description=help, json_schema_extra=extra, **limits)
    return pydantic.Field(default, description=help, json_schema_extra=extra, **limits)


def option_extras(field: pydantic.fields.FieldInfo) -> dict[str, Any]:
    """Return what ``option`` stores about a field: short, positional, hidden, needs."""
    return field.json_schema_extra or {}  # type: ignore[return-value]


def _flag(name: str, field: pydantic.fields.FieldInfo) -> str:
    """Return what ``--help`` shows: ``--img-size``, its second flag (``--guide``), or ``MODEL`` for an argument."""
    extras = option_extras(field)
    short = str(extras.get("short"))
    flag = short if short.startswith("--") else f"--{name.replace('_', '-')}"
    return name.upper() if extras.get("positional") else flag


# -- nested values and dotted names


def set_dotted(values: dict[str, Any], name: str, value: Any) -> None:
    """Set ``values["a"]["b"]`` for the name ``a.b``; missing groups are created."""
    *groups, leaf = name.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise UserError(f"{name}: '{group}' is a single value, not a group of options.")
    values[leaf] = value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested values to dotted names, the inverse of ``set_dotted``; an empty group stays a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over`` on top; groups are merged option by option."""
    merged = dict(base)
    for key, value in over.items():
        both_groups = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_groups else value
    return merged


def flat_fields(model: type[Config], prefix: str = "") -> dict[str, pydantic.fields.FieldInfo]:
    """Return every option of a configuration by its dotted name."""
    fields: dict[str, pydantic.fields.FieldInfo] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            fields |= flat_fields(inner, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


# -- messages


def with_file(message: str, file: str, values: Mapping[str, Any]) -> str:
    """Put the file's name before a message if the file sets the option that the message starts with."""
    match = re.match(r"(?:There is no option ')?([\w.]+)", message)
    flags = re.findall(r"--([\w.-]*\w)", message) if message.startswith("--") else []
    names = [match[1]] if match else [flag.replace("-", "_") for flag in flags]
    is_in_file = any(option == name or option.startswith(f"{name}.") for option in flatten(values) for name in names)
    return f"{file}: {message}" if is_in_file else message


def _explain(model: type[Config], error: pydantic.ValidationError) -> str:
    """Describe the first mistake in one line: the option, its value, the allowed values, a close match."""
    first = error.errors()[0]
    known = flat_fields(model)
    location = ".".join(str(part) for part in first["loc"])
    # A location may end with a branch of a union ("lr.float"): find the option that it starts with.
    name = next((n for n in sorted(known, key=len, reverse=True) if (location + ".").startswith(n + ".")), location)
    if first["type"] == "extra_forbidden":
        group = location.rpartition(".")[0]
        groups = {n.rpartition(".")[0]: None for n in known if "." in n}
        siblings = [n for n in (*known, *groups) if n.rpartition(".")[0] == group] or list(known)
        same = [ours.replace("-", "_") for ours, theirs in SYNONYMS.items() if location.replace("_", "-") in theirs]
        hint = "".join(f" Did you mean '{name}'?" for name in same if name in known)
        hint = hint or did_you_mean(location, siblings) or did_you_mean(location, known)
        return f"There is no option '{location}'.{hint}"
    if first["type"] == "missing" and location == name:
        return f"'{name}' is missing."
    if name not in known and first["type"] == "value_error":  # options that contradict each other
        return _with_group(location, known, _expected(None, first).rstrip(".") + ".")
    errors = [e for e in error.errors() if ".".join(map(str, e["loc"])).startswith(name)] or [first]
    reason = " or ".join(dict.fromkeys(_expected(known.get(name), e) for e in errors))
    if not any(e["type"] == "value_error" for e in errors):
        reason = f"it must be {reason}"
    literals = [e.get("ctx", {}).get("expected", "") for e in errors if e["type"] == "literal_error"]
    choices = [choice for literal in literals for choice in re.findall(r"'([^']*)'", literal)]
    value = first.get("input")
    text = repr(value)
    is_readable = len(text) < 200 and "\n" not in text and " object at 0x" not in text
    text = text if is_readable else f"a {type(value).__name__}"
    return f"{name} = {text}: {reason}.{did_you_mean(str(value), choices) if choices else ''}"


def _with_group(group: str, known: Collection[str], message: str) -> str:
    """Write ``--ratio`` of a group's message as ``--semi.ratio``."""
    names = {name.removeprefix(f"{group}.").replace("_", "-") for name in known if name.startswith(f"{group}.")}
    return re.sub(r"--([a-z-]+)", lambda flag: f"--{group}.{flag[1]}" if flag[1] in names else flag[0], message)


_TYPES = {
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


def _expected(field: pydantic.fields.FieldInfo | None, error: Any) -> str:
    """Translate pydantic's error into what the value should be."""
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind in _LIMITS:
        limits = {name: f"{limit:{',' if limit > 1e6 else 'g'}}" for name, limit in context.items()}
        return _LIMITS[kind].format(**limits)
    if kind == "literal_error":
        return context["expected"]
    if kind in ("missing", "too_long", "tuple_type") and field is not None:
        example = ",".join(f"{part:.3g}" for part in field.default) if isinstance(field.default, tuple) else ""
        return f"several values, e.g. {example}" if example else "several values"
    expected = _TYPES.get(kind.partition("_")[0])
    if expected is not None and kind.endswith(("_parsing", "_type", "_from_float", "_number")):
        return expected
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]
