"""Upload an exported folder to the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub

from frugalvit.errors import UserError


def check_hub(name: str) -> huggingface_hub.HfApi:
    """Check the name, the token and the connection before any work."""
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push {name} needs a token of the hub. Run 'hf auth login', or set HF_TOKEN.")
    api = huggingface_hub.HfApi()
    with _explain_errors(name, api):
        huggingface_hub.utils.validate_repo_id(name)
        api.whoami()
    return api


def push_folder(api: huggingface_hub.HfApi, folder: Path, name: str, private: bool) -> str:
    """Create the model on the hub if it is missing, upload the files, and return its address."""
    with _explain_errors(name, api):
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Upload by frugalvit")
    return str(address)


@contextmanager
def _explain_errors(name: str, api: huggingface_hub.HfApi) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of huggingface_hub, requests or httpx: it depends on the version
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"--push {name}: {api.endpoint}: {text}. Check the name, the token and the network.") from None
