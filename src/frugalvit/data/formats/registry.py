"""The dataset formats that ``open_data`` reads. A new format is one file in this folder and one line here."""

from pathlib import Path

from frugalvit.data.formats import csv as table
from frugalvit.data.formats import huggingface, image_folder, named
from frugalvit.data.formats.base import Format
from frugalvit.data.paths import is_folder
from frugalvit.data.webdataset import shards

# The first format that matches opens the dataset, so special folders come before plain ones.
FORMATS = [
    Format("Hugging Face hub", lambda where: where.startswith("hf:"), huggingface.open_hub),
    Format("Hugging Face files", huggingface.is_saved, huggingface.open_saved),
    Format("WebDataset shards", shards.is_shards, lambda where, options: shards.open_shards(where)),
    Format("table", table.is_table, table.open_table),
    Format("image folder", lambda where: is_folder(Path(where)), image_folder.open_folder),
    Format("named dataset", named.is_name, named.open_by_name),
]


def find_format(where: str) -> Format | None:
    return next((entry for entry in FORMATS if entry.matches(where)), None)
