"""A run in one process opens no network socket, and a stranger's model folder neither."""

import json
import socket
from pathlib import Path

import pytest
import timm
from timm.models import get_deprecated_models, model_entrypoint

from frugalvit.backbones.registry import architecture_keywords
from frugalvit.backbones.weights.model_folder import load_model_folder
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from helpers.fork_server import ForkServer
from helpers.tiny_runs import PRETRAIN, TRAIN, write_config, write_images


@pytest.mark.parametrize(("verb", "values"), [("train", TRAIN), ("pretrain", PRETRAIN)])
def test_no_socket_is_bound_or_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, values: dict
) -> None:
    calls: list[str] = []

    def refuse(name: str):
        def call(self: socket.socket, *arguments: object) -> None:
            if self.family != getattr(socket, "AF_UNIX", None):
                calls.append(f"{name}{arguments}")
            raise OSError("no network in this test")

        return call

    for name in ("bind", "listen", "connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse(name))
    images = write_images(tmp_path / "images")
    config = write_config(tmp_path / "config.yaml", values, steps=2, report=True)
    words = [verb, str(images), "--config", str(config), "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet"]
    assert cli.main(words) == 0
    assert calls == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_the_kernel_sees_no_listening_socket(tmp_path: Path) -> None:
    """Also sockets outside of Python: the kernel's table has none of this process."""
    server = ForkServer(tmp_path)
    write_images(tmp_path / "images")
    config = write_config(tmp_path / "config.yaml", TRAIN, steps=100000, cache={"location": "off"}, workers=0)
    child = server.start("train", "images", "--config", str(config), "--out", "run")
    child.wait_for(tmp_path / "run" / "checkpoints" / "last.pt")
    inodes = _sockets(child.pid)
    listening = {line.split()[9] for name in ("tcp", "tcp6", "udp", "udp6") for line in _table(name)}
    child.send(9)  # type: ignore[arg-type]
    child.wait()
    assert not inodes & listening


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _table(name: str) -> list[str]:
    path = Path("/proc/net") / name
    return path.read_text().splitlines()[1:] if path.exists() else []


LOADING = {
    "pretrained": True,
    "pretrained_cfg": {"url": "http://127.0.0.1:9/resnet10t.pth"},
    "pretrained_cfg_overlay": {"file": "weights.pth"},
    "checkpoint_path": "weights.pth",
    "cache_dir": "cache",
    "pretrained_model_args": {},
}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("extra", [{name: value} for name, value in LOADING.items()] + [LOADING])
def test_a_model_folder_cannot_load_anything(ours: bool, extra: dict, tmp_path: Path, monkeypatch) -> None:
    """Keywords in config.json that make timm download, or read another path, are refused before timm sees them."""
    loaded = _record_calls(monkeypatch)
    with pytest.raises(UserError, match="|".join(extra)):
        load_model_folder(_doctored_folder(tmp_path, "resnet10t", ours, extra))
    assert loaded == []


@pytest.mark.parametrize("source", ["hf-hub:timm/resnet10t.c3_in1k", "local-dir:/etc", "hf_hub:a/b", "resnet10t.x:y"])
@pytest.mark.parametrize("ours", [True, False])
def test_a_model_folder_cannot_name_a_hub(source: str, ours: bool, tmp_path: Path, monkeypatch) -> None:
    create_model, loaded = timm.create_model, _record_calls(monkeypatch)
    with pytest.raises(UserError, match=source):
        load_model_folder(_doctored_folder(tmp_path, "frugalvit_small_stem", ours, {"architecture": source}))
    with pytest.raises(UserError, match=source):  # also if timm itself opens the folder
        create_model("frugalvit_small_stem", architecture=source)
    assert loaded == []


def test_no_network_has_a_loading_keyword() -> None:
    """The allow-list of every file of networks has none of the keywords that load."""
    per_file = {model_entrypoint(name).__module__: name for name in timm.list_models()}
    for name in [*per_file.values(), *list(get_deprecated_models())[::50]]:
        assert architecture_keywords(name).isdisjoint({*LOADING, "features_only", "pruned", "pretrained_filter_fn"})
    assert {"embed_dim", "window_size", "global_pool"} <= architecture_keywords("swin_tiny_patch4_window7_224.ms_in1k")
    assert {"embed_dim", "depth"} <= architecture_keywords("vit_base_patch16_224_in21k")  # a deprecated name


def _doctored_folder(folder: Path, architecture: str, ours: bool, extra: dict) -> Path:
    network = {"name": architecture, "keywords": extra, "num_classes": 2, "in_chans": 3, "img_size": 32}
    section = {"frugalvit": network} if ours else {"model_args": extra}
    (folder / "config.json").write_text(json.dumps({"architecture": architecture} | section))
    (folder / "model.safetensors").touch()
    return folder


def _record_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what timm is asked to load. ``build_timm`` turns any error into UserError, so raising is not enough."""
    create_model, loaded = timm.create_model, []

    def create(name: str, **keywords):
        loaded.extend([name] * (":" in name) + [key for key in LOADING if keywords.get(key)])
        if loaded:
            raise AssertionError(loaded)
        return create_model(name, **keywords)

    monkeypatch.setattr(timm, "create_model", create)
    return loaded
