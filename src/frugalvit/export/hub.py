"""Upload an exported folder to the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils import validate_repo_id

from frugalvit.errors import UserError


def check_hub(name: str) -> huggingface_hub.HfApi:
    """Check the name, the token and the connection before any work."""
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise UserError(f"--push {name}: {' '.join(str(error).split())}") from None
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push {name} needs a token of the hub. Run 'hf auth login', or set HF_TOKEN.")
    api = huggingface_hub.HfApi()
    with _explain_errors(name, api):
        api.whoami()
    return api


def push_folder(api: huggingface_hub.HfApi, folder: Path, name: str, private: bool) -> str:
    """Create the model on the hub if it is missing, upload the files, and return its address."""
    with _explain_errors(name, api, f" The export is in {folder}."):
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Upload by frugalvit")
    return str(address)


@contextmanager
def _explain_errors(name: str, api: huggingface_hub.HfApi, hint: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of huggingface_hub, requests or httpx: it depends on the version
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"--push {name}: {api.endpoint} did not accept it ({text}). Check the token and the network.{hint}"
        ) from None
