"""Drloc in a plain PyTorch loop: three lines, marked with an arrow.

    python examples/plain_pytorch.py

The images are noise, so that the file runs anywhere in seconds. Replace them by your own ``Dataset``.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import frugalvit as fv


def main(steps: int = 20, backbone: str = "swin_nano", img_size: int = 64) -> list[float]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, img_size, img_size), torch.randint(10, (64,)))
    model = fv.create_backbone(backbone, img_size=img_size, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    localization = fv.RelativeLocalization(model.dim)  # <- 1: the head that predicts distances
    optimizer.add_param_group({"params": localization.parameters()})  # <- 2: it learns too

    losses: list[float] = []
    while len(losses) < steps:
        for images, labels in DataLoader(data, batch_size=8, shuffle=True):
            features = model(images)
            loss = nn.functional.cross_entropy(model.classify(features.pooled), labels)
            loss = loss + 0.5 * localization(features.grid)  # <- 3: λ = 0.5 for Swin
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]


if __name__ == "__main__":
    values = main()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
