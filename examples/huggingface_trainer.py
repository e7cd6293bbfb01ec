"""Drloc under the Hugging Face Trainer: three lines, marked with an arrow. Needs ``pip install "transformers[torch]"``.

    python examples/huggingface_trainer.py

The model's forward computes the loss, so the Trainer does not change and DDP sees every parameter. Only training
returns hidden states: in evaluation the Trainer would gather them as predictions. transformers chooses the
classification loss by the end of the class name, so keep ``ForImageClassification``.
"""

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import SwinConfig, SwinForImageClassification, Trainer, TrainingArguments, set_seed

import frugalvit as fv


class LocalizingSwinForImageClassification(SwinForImageClassification):
    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config)
        self.localization = fv.RelativeLocalization(self.swin.num_features)  # <- 1: the head that predicts distances
        self.post_init()

    def forward(self, pixel_values: Tensor | None = None, labels: Tensor | None = None):  # type: ignore[override]
        outputs = super().forward(pixel_values, labels=labels, output_hidden_states=self.training)  # <- 2: the grid
        if self.training and outputs.loss is not None:
            outputs.loss = outputs.loss + 0.5 * self.localization(outputs.reshaped_hidden_states[-1])  # <- 3
        return outputs


class Noise(Dataset):
    """Replace it by your images: each item is a dictionary with the arguments of ``forward``."""

    def __init__(self, count: int, img_size: int) -> None:
        self.images, self.labels = torch.randn(count, 3, img_size, img_size), torch.randint(10, (count,))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def main(steps: int = 20, img_size: int = 64) -> list[float]:
    set_seed(0)
    small = {"embed_dim": 24, "depths": [1, 1, 2], "num_heads": [1, 2, 4], "window_size": 4}
    model = LocalizingSwinForImageClassification(SwinConfig(image_size=img_size, num_labels=10, **small))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=5e-4,
            weight_decay=0.05,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Noise(64, img_size))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    values = main()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
