"""Drloc on a convolutional network: the loss does not need a transformer (the paper's Tables 4 and 5, last rows).

    python examples/resnet.py

The last feature map of a ResNet is already a grid (B, D, h, w). The paper has no λ for it; 0.1 is our choice.
"""

import timm
import torch
from torch import nn

import frugalvit as fv


def main(steps: int = 20, name: str = "resnet10t", img_size: int = 64) -> list[float]:
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, img_size, img_size), torch.randint(10, (4,))
    model = timm.create_model(name, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    localization = fv.RelativeLocalization(model.num_features)  # <- 1: the head that predicts distances
    optimizer.add_param_group({"params": localization.parameters()})  # <- 2: it learns too

    losses: list[float] = []
    for _ in range(steps):
        grid = model.forward_features(images)
        loss = nn.functional.cross_entropy(model.forward_head(grid), labels)
        loss = loss + 0.1 * localization(grid)  # <- 3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    values = main()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
