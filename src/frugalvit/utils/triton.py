"""Whether a GPU may use our Triton kernels; Triton comes with PyTorch for CUDA on Linux. FRUGALVIT_KERNELS=0: never."""

from __future__ import annotations

import importlib.util
import os

TRITON_AVAILABLE = importlib.util.find_spec("triton") is not None and os.environ.get("FRUGALVIT_KERNELS", "1") != "0"
