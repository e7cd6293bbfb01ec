"""``frugalvit completion bash|zsh|fish``: a script made from the verbs and their options, so it never falls behind.

The script is plain text for the shell: pressing Tab starts no Python.
"""

from __future__ import annotations

import importlib
import re
from argparse import SUPPRESS
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin

from frugalvit.cli.command_table import COMMANDS
from frugalvit.cli.parser import make_parser
from frugalvit.config.base import Config
from frugalvit.config.recipes import all_recipes
from frugalvit.config.tools import CompletionConfig, ReproduceConfig
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult

INSTALL = {
    "bash": "mkdir -p ~/.local/share/bash-completion/completions && "
    "frugalvit completion bash --quiet > ~/.local/share/bash-completion/completions/frugalvit",
    "zsh": "echo 'source <(frugalvit completion zsh --quiet)' >> ~/.zshrc",
    "fish": "mkdir -p ~/.config/fish/completions && "
    "frugalvit completion fish --quiet > ~/.config/fish/completions/frugalvit.fish",
}
_STANDS_FOR_A_VALUE = re.compile(r"[A-Z]+(,[A-Z]+)*")  # N, TEXT, X,X: not a choice


@dataclass
class Words:
    """A verb: its options with their help, and what may follow an option."""

    verb: str
    help: str
    flags: dict[str, str] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)


def completion(config: CompletionConfig) -> CommandResult:
    """The script on standard output, the line that installs it on standard error."""
    script = {"bash": bash, "zsh": zsh, "fish": fish}[config.shell](describe())
    console.info(f"to install it:  {INSTALL[config.shell]}")
    return CommandResult({"shell": config.shell, "install": INSTALL[config.shell], "script": script}, [], [script])


def describe() -> list[Words]:
    """Every verb with its options, as the parser itself knows them."""
    from frugalvit.backbones.registry import MODEL_NAMES

    found = []
    for verb in COMMANDS:
        module, _, name = verb.config.partition(":")
        config = getattr(importlib.import_module(module), name)
        parser = make_parser(config, verb.words, verb.help)
        names = {"--backbone": list(MODEL_NAMES)}
        if hasattr(config, "recipe_task"):
            names["--recipe"] = [recipe.name for recipe in all_recipes() if recipe.task == config.recipe_task()]
        words = Words(verb.words, verb.help)
        for action in (action for action in parser._actions if action.help != SUPPRESS):
            for flag in (flag for flag in action.option_strings if flag.startswith("--")):
                words.flags[flag] = (action.help or "").replace("%%", "%").split(" (default")[0]
                if offered := names.get(flag) or _choices(str(action.metavar or "")):
                    words.choices[flag] = offered
        if first := _first_words(config):
            words.choices[""] = first
        found.append(words)
    return found


