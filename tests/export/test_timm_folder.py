"""Folders for timm and the hub load without frugalvit, and compute the same."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import frugalvit as fv
from helpers.exported_models import MODELS, run_export, train_briefly

# Runs in a new process in which frugalvit cannot be imported.
SCRIPT = """
import importlib.util, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "frugalvit":
            raise ModuleNotFoundError("frugalvit is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import numpy, timm, torch

largest = {}
for folder in sys.argv[1:]:
    images = torch.from_numpy(numpy.load(f"{folder}/../images.npy"))
    expected = torch.from_numpy(numpy.load(f"{folder}/../expected.npy"))
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.inference_mode():
        largest[f"timm {folder}"] = (model(images) - expected).abs().max().item()
    if importlib.util.find_spec("transformers") and folder.endswith("hf"):
        from transformers import AutoConfig, AutoModelForImageClassification

        names = list(AutoConfig.from_pretrained(folder).id2label.values())
        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        with torch.inference_mode():
            largest[f"transformers {folder}"] = (model(pixel_values=images).logits - expected).abs().max().item()
        assert names == json.load(open(f"{folder}/config.json"))["label_names"], names
assert "frugalvit" not in sys.modules
print(json.dumps(largest))
"""


# With windows that divide every map our Swin is timm's; at 128 pixels a ResNet has its own stem.
SAME_AS_TIMM = {"swin": {"window_size": 8}, "vit": {}, "resnet": {"img_size": 128}}


@pytest.mark.parametrize("names", [("swin",), pytest.param(("vit", "resnet"), marks=pytest.mark.slow)])
def test_folders_load_without_frugalvit(names: tuple[str, ...], tmp_path: Path, photographs: Path):
    folders = []
    for name in names:
        base = tmp_path / name
        keywords = MODELS[name][1] | SAME_AS_TIMM[name]
        folder = train_briefly(base, MODELS[name][0], keywords, photographs)
        model = fv.load(str(folder))
        images = model.transform([str(path) for path in sorted(photographs.iterdir())])
        with torch.inference_mode():
            np.save(base / "expected.npy", model(images).numpy())
        np.save(base / "images.npy", images.numpy())
        for to in ("timm", "hf"):
            run_export(model=str(folder), to=to, out=str(base / to), images=str(photographs))
            folders.append(str(base / to))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *folders], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    largest = json.loads(done.stdout.splitlines()[-1])
    others = len(names) if importlib.util.find_spec("transformers") else 0
    assert len(largest) == len(folders) + others and max(largest.values()) < 1e-4, largest
