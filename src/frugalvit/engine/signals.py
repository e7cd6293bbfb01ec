"""GracefulStop: the first signal ends a run after its step and saves; a second one ends it at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from frugalvit.utils import console
from frugalvit.utils.signals import STOP_NOW_SIGNALS, stop_signals


class GracefulStop:
    """Handles the signals of a run. ``received`` is the number of the first stop signal, or 0."""

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

        An exception inside ``torch.save`` could be swallowed or look like a disk error, and one inside TensorBoard's
        queue makes its thread sleep for half a minute.
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
