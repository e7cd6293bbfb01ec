"""Published weights: whether they can be had, asked once before timm asks a dozen times and talks about it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HfHubHTTPError

from frugalvit.errors import UserError

_TRIES = 2  # one lost packet is no missing network
_PAUSE = 1.0  # seconds between them


def check_within_reach(name: str, configuration: Mapping[str, Any], cache: str | None = None) -> None:
    """Say in one line that the hub cannot be reached, where weights would have to come from there.

    Without this its client tries every file six times in half a minute, two lines each, and ends without the cause. A
    hub that answers, whatever it answers, is left to timm.

    configuration: timm's ``pretrained_cfg`` of the network
    cache:         where the hub's files are kept, if not at the usual place
    """
    address = configuration.get("hf_hub_id")
    elsewhere = configuration.get("file") or configuration.get("state_dict") or os.environ.get("TIMM_USE_OLD_CACHE")
    if not address or elsewhere:
        return
    repository, _, revision = address.partition("@")
    if _is_kept(repository, Path(cache or constants.HF_HUB_CACHE)):
        return
    file = configuration.get("hf_hub_filename") or "model.safetensors"
    url = hf_hub_url(repository, file, revision=revision or None)
    reason = _unreachable(url)
    if reason:
        raise UserError(
            f"pretrained weights of {name} could not be fetched from {constants.ENDPOINT}/{repository} ({reason}); "
            "check the network, or give a file of weights (--init, load_weights)"
        )


def _is_kept(repository: str, cache: Path) -> bool:
    """Whether anything of a repository was fetched before: then timm may need no network."""
    folder = cache / repo_folder_name(repo_id=repository, repo_type="model") / "snapshots"
    return any(folder.glob("*/*"))


def _unreachable(url: str) -> str:
    """Why nobody answers at an address; nothing where somebody does."""
    reason = ""
    for attempt in range(_TRIES):
        time.sleep(_PAUSE if attempt else 0)
        try:
            get_hf_file_metadata(url)
        except HfHubHTTPError:
            return ""
        except Exception as error:  # of whichever library the hub's client is built on: it has changed twice
            reason = first_line(error)
        else:
            return ""
    return reason


def why(error: Exception) -> str:
    """What has failed, in a line. The hub's client says only that something has, "from" what it was."""
    return first_line(error.__cause__ if isinstance(error.__cause__, Exception) else error)


def first_line(error: Exception) -> str:
    """An error's words, as far as they fit into a line of ours; the name of its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
