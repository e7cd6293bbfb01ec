"""Processes that decode or read for a training: what each does first, and what is said of one that is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess

import torch

from frugalvit.errors import GUARD, UserError

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


def may_start_others() -> bool:
    """A daemonic process, as a pool of somebody's own may have started this one, has no children."""
    return not multiprocessing.current_process().daemon


def gone(what: str, advice: str, *, answered: bool) -> UserError:
    """Why a process that ``what`` names ended; one that never ``answered`` may not have come as far as its work."""
    if answered:
        return UserError(f"A process that {what} was killed (out of memory?). {advice}")
    return UserError(
        f"A process that {what} ended before its first answer. Called from Python, {GUARD}. If that is so, it was "
        f"killed (out of memory?). {advice}"
    )


def _leave_soon(number: int, frame: object) -> None:
    timer = threading.Timer(_GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)
