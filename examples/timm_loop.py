"""Drloc in a training loop with timm's model, optimizer and schedule.

    python examples/timm_loop.py

``model(images)`` calls ``forward_features``, which returns the tokens, and then ``forward_head``. The tokens of timm's
Swin are (B, h, w, D). For a ViT take ``features[:, model.num_prefix_tokens:]`` and reshape the tokens to their grid;
``frugalvit.create_backbone`` does this for every network.
"""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

import frugalvit as fv


def main(steps: int = 20, img_size: int = 64) -> list[float]:
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, img_size, img_size), torch.randint(10, (8,))
    small = {"embed_dim": 24, "depths": (1, 1, 2), "num_heads": (1, 2, 4), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=img_size, num_classes=10, **small)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    localization = fv.RelativeLocalization(model.num_features)  # <- 1: the head that predicts distances
    optimizer.add_param_group({"params": localization.parameters()})  # <- 2: before the scheduler reads the groups
    scheduler = CosineLRScheduler(optimizer, t_initial=steps, warmup_t=steps // 5, warmup_lr_init=1e-6)
    criterion = LabelSmoothingCrossEntropy(0.1)

    losses: list[float] = []
    for step in range(steps):
        features = model.forward_features(images)
        loss = criterion(model.forward_head(features), labels)
        loss = loss + 0.5 * localization(features.permute(0, 3, 1, 2))  # <- 3: (B, h, w, D) -> (B, D, h, w)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(step + 1)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    values = main()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
