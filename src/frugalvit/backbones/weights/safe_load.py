"""Reading weight files without ever running what is in them.

A ``.pth`` file is a pickle, and a pickle may hold any program. Here torch's restricted unpickler reads it; besides
tensors and plain containers it knows the harmless names that released checkpoints carry: argparse.Namespace, and by
inert stand-ins yacs' CfgNode and NumPy's scalars with their types. Everything else is refused with its name.
"""

from __future__ import annotations

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

_NUMBER = re.compile(r"[fiu][1248]|b1")
_TORCH_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"  # opens every file of torch.save before it wrote zip archives


class _Mapping:
    """Stands in for yacs.config.CfgNode (Microsoft Swin, VTs-Drloc): a plain ordered mapping of its values."""

    def __new__(cls) -> OrderedDict:  # type: ignore[misc]
        return OrderedDict()


class _NumberType:
    """Stands in for numpy.dtype: remembers a number's format ("f8") and byte order, nothing more."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        if not _NUMBER.fullmatch(code):
            raise ValueError(f"a NumPy type that is no plain number: {code}")
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _number(kind: _NumberType, data: bytes | str) -> int | float | bool:
    """Stands in for NumPy's scalar constructor: the schedules of DINO and EsViT leave float64 in the optimiser."""
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
    """The dictionary in a ``.pth``, ``.pt``, ``.bin`` or ``.safetensors`` file, told apart by content, on the CPU.

    Nothing in the file is executed. Whatever is not a readable checkpoint raises UserError with the reason.
    """
    return read_with_metadata(path)[0]


def read_with_metadata(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """``read_checkpoint`` and the text metadata a safetensors file may carry."""
    path = Path(path)
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".pth", ".pt", ".bin"))
        hint = f"name a file in it: {', '.join(inside[:5])}" if inside else "it holds no weight files either"
        raise UserError(f"{path} is a folder, not a checkpoint file; {hint}.")
    try:
        with path.open("rb") as file:
            head = file.read(512)
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint file {path}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    if size == 0:
        raise UserError(f"{path} is empty (0 bytes); download or copy it again.")
    if _looks_like_safetensors(head):
        return _read_safetensors(path)
    if not head.startswith((b"PK\x03\x04", b"\x80")):
        raise UserError(f"{path} {_what_else(head)}")
    if head.startswith(b"PK"):
        _check_archive(path)
    elif _TORCH_MAGIC not in head[:64]:
        raise UserError(
            f"{path} was refused: it is a bare Python pickle, which may run code when loaded, and not a file of "
            "torch.save; ask for a .safetensors file."
        )
    return _read_torch(path), {}


def _looks_like_safetensors(head: bytes) -> bool:
    return len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is a truncated or damaged safetensors file ({_line(error)}); copy it again.") from None


def _check_archive(path: Path) -> None:
    """A zip archive must be one that torch.save wrote: complete, holding data.pkl, nothing compressed."""
    damaged = f"{path} is truncated or damaged: its end, where the table of contents stands, is missing; copy it again."
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise UserError(damaged) from None
    names = [member.filename for member in members]
    if any(re.match(r"[^/]+/code/", name) or name.endswith("/constants.pkl") for name in names):
        raise UserError(f"{path} is a TorchScript program, not a checkpoint; save the model's state_dict() instead.")
    if any(name.endswith("archive_format") for name in names):
        raise UserError(f"{path} is an exported program (.pt2), not a checkpoint; give the weights it was made from.")
    if not any(name.endswith("/data.pkl") for name in names):
        kind = "a NumPy archive" if names and all(name.endswith(".npy") for name in names) else "a zip archive"
        raise UserError(f"{path} is {kind}, not a torch checkpoint; unpack it and name the checkpoint inside.")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        # torch.save never compresses: a compressed member could unpack to any size.
        raise UserError(f"{path} was not written by torch.save: it is compressed; unpack and save it again.")


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's doubts about the pickle's version: it loads, or we say why not
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any byte may be damaged, so any error may come; each becomes one clear line
        raise UserError(_why_not(path, error)) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a checkpoint (a dictionary of tensors).")
    return content


def _why_not(path: Path, error: Exception) -> str:
    text = _line(error)
    asked = re.search(
        r"GLOBAL ([\w.]+)|reduce for unrecognized function (\S+ \S+)|create new object for .* got (.*)", text
    )
    if asked:
        name = next(group for group in asked.groups() if group)
        return (
            f"{path} was refused: loading it would run code (it asks for '{name}'), and a checkpoint must not. "
            "Ask for a .safetensors file, or save only state_dict() where you trust the file."
        )
    reason = text.rpartition("WeightsUnpickler error: ")[2][:100]
    return f"{path} is truncated or damaged ({reason}); copy or download it again."


def _what_else(head: bytes) -> str:
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "is a web page, not a checkpoint; the download needs a login or another link."
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights; run 'git lfs pull' where it came from."
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf")) or head[257:262] == b"ustar":
        return "is a compressed archive; unpack it and name the checkpoint inside."
    if start.startswith((b"{", b"[")):
        return "is a JSON text, not a checkpoint."
    return "is not a checkpoint: neither safetensors nor written by torch.save."


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
