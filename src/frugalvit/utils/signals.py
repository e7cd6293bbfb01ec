"""Ctrl-C, wherever it lands.

An import that is broken off may end with an error of another name (a module that "has no attribute"), and a second
Ctrl-C in the midst of leaving with a traceback. Neither is a fault of anybody.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Self


class Interrupts:
    """Remembers the first Ctrl-C of a command, which ends it as ever; the second ends the process at once.

    Where Ctrl-C is somebody else's business (ignored, another handler, not the main thread) it stays so.
    last: whether the process ends with this command, so that a second Ctrl-C may come as late as it likes
    """

    def __init__(self, last: bool) -> None:
        self.last, self.came = last, False
        self._ours = threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )

    def __enter__(self) -> Self:
        if self._ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours and not (self.last and self.came):
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came and self.last:
            os._exit(130)
        self.came = True
        signal.default_int_handler(number, frame)


STOP_NOW_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Of those that ask a run to stop: the ones that mean, the second time, at once."""


def stop_signals() -> list[signal.Signals]:
    """What asks a run to stop: Ctrl-C, SIGTERM, SLURM's warning and a closed terminal, which nohup has it ignore."""
    warned = [getattr(signal, name) for name in ("SIGUSR1", "SIGHUP") if hasattr(signal, name)]
    return [*STOP_NOW_SIGNALS, *(number for number in warned if signal.getsignal(number) is not signal.SIG_IGN)]
