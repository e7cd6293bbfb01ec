"""A fake Apple GPU: tensors that report "mps" and refuse what MPS refuses, computed on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

MPS = torch.device("mps")


class OnMps(Tensor):
    """A tensor "on mps"."""


class AppleGpu(TorchFunctionMode):
    """Refuse doubles on the device and operations across devices; wrap results."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if getattr(function, "__self__", None) is Tensor.device:
            return MPS if isinstance(args[0], OnMps) else torch.device("cpu")
        if function in (Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__float__):
            return function(*[_plain(a) for a in args], **kwargs)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        on_mps = any(isinstance(tensor, OnMps) for tensor in tensors)
        devices = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.device | str)]
        target = next((torch.device(a) for a in devices if str(a) in ("mps", "cpu")), None)
        if target is None and on_mps and name not in ("index_select", "__getitem__", "__setitem__", "copy_", "to"):
            others = [tensor for tensor in tensors if not isinstance(tensor, OnMps) and tensor.dim() > 0]
            assert not others, f"{name} mixes tensors of the CPU and of the device"
        plain = tree_map(lambda leaf: torch.device("cpu") if str(leaf) == "mps" else _plain(leaf), (args, kwargs))
        result = function(*plain[0], **plain[1])
        on_device = target == MPS if target is not None else on_mps
        return tree_map(lambda leaf: _wrap(leaf, name) if on_device else leaf, result)


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, OnMps) else leaf


def _wrap(leaf: Any, name: str) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dtype == torch.float64:
        raise TypeError(f"{name}: the MPS framework doesn't support float64")
    return leaf.as_subclass(OnMps)
