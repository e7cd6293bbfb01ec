"""Drloc in a LightningModule: three lines, marked with an arrow. Needs ``pip install lightning``.

    python examples/lightning_module.py

The head is a submodule, so ``self.parameters()``, checkpoints and DDP include it.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import frugalvit as fv


class Classifier(lightning.LightningModule):
    def __init__(self, backbone: str = "swin_nano", img_size: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.backbone = fv.create_backbone(backbone, img_size=img_size, num_classes=classes)
        self.localization = fv.RelativeLocalization(self.backbone.dim)  # <- 1: the head that predicts distances
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        features = self.backbone(images)
        loss = nn.functional.cross_entropy(self.backbone.classify(features.pooled), labels)
        localization, cells = self.localization.measure(features.grid)  # <- 2: the loss, and the error in grid cells
        loss = loss + 0.5 * localization  # <- 3: λ = 0.5 for Swin
        self.log_dict({"loss": loss, "localization_error": cells})
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-4, weight_decay=0.05)


def main(steps: int = 20, img_size: int = 64) -> list[float]:
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(64, 3, img_size, img_size), torch.randint(10, (64,)))
    model = Classifier(img_size=img_size)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
    return model.losses


if __name__ == "__main__":
    values = main()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
