"""What every process that decodes or reads for a training does first: mind its signals and its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess

import torch

_GRACE = 10.0  # seconds


def begin_worker() -> None:
    """One thread; no orphan when the training is killed; no victim of a signal that means the training.

    Ctrl-C, a closed terminal and a job's signals reach every process of a group. The training finishes its step and
    saves, for which it needs its workers: they outlive SIGTERM by a few seconds and ignore the others.
    """
    torch.set_num_threads(1)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_soon)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True, name="mind the parent").start()


def _leave_soon(number: int, frame: object) -> None:
    timer = threading.Timer(_GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)
