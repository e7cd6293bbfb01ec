"""Is a program being recorded for another place?"""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether ``torch.export`` records this. PyTorch 2.11 says so of every graph that ``torch.compile`` makes, too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
