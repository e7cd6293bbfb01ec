"""TRITON_AVAILABLE: PyTorch for CUDA on Linux brings Triton. FRUGALVIT_KERNELS=0 turns our kernels off."""

import importlib.util
import os

TRITON_AVAILABLE = importlib.util.find_spec("triton") is not None and os.environ.get("FRUGALVIT_KERNELS", "1") != "0"
