"""Supervised training as in Drloc: L_tot = L_ce + λ · L_drloc (§4), on any backbone."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit.backbones import Backbone
from frugalvit.backbones.architectures.swin import SwinTransformer
from frugalvit.config.train import LocalizationConfig
from frugalvit.data.loader import Batch, BatchSource, eval_batches
from frugalvit.engine.ema import EMA
from frugalvit.engine.param_groups import decay_groups, layer_groups, merge_param_groups, no_weight_decay_names
from frugalvit.engine.schedules import Schedule
from frugalvit.engine.task import Task
from frugalvit.experiment.drloc_pairs import BatchShard, Pairs, draw, loss_at, measure, pair_generator
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.tasks.classification.metrics import ClassificationScores
from frugalvit.utils import console


class ClassificationTask(Task):
    """A classifier and its losses. ``average`` holds the moving average of the weights, when there is one."""

    best_metric = "top1"

    def __init__(
        self,
        backbone: Backbone,
        localization: RelativeLocalization | DenseLocalization | None,
        settings: LocalizationConfig,
        weight: Schedule,
        *,
        ema: float = 0.0,
        weight_decay: float = 0.05,
        layer_decay: float = 1.0,
    ) -> None:
        super().__init__()
        self.backbone, self.localization = backbone, localization
        self.settings, self.weight = settings, weight
        self.ema, self.weight_decay, self.layer_decay = ema, weight_decay, layer_decay
        self.average = copy.deepcopy(backbone).requires_grad_(False).eval() if ema > 0 else None
        self.following = EMA(self.average, backbone, buffers=True) if self.average is not None else None
        self.batches: BatchSource | None = None
        self.evaluated: Any = None
        self.eval_split = "val"
        self.last_error: float | None = None  # of the localisation task, in grid cells
        self.seen: tuple[Any, ClassificationScores] | None = None  # what was scored since the last step, and how
        self.fabric: Fabric | None = None
        self.share = BatchShard()

    def set_data(self, batches: BatchSource, evaluated: Any, watched: str, fabric: Fabric) -> None:
        """Where batches come from, and which split is evaluated ("val" chooses the best weights, "test" does not)."""
        self.batches, self.evaluated, self.eval_split, self.fabric = batches, evaluated, watched, fabric
        self.share = BatchShard(batches.seed, batches.rank, batches.world)

    def train(self, mode: bool = True) -> ClassificationTask:
        """As modules do, but frozen batch norms keep the statistics they have."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, _BatchNorm) and module.affine and not module.weight.requires_grad:
                module.eval()
        return self

    # -- a step

    def batch_at(self, step: int) -> Batch:
        assert self.batches is not None
        self.seen = None
        return self.batches.batch_at(step)

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The losses of a batch: ``loss`` is what is minimised, the others are for the log."""
        images, targets, clean, pairs, weight = self.step_inputs(batch, step)
        losses = self.compute_losses(images, targets, clean, pairs, weight)
        if isinstance(self.localization, DenseLocalization):
            assert weight is not None
            grids = self.backbone.blocks(batch.images if clean is None else clean)
            losses["localization"], losses["localization_error"] = measure(
                self.localization, grids, batch.number, self.share
            )
            losses["loss"] = losses["loss"] + weight * losses["localization"]
        return losses

    def step_inputs(self, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor | None, Pairs, Tensor | None]:
        """What :meth:`judge` takes."""
        assert batch.targets is not None
        clean = batch.clean if self.settings.images == "clean" else None
        weight = None
        if self.localization is not None:
            weight = batch.images.new_full((), self.weight.at(step), dtype=torch.float32)
        return batch.images, batch.targets, clean, self._pairs(batch), weight

    def compute_losses(
        self, images: Tensor, targets: Tensor, clean: Tensor | None, pairs: Pairs, weight: Tensor | None
    ) -> dict[str, Tensor]:
        """Network, classifier and losses, all that depends on tensors only: what a compiled step compiles as one.

        clean: the images before mixing, where pairs are asked about in them
        weight: λ, a tensor since a number that changes would be compiled anew
        """
        features = self.backbone(images)
        logits = self.backbone.classify(features.pooled)
        cross_entropy = F.cross_entropy(logits.float(), targets)
        if not isinstance(self.localization, RelativeLocalization) or weight is None:
            return {"loss": cross_entropy, "cross_entropy": cross_entropy}
        grid = features.grid if clean is None else self.backbone(clean).grid
        localization, error = loss_at(self.localization, grid, pairs)
        return {
            "loss": cross_entropy + weight * localization,
            "cross_entropy": cross_entropy.detach(),
            "localization": localization.detach(),
            "localization_error": error,
        }

    def _pairs(self, batch: Batch) -> Pairs:
        """The pairs of tokens that are asked about in these images."""
        if not isinstance(self.localization, RelativeLocalization):
            return None
        size = self.backbone.grid_size((batch.images.shape[2], batch.images.shape[3]))
        generator = pair_generator(batch.number, self.share, batch.images.device)
        return draw(self.localization, size, len(batch.images), self.share, generator)

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether its step is known to work as CUDA graphs: one of our Swins', with the plain loss or none."""
        return isinstance(self.backbone.model, SwinTransformer) and not isinstance(self.localization, DenseLocalization)

    @property
    def cuda_graphs_blocker(self) -> str:
        dense = isinstance(self.localization, DenseLocalization)
        return "the loss in every block passes through the network once more" if dense else ""

    def compile_with(self, graphs: bool) -> None:
        """Compile what a step computes; with ``graphs`` its gradients are recorded."""
        self.compute_losses = torch.compile(self.compute_losses, dynamic=False)
        self.use_cuda_graphs = graphs
        if isinstance(self.localization, DenseLocalization):
            self.localization.compile(dynamic=False)

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        if self.following is not None:
            # Early on the average follows quickly, so that a short run is not dominated by the random start.
            self.following.update(min(self.ema, (1 + step) / (10 + step)), skipped)

    # -- what is trained, what is scored

    def parameter_groups(self) -> list[dict[str, Any]]:
        if self.layer_decay < 1:
            groups = layer_groups(self.backbone.model, self.weight_decay, self.layer_decay)
        else:
            named, spared = self.backbone.named_parameters(), no_weight_decay_names(self.backbone)
            groups = decay_groups(named, self.weight_decay, spared=spared)
        if self.localization is not None:
            named = self.localization.named_parameters("localization")
            groups += decay_groups(named, self.weight_decay, self.settings.lr_scale)
        return merge_param_groups(groups)

    @property
    def result(self) -> Backbone:
        """The backbone that is evaluated and exported."""
        return self.average if self.average is not None else self.backbone

    def evaluate(self, step: int) -> dict[str, float]:
        scores = self.scores(self.evaluated)
        self.nonfinite_outputs, self.seen = scores.broken(), (self.evaluated, scores)
        return scores.summary()

    def scored(self, dataset: Any) -> ClassificationScores:
        """As ``scores``, which are not made twice of the same weights."""
        return self.seen[1] if self.seen is not None and self.seen[0] is dataset else self.scores(dataset)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        """Supervised runs have no collapse to watch for; how well pairs are localised is remembered."""
        error = metrics.get("localization_error", math.nan)
        self.last_error = error if math.isfinite(error) else self.last_error
        return False

    def localized(self) -> dict[str, float | str]:
        """The last error of the localisation task in grid cells, that of always giving the same answer, its form."""
        heads = self.localization.levels if isinstance(self.localization, DenseLocalization) else [self.localization]
        head = heads[-1]
        if self.last_error is None or not isinstance(head, RelativeLocalization):
            return {}
        guess = head.constant_baseline_error(*self.backbone.grid_size(self.backbone.img_size))
        found = {"localization_error": self.last_error, "constant_answer_error": guess}
        return found | {"localization_variant": self.settings.variant}

    def scores(self, dataset: Any) -> ClassificationScores:
        """Scores of the exported weights on a dataset, gathered over all processes."""
        assert self.fabric is not None
        was_training = self.training
        self.eval()
        scores = ClassificationScores(self.backbone.num_classes, self.fabric.device)
        with torch.inference_mode(), self.fabric.autocast():
            place = {"rank": self.fabric.global_rank, "world": self.fabric.world_size}
            batches = eval_batches(dataset.store, dataset.transform, dataset.batch, **place)
            mine = len(range(self.fabric.global_rank, dataset.batches, self.fabric.world_size))
            for images, labels, _ in console.progress(batches, mine, "scoring"):
                assert labels is not None
                pooled = self.result(images).pooled
                # Rounded to bf16 the best answers may tie, and which of them counts would be left to chance.
                with torch.autocast(pooled.device.type, enabled=False):
                    logits = self.result.classify(pooled.float())
                scores.add(logits, labels)
        self.train(was_training)
        return scores.reduced(self.fabric)
