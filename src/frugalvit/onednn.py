"""oneDNN, a switch of the whole process: what is turned here is the caller's again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_callers = True


@contextmanager
def given_back() -> Iterator[None]:
    """oneDNN is after this as it was before. Counted: of several threads inside, the last to leave turns it back."""
    global _inside, _callers
    with _lock:
        if _inside == 0:
            _callers = torch.backends.mkldnn.enabled
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.backends.mkldnn.enabled = _callers
