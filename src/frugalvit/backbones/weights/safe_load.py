"""Read weight files without running code in them.

A ``.pth`` file is a pickle, and a pickle can run any program. So torch's restricted unpickler reads it. Besides tensors
and plain containers it allows the harmless classes in released checkpoints: argparse.Namespace, and inert replacements
of yacs' CfgNode and of NumPy's scalars and their types. Any other class raises an error that names it.
"""

import argparse
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from frugalvit.errors import UserError
from frugalvit.utils.files import open_regular, read_error_message

_NUMBER = re.compile(r"[fiu][1248]|b1")
_TORCH_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"  # start of every file of torch.save before it wrote zip archives


class _Mapping:
    """Replaces yacs.config.CfgNode (Microsoft Swin, VTs-Drloc) by a plain ordered mapping."""

    def __new__(cls) -> OrderedDict:  # type: ignore[misc]
        return OrderedDict()


class _NumberType:
    """Replaces numpy.dtype: stores a number's format ("f8") and byte order."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        if not _NUMBER.fullmatch(code):
            raise ValueError(f"not the NumPy type of a plain number: {code}")
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _number(kind: _NumberType, data: bytes | str) -> int | float | bool:
    """Replaces NumPy's scalar constructor: the schedules of DINO and EsViT store float64 in the optimizer."""
    letters = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}
    letters |= {f"u{size}": letters[f"i{size}"].upper() for size in (1, 2, 4, 8)}
    packed = data.encode("latin1") if isinstance(data, str) else data
    return struct.unpack(kind.order + letters[kind.code], packed)[0]


_ALLOWED: list[Any] = [
    argparse.Namespace,
    (_Mapping, "yacs.config.CfgNode"),
    (_NumberType, "numpy.dtype"),
    (_number, "numpy.core.multiarray.scalar"),
    (_number, "numpy._core.multiarray.scalar"),
]


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read the dictionary in a ``.pth``, ``.pt``, ``.bin`` or ``.safetensors`` file to the CPU.

    The content decides the format, not the file name. Code in the file never runs. An unreadable file raises UserError
    with the reason.
    """
    return read_with_metadata(path)[0]


def read_with_metadata(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """As ``read_checkpoint``, and also return the text metadata of a safetensors file."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return _read_safetensors(path)
    if not head.startswith((b"PK\x03\x04", b"\x80")):
        raise UserError(
            f"{path} is not a checkpoint: neither safetensors nor written by torch.save. It begins with {head[:16]!r}."
        )
    if head.startswith(b"PK"):
        _check_archive(path)
    elif _TORCH_MAGIC not in head[:64]:
        raise UserError(
            f"{path} was refused: it is a plain Python pickle, which may run code when loaded, and not a file of "
            "torch.save; use a .safetensors file."
        )
    return _read_torch(path), {}


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is a truncated or damaged safetensors file ({_line(error)}); copy it again.") from None


def _check_archive(path: Path) -> None:
    """Check that torch.save wrote a zip archive: complete, with data.pkl, nothing compressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise UserError(f"{path} is truncated or damaged: the end of the file is missing; copy it again.") from None
    names = [member.filename for member in members]
    is_program = any(re.search(r"^[^/]+/code/|/constants\.pkl$|archive_format$", name) for name in names)
    if is_program or not any(name.endswith("/data.pkl") for name in names):
        raise UserError(f"{path} is an archive or a program, not a checkpoint; use a file with the state_dict().")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        # torch.save never compresses: a compressed member could unpack to any size.
        raise UserError(f"{path} is compressed, so torch.save did not write it; unpack and save it again.")


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the pickle's version
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged byte can cause any error
        raise UserError(_explain(path, error)) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} contains a {type(content).__name__}, not a checkpoint (a dictionary of tensors).")
    return content


def _explain(path: Path, error: Exception) -> str:
    text = _line(error)
    refused = re.search(
        r"GLOBAL ([\w.]+)|reduce for unrecognized function (\S+ \S+)|create new object for .* got (.*)", text
    )
    if refused:
        name = next(group for group in refused.groups() if group)
        return (
            f"{path} was refused: loading it would run code ('{name}'). "
            "Use a .safetensors file, or save only the state_dict()."
        )
    reason = text.rpartition("WeightsUnpickler error: ")[2][:100]
    return f"{path} is truncated or damaged ({reason}); copy or download it again."


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
