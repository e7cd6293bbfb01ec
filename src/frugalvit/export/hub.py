"""Upload an exported folder to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import validate_repo_id

from frugalvit.errors import UserError


def push_folder(name: str, folder: Path | None = None, private: bool = False) -> str:
    """Create the model on the hub if it is missing, upload the files, and return its address.

    Without a folder it only checks the name, the token and the connection.
    """
    if get_token() is None:
        raise UserError(f"--push {name} needs a token of the hub. Run 'hf auth login', or set HF_TOKEN.")
    api = HfApi()
    try:
        if folder is None:
            validate_repo_id(name)
            return api.whoami()["name"]
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Upload by frugalvit")
        return str(address)
    except Exception as error:  # of huggingface_hub, requests or httpx: it depends on the version
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"--push {name}: {api.endpoint}: {text}. Check the name, the token and the network.") from None
