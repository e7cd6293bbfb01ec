"""Ctrl-C during a command (``Interrupts``), and the signals that stop a run (``GracefulStop``)."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from frugalvit.utils import console

STOP_NOW_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # signals that stop a run at once the second time they arrive


class Interrupts:
    """Record the first Ctrl-C of a command; the second one ends the process at once.

    An import that Ctrl-C interrupts may raise another error ("module has no attribute"), and a second Ctrl-C may arrive
    while the first is handled. Neither should print a traceback.
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


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: Ctrl-C, SIGTERM, SIGUSR1 (SLURM), and SIGHUP without nohup."""
    warnings = [getattr(signal, name) for name in ("SIGUSR1", "SIGHUP") if hasattr(signal, name)]
    return [*STOP_NOW_SIGNALS, *(number for number in warnings if signal.getsignal(number) is not signal.SIG_IGN)]


class GracefulStop:
    """The first signal (``received``, else 0) ends a run after its step and saves; a second one ends it at once."""

    def __init__(self) -> None:
        self.received = 0
        self._is_writing = self._is_impatient = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals inside this context. Outside the main thread their owner handles them."""
        try:
            before = {number: signal.signal(number, self.handle) for number in stop_signals()}
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Finish writing before a second signal takes effect.

        An exception inside ``torch.save`` could disappear or look like a disk error. One inside TensorBoard's queue
        makes its thread sleep for half a minute.
        """
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
        if self._is_impatient:
            raise KeyboardInterrupt

    def handle(self, number: int, frame: object) -> None:
        """Remember the first signal; raise KeyboardInterrupt at a second Ctrl-C or SIGTERM.

        SLURM sends SIGUSR1 before SIGTERM, and a closed terminal sends SIGHUP with others: neither counts as a second,
        impatient signal.
        """
        if self.received in STOP_NOW_SIGNALS and number in STOP_NOW_SIGNALS:
            if self._is_writing and not self._is_impatient:  # the third signal does not wait for the disk
                self._is_impatient = True
                return
            raise KeyboardInterrupt
        if not self.received:
            console.warning("stopping after this step; press again to stop at once")
        if self.received not in STOP_NOW_SIGNALS:
            self.received = number
