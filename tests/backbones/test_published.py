"""Published weights that cannot be had are one line, at once; those that were fetched before need nobody."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import timm
from huggingface_hub import constants
from huggingface_hub.utils import HfHubHTTPError

from frugalvit.backbones import create_backbone, published
from frugalvit.backbones.published import check_within_reach
from frugalvit.errors import UserError

HUB = {"hf_hub_id": "timm/some.tag"}


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's files are kept in an empty folder here."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(published, "_PAUSE", 0.0)
    return tmp_path / "hub"


class Hub:
    """Stands in for the hub's answer, and counts who asks."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers, self.asked = list(answers), list[str]()

    def __call__(self, url: str) -> None:
        self.asked.append(url)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if answer is not None:
            raise answer


def test_without_a_network_there_is_one_line_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the hub's client would wait half a minute
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UserError, match=r"test_vit .*timm/test_vit.*Name or service not known.*--init") as caught,
    ):
        create_backbone("test_vit", img_size=64, pretrained=True)
    assert "\n" not in str(caught.value)
    assert caplog.messages == []


def test_one_lost_packet_is_no_missing_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(OSError("lost"), None)
    monkeypatch.setattr(published, "get_hf_file_metadata", hub)
    check_within_reach("some", HUB)
    assert len(hub.asked) == 2


def test_a_hub_that_refuses_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = HfHubHTTPError.__new__(HfHubHTTPError)  # its arguments differ between versions
    hub = Hub(refusal)
    monkeypatch.setattr(published, "get_hf_file_metadata", hub)
    check_within_reach("some", HUB | {"hf_hub_id": "timm/some.tag@v2", "hf_hub_filename": "own.bin"})
    assert len(hub.asked) == 1 and hub.asked[0].endswith("timm/some.tag/resolve/v2/own.bin")


@pytest.mark.parametrize("more", [{"hf_hub_id": None}, {"file": "weights.pth"}, {"state_dict": {"a": 1}}])
def test_the_hub_is_not_asked_for_what_lies_elsewhere(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    monkeypatch.setattr(published, "get_hf_file_metadata", hub := Hub(OSError("no network")))
    check_within_reach("some", HUB | more)
    assert hub.asked == []


@pytest.mark.parametrize("own", [False, True])
def test_the_hub_is_not_asked_for_what_was_fetched_before(
    monkeypatch: pytest.MonkeyPatch, nothing_kept: Path, tmp_path: Path, own: bool
) -> None:
    monkeypatch.setattr(published, "get_hf_file_metadata", hub := Hub(OSError("no network")))
    cache = tmp_path / "own" if own else nothing_kept
    kept = cache / "models--timm--some.tag" / "snapshots" / "0123"
    kept.mkdir(parents=True)
    with pytest.raises(UserError, match="no network"):
        check_within_reach("some", HUB, str(cache) if own else None)
    asked = len(hub.asked)
    (kept / "model.safetensors").touch()
    check_within_reach("some", HUB, str(cache) if own else None)
    assert len(hub.asked) == asked


def test_what_timm_could_not_do_is_said_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client raises "an error happened" from what has happened."""

    def create(name: str, pretrained: bool = False, **keywords: Any) -> Any:
        if pretrained:
            raise RuntimeError("An error happened") from OSError("503 of the hub\nmore of it")
        return made(name, **keywords)

    made = timm.create_model
    monkeypatch.setattr(published, "get_hf_file_metadata", Hub(None))
    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(UserError, match=r"\(503 of the hub\); check"):
        create_backbone("test_vit", img_size=64, pretrained=True)
