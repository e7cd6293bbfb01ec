"""The command: ``frugalvit VERB …``. Each room holds its own commands (``verbs.py``) and loads only when called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import sys
import traceback
from typing import Any

from frugalvit import __version__
from frugalvit.cli.command_table import COMMANDS, Command
from frugalvit.errors import Interrupted, UserError, did_you_mean
from frugalvit.utils import console, launch_env
from frugalvit.utils.signals import Interrupts

_NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)  # disk full, disk read-only, quota used up


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 when it went well, 2 for a mistake of the user, 1 for a fault of ours, 130 after Ctrl-C.

    A command may end with a status of its own: 3 for a run that a signal ended, saved, so that a scheduler knows that
    there is more to do; 1 where ``doctor`` found problems. With ``--json`` standard output says it too.
    """
    with Interrupts(last=argv is None) as interrupts:
        return _answered(sys.argv[1:] if argv is None else argv, interrupts)


def _answered(words: list[str], interrupts: Interrupts) -> int:
    try:
        return _run(words)
    except launch_env.SaidByTheFirst as error:
        if isinstance(error, launch_env.MetByAll) and launch_env.first_goes_on():
            print(f"frugalvit: process {launch_env.rank()}: {shown(str(error))}", file=sys.stderr)
        return 2
    except UserError as error:
        return _fail(words, str(error), 2)
    except Interrupted:
        return _fail(words, "stopped; the same command goes on.", 3)
    except KeyboardInterrupt:
        return _fail(words, "stopped.", 130)
    except BrokenPipeError:
        # `frugalvit list models | head` closes our output; that is no fault of anybody.
        sys.stderr.close()
        return 0
    except Exception as error:
        if interrupts.came:
            return _fail(words, "stopped.", 130)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = f": {error.filename}" if error.filename else ""
            return _fail(words, f"{error.strerror}{where}. What was written before is intact.", 2)
        if _no_memory(error):
            way = "Use fewer images at once (--batch), a smaller --img-size or a smaller model."
            return _fail(words, f"There is not enough memory for this. {way}", 2)
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
        return _fail(words, "this is a fault of frugalvit, not yours; please report the lines above.", 1, fault)


def _fail(words: list[str], message: str, status: int, fault: str | None = None) -> int:
    """Say why a command ended, to people, and where ``--json`` was given to programs.

    fault: for programs, which have no lines above
    """
    console.error(shown(message))
    if "--json" in words and launch_env.is_rank_zero() and not console.is_secondary():
        with contextlib.suppress(OSError):  # nobody reads it
            console.print_json({"error": shown(fault or message), "status": status})
    return status


def _no_memory(error: Exception) -> bool:
    """Whether the machine or its device had no room for what was asked."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from frugalvit.engine.failure_dump import is_out_of_memory

    return is_out_of_memory(error)


def shown(message: str) -> str:
    """A message as the one line that is printed."""
    return console.sanitize(" ".join(message.split()))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"frugalvit {__version__}")
        return 0
    with launch_env.said_once():
        verb = find_command(words)
    if verb is None:
        print(overview(words[0]))
        return 0
    if not verb.distributed and not _does_it_alone(verb):
        return 0
    from frugalvit.cli import parser

    rest = words[len(verb.words.split()) :]
    try:
        with launch_env.said_once():
            config, common = parser.parse(_load(verb.config), rest, f"frugalvit {verb.words}", verb.help)
    except SystemExit:  # argparse printed --help
        return 0
    console.set_quiet(common.quiet)
    with console.Spinner(f"frugalvit {verb.words}"):
        result = _load(verb.function)(config)
    if console.is_secondary():  # of several processes only the first answers
        return 0
    status = int(result.data.get("exit", 0))
    if common.json:
        stopped = result.data.get("stopped")
        why = {"error": f"{stopped}: saved, not finished", "status": status} if stopped else {}
        console.print_json(why | result.data)
    else:
        console.print_result(result)
    return status


def _does_it_alone(verb: Command) -> bool:
    """Whether this process shall do what one process does; of several that torchrun or srun has started the first."""
    found = launch_env.launch_info()
    if found is None:
        return True
    if found.rank == 0:
        console.warning(f"'frugalvit {verb.words}' uses one process: the other {found.processes - 1} leave at once")
        launch_env.clear_launch_env()
    return found.rank == 0


def find_command(words: list[str]) -> Command | None:
    """The verb that ``words`` begin with; None when they name a family of verbs (``probe``) and ask for its help."""
    by_words = {verb.words: verb for verb in COMMANDS}
    pair = " ".join(words[:2])
    if pair in by_words:
        return by_words[pair]
    if words[0] in by_words:
        return by_words[words[0]]
    family = [verb.words.split()[1] for verb in COMMANDS if verb.words.startswith(words[0] + " ")]
    if family:
        if len(words) == 1 or words[1] in ("-h", "--help"):
            return None
        raise UserError(
            f"'{words[0]}' wants one of {', '.join(family)}, not '{words[1]}'.{did_you_mean(words[1], family)}"
        )
    heads = dict.fromkeys(verb.words.split()[0] for verb in COMMANDS)
    raise UserError(f"There is no command '{words[0]}'.{did_you_mean(words[0], heads)} See 'frugalvit --help'.")


def overview(family: str = "") -> str:
    """The help of the whole command, or of one family of verbs."""
    verbs = [verb for verb in COMMANDS if verb.words.split()[0].startswith(family)]
    width = max(len(verb.words) for verb in verbs) + 2
    lines = [f"  {verb.words.ljust(width)}{verb.help}" for verb in verbs]
    head = [
        f"frugalvit {__version__}: train vision transformers when images, labels or compute are scarce",
        "",
        "usage: frugalvit COMMAND [arguments] [options]",
        "",
    ]
    tail = ["", "'frugalvit COMMAND --help' explains a command; every one takes --config FILE, --json and --quiet."]
    return "\n".join(head + lines + tail)


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