def _first_words(config: type[Config]) -> list[str]:
    """What may follow the verb itself, where that is one of a few words."""
    if config is ReproduceConfig:
        from frugalvit.reproduce.table_spec import list_tables

        return list_tables()
    field = next(iter(config.model_fields.values()))
    return [str(word) for word in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []


def _choices(metavar: str) -> list[str]:
    """The words to choose from in what --help shows for a value: ``auto|N`` -> ``auto``."""
    words = metavar.removesuffix(" …").split("|")
    return [word for word in words if word and not _STANDS_FOR_A_VALUE.fullmatch(word)]


def _heads(verbs: list[Words]) -> dict[str, list[str]]:
    """First words, each with the second words that may follow."""
    heads: dict[str, list[str]] = {}
    for words in verbs:
        first, _, second = words.verb.partition(" ")
        heads.setdefault(first, []).extend([second] if second else [])
    return heads


def bash(verbs: list[Words]) -> str:
    heads = _heads(verbs)
    lines = [
        "# bash completion of frugalvit; made by 'frugalvit completion bash'",
        "_frugalvit() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local verb="${COMP_WORDS[1]}" second="${COMP_WORDS[2]}" flags="" choices="" words=""',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W {_quoted(" ".join([*heads, "--help", "--version"]))} -- "$current")); return',
        "    fi",
        '    case "$verb $second" in',
        *(f'        {_quoted(w.verb)}) verb="$verb $second" ;;' for w in verbs if " " in w.verb),
        "    esac",
        '    case "$verb" in',
    ]
    for words in verbs:
        first = words.verb.partition(" ")[0]
        follow = heads[first] if " " not in words.verb else []
        lines += [f"        {_quoted(words.verb)})", f"            flags={_quoted(' '.join(words.flags))}"]
        extra = [*follow, *words.choices.get("", [])]
        if extra:
            place = 1 + len(words.verb.split())
            lines.append(f'            [ "$COMP_CWORD" -eq {place} ] && words={_quoted(" ".join(extra))}')
        if any(words.choices):
            lines.append('            case "$before" in')
            lines += [f"                {f}) choices={_quoted(' '.join(c))} ;;" for f, c in words.choices.items() if f]
            lines.append("            esac")
        lines.append("            ;;")
    lines += [
        f"        {first}) words={_quoted(' '.join(second))} ;;"
        for first, second in heads.items()
        if _family(first, verbs)
    ]
    lines += [
        "    esac",
        '    if [ -n "$choices" ]; then COMPREPLY=($(compgen -W "$choices" -- "$current"))',
        '    elif [[ "$current" == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$current"))',
        '    else COMPREPLY=($(compgen -W "$words" -- "$current")); fi  # none: files',
        "}",
        "complete -o bashdefault -o default -F _frugalvit frugalvit",
    ]
    return "\n".join(lines)


def zsh(verbs: list[Words]) -> str:
    heads = _heads(verbs)
    helps = {words.verb: words.help for words in verbs}
    first = [f"{head}:{_colon(helps.get(head, ', '.join(rest)))}" for head, rest in heads.items()]
    lines = [
        "#compdef frugalvit",
        "# zsh completion of frugalvit; made by 'frugalvit completion zsh'",
        "_frugalvit() {",
        "    local -a words_here flags",
        '    local verb="$words[2]"',
        "    if (( CURRENT == 2 )); then",
        f"        words_here=({' '.join(map(_quoted, first))})",
        "        _describe 'command' words_here; return",
        "    fi",
        '    case "$verb $words[3]" in',
        *(f'        {_quoted(w.verb)}) (( CURRENT > 3 )) && verb="$verb $words[3]" ;;' for w in verbs if " " in w.verb),
        "    esac",
        '    case "$verb" in',
    ]
    for words in verbs:
        lines.append(f"        {_quoted(words.verb)})")
        lines += ['            case "$words[CURRENT-1]" in'] if any(words.choices) else []
        lines += [f"                {f}) compadd -- {' '.join(c)}; return ;;" for f, c in words.choices.items() if f]
        lines += ["            esac"] if any(words.choices) else []
        follow = [*heads.get(words.verb, []), *words.choices.get("", [])]
        if follow:
            lines.append(f"            (( CURRENT == {2 + len(words.verb.split())} )) && compadd -- {' '.join(follow)}")
        flags = [f"{flag}:{_colon(text)}" for flag, text in words.flags.items()]
        lines += [f"            flags=({' '.join(map(_quoted, flags))})", "            ;;"]
    lines += [
        f"        {first}) compadd -- {' '.join(second)}; return ;;"
        for first, second in heads.items()
        if _family(first, verbs)
    ]
    lines += [
        "    esac",
        "    if [[ \"$words[CURRENT]\" == -* ]]; then _describe -o 'option' flags; else _files; fi",
        "}",
        "compdef _frugalvit frugalvit",
    ]
    return "\n".join(lines)


def fish(verbs: list[Words]) -> str:
    lines = ["# fish completion of frugalvit; made by 'frugalvit completion fish'"]
    helps = {words.verb: words.help for words in verbs}
    for head, rest in _heads(verbs).items():
        text = _quoted(helps.get(head, ", ".join(rest)))
        lines.append(f"complete -c frugalvit -n __fish_use_subcommand -f -a {head} -d {text}")
        for second in rest:
            test = f"__fish_seen_subcommand_from {head}; and not __fish_seen_subcommand_from {' '.join(rest)}"
            lines.append(f"complete -c frugalvit -n '{test}' -f -a {second} -d {_quoted(helps[f'{head} {second}'])}")
    for words in verbs:
        test = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words.verb.split())
        for flag, text in words.flags.items():
            offered = words.choices.get(flag)
            more = f" -x -a {_quoted(' '.join(offered))}" if offered else ""
            lines.append(f"complete -c frugalvit -n '{test}' -l {flag[2:]}{more} -d {_quoted(text)}")
        if "" in words.choices:
            lines.append(f"complete -c frugalvit -n '{test}' -f -a {_quoted(' '.join(words.choices['']))}")
    return "\n".join(lines)


def _family(first: str, verbs: list[Words]) -> bool:
    """Whether a first word is only a family (``probe``) and no verb of its own (``data``)."""
    return all(words.verb != first for words in verbs)


def _quoted(text: str) -> str:
    """In single quotes, as all three shells take it; quotes inside become typographic ones."""
    return "'" + text.replace("'", "’").replace("\n", " ") + "'"


def _colon(text: str) -> str:
    return text.replace(":", r"\:")
