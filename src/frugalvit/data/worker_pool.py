"""Worker processes that decode images or read shards; they exit with their parent process."""

import multiprocessing as stdlib_multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import multiprocessing  # torch's sends tensors through shared memory

from frugalvit.data import decode
from frugalvit.errors import GUARD, UserError

_GRACE = 10.0  # seconds that a worker still runs after SIGTERM


def may_start_processes() -> bool:
    """False in a daemonic process, as in the pool of another program: it may not have children."""
    return not stdlib_multiprocessing.current_process().daemon


class WorkerPool:
    """Processes that each call the function from ``make(*arguments)``. 0 workers: this process calls it.

    advice: what to do if a process was killed
    """

    def __init__(self, workers: int, make: Callable[..., Callable[..., Any]], *arguments: Any, advice: str) -> None:
        self.pool: ProcessPoolExecutor | None = None
        self.advice = advice
        if workers:
            # Spawned, not forked: forking a process that has threads or a CUDA context can hang.
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(workers, spawn, _start_worker, (make, arguments, spawn.Lock()))
        else:
            self.function = make(*arguments)

    def submit(self, *arguments: Any) -> Callable[[], Any]:
        """Let a process call its function. Returns a function that waits for the result."""
        if self.pool is None:
            return partial(self.function, *arguments)
        try:
            return partial(self._wait, self.pool.submit(_call, *arguments))
        except BrokenProcessPool as error:
            raise self._died() from error

    def _wait(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise self._died() from error
        except (OSError, RuntimeError) as error:  # torch raises a RuntimeError
            if "shared memory" not in str(error) and "No space left" not in str(error):
                raise
            raise UserError(
                "/dev/shm, through which worker processes send images, is full. Use fewer --workers, --workers 0, or "
                "a larger /dev/shm (docker: --shm-size 8g)."
            ) from error

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _died(self) -> UserError:
        return UserError(f"A worker process was killed (out of memory?). {self.advice} In a Python script, {GUARD}.")


_function: Callable[..., Any] | None = None  # set in a worker process


def _start_worker(make: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...], large_images: Any) -> None:
    """Prepare a worker process: one thread, exit with the parent, ignore signals for the training.

    Ctrl-C, a closed terminal and a job's signals reach every process of a group. The training then finishes its step
    and saves. It needs its workers for that: they run on for ten seconds after SIGTERM and ignore the other signals.
    """
    global _function
    decode.large_images = large_images
    torch.set_num_threads(1)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_soon)
    parent = stdlib_multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True, name="watch parent").start()
    _function = make(*arguments)


def _call(*arguments: Any) -> Any:
    assert _function is not None
    return _function(*arguments)


def _exit_soon(number: int, frame: object) -> None:
    timer = threading.Timer(_GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _exit_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)
