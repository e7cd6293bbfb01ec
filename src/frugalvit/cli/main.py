"""Run the command that argv names, and return an exit status. A command's modules are imported when it is called."""

import contextlib
import errno
import sys
import traceback
from pathlib import Path

from frugalvit import __version__
from frugalvit.cli.commands import COMMANDS, Command
from frugalvit.errors import Interrupted, LostRankError, ReportedError, UserError, did_you_mean
from frugalvit.utils import console, launch_env
from frugalvit.utils.signals import Interrupts

_DISK_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)  # disk full, disk read-only, quota used up


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: success; 1: a bug of ours, or problems that ``doctor`` reports; 2: a mistake of the user; 3: a signal ended the
    run, it is saved and can be resumed; 130: Ctrl-C. With ``--json`` an error is also printed on standard output.
    """
    with Interrupts(last=argv is None) as interrupts:
        return _run_and_report(sys.argv[1:] if argv is None else argv, interrupts)


def _run_and_report(words: list[str], interrupts: Interrupts) -> int:
    """Run the command; turn every exception into one line and an exit status."""
    try:
        console.set_rank(launch_env.rank())
        return _run(words)
    except UserError as error:
        return 2 if _is_printed_by_rank_zero(error) else _fail(words, str(error), 2)
    except Interrupted:
        return _fail(words, "stopped; the same command continues.", 3)
    except KeyboardInterrupt:
        return _fail(words, "stopped.", 130)
    except BrokenPipeError:  # `frugalvit list models | head` closes our output
        sys.stderr.close()
        return 0
    except Exception as error:
        if interrupts.has_interrupt:
            return _fail(words, "stopped.", 130)
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            path = f": {error.filename}" if error.filename else ""
            return _fail(words, f"{error.strerror}{path}. Files written before are intact.", 2)
        if _is_out_of_memory(error):
            return _fail(words, "Out of memory. Lower --batch or --img-size, or use a smaller model.", 2)
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
        return _fail(words, "this is a bug in frugalvit; please report the lines above.", 1, fault)


def _is_printed_by_rank_zero(error: UserError) -> bool:
    """True if this is another rank, and rank 0 prints the same error."""
    if console.get_rank() == 0 or isinstance(error, LostRankError):
        return False
    return isinstance(error, ReportedError) or not launch_env.is_rank_zero_alive()


def _fail(words: list[str], message: str, status: int, json_message: str | None = None) -> int:
    """Print why a command ended; ``--json`` prints ``json_message``, or the same, on standard output too."""
    console.error(format_line(message))
    if "--json" in words and console.get_rank() == 0:
        with contextlib.suppress(OSError):  # the output was closed
            console.print_json({"error": format_line(json_message or message), "status": status})
    return status


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from frugalvit.engine.failure_dump import is_out_of_memory

    return is_out_of_memory(error)


def format_line(message: str) -> str:
    """Format a message as one line without control characters."""
    return console.sanitize(" ".join(message.split()))


def _run(words: list[str]) -> int:
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(f"The current folder cannot be used ({error.strerror}). Change to another one: cd ~") from None
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"frugalvit {__version__}")
        return 0
    command = find_command(words)
    if command is None:
        print(overview(words[0]))
        return 0
    if not command.distributed and not _continue_alone(command):
        return 0
    from frugalvit.cli import parser

    options = words[len(command.name.split()) :]
    try:
        config, common = parser.parse(command.load_config(), options, f"frugalvit {command.name}", command.help)
    except SystemExit:  # argparse printed --help
        return 0
    console.set_quiet(common.quiet)
    console.info_once.cache_clear()
    result = command.load_function()(config)
    if console.get_rank() > 0:
        return 0
    status = int(result.data.get("exit", 0))
    if common.json:
        stopped = result.data.get("stopped")
        reason = {"error": f"{stopped}: saved, not finished", "status": status} if stopped else {}
        console.print_json(reason | result.data)
    else:
        console.print_result(result)
    return status


def _continue_alone(command: Command) -> bool:
    """True on rank 0, which then runs a single-process command as if there were no other ranks."""
    launch = launch_env.launch_info()
    if launch is None:
        return True
    if launch.rank == 0:
        console.warning(f"'frugalvit {command.name}' uses one process; the other {launch.processes - 1} end now")
        launch_env.clear_launch_env()
    return launch.rank == 0


def find_command(words: list[str]) -> Command | None:
    """Return the command that ``words`` start with; None if they ask for the help of a group (``probe``)."""
    by_name = {command.name: command for command in COMMANDS}
    for name in (" ".join(words[:2]), words[0]):
        if name in by_name:
            return by_name[name]
    group = [command.name.split()[1] for command in COMMANDS if command.name.startswith(words[0] + " ")]
    if group:
        if len(words) == 1 or words[1] in ("-h", "--help"):
            return None
        hint = did_you_mean(words[1], group)
        raise UserError(f"'{words[0]} {words[1]}' is not a command. Use one of {', '.join(group)}.{hint}")
    first_words = dict.fromkeys(command.name.split()[0] for command in COMMANDS)
    raise UserError(f"There is no command '{words[0]}'.{did_you_mean(words[0], first_words)} See 'frugalvit --help'.")


def overview(group: str = "") -> str:
    """Return the help of all commands, or of one group of them."""
    commands = [command for command in COMMANDS if command.name.split()[0].startswith(group)]
    width = max(len(command.name) for command in commands) + 2
    return "\n".join(
        [
            f"frugalvit {__version__}: train vision transformers when images, labels or compute are scarce",
            "",
            "usage: frugalvit COMMAND [arguments] [options]",
            "",
            *(f"  {command.name.ljust(width)}{command.help}" for command in commands),
            "",
            "'frugalvit COMMAND --help' explains a command. Every command takes --config FILE, --json and --quiet.",
        ]
    )
