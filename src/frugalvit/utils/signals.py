"""Ctrl-C during a command, and the signals that stop a run.

An import that Ctrl-C interrupts may raise another error ("module has no attribute"), and a second Ctrl-C may arrive
while the first is handled. Neither should print a traceback.
"""

import os
import signal
import threading
from types import FrameType
from typing import Self


class Interrupts:
    """Record the first Ctrl-C of a command; the second one ends the process at once.

    Does nothing if another program handles or ignores Ctrl-C, or outside of the main thread.
    last: True if the process ends with this command
    """

    def __init__(self, last: bool) -> None:
        self.last, self.has_interrupt = last, False
        is_main = threading.current_thread() is threading.main_thread()
        self._is_active = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> Self:
        if self._is_active:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_active and not (self.last and self.has_interrupt):
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.has_interrupt and self.last:
            os._exit(130)
        self.has_interrupt = True
        signal.default_int_handler(number, frame)


STOP_NOW_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop a run at once the second time they arrive."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: Ctrl-C, SIGTERM, SLURM's warning, and a closed terminal without nohup."""
    warnings = [getattr(signal, name) for name in ("SIGUSR1", "SIGHUP") if hasattr(signal, name)]
    return [*STOP_NOW_SIGNALS, *(number for number in warnings if signal.getsignal(number) is not signal.SIG_IGN)]
