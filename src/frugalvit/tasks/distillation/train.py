"""``frugalvit distil``: from a trained network and images without labels to a student."""

from typing import Any

from frugalvit.config.defaults import Facts
from frugalvit.config.distil import DistilConfig
from frugalvit.config.resolved import ResolvedDistilConfig
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.errors import UserError
from frugalvit.experiment.resolve import resolve_distillation
from frugalvit.objectives import FeatureDistillation
from frugalvit.tasks.distillation.task import DistillationTask
from frugalvit.tasks.distillation.teacher import cache_targets, load_teacher
from frugalvit.tasks.pretraining.collapse import Health
from frugalvit.tasks.pretraining.train import LabelFreeExperiment
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult


def distil(config: DistilConfig) -> CommandResult:
    """Train a student on the features of a teacher; the run folder then holds the student as ``model/``."""
    if config.resume is None and (config.teacher is None or config.data is None):
        raise UserError("Pass a teacher and images: 'frugalvit distil vit_small_patch14_dinov2.lvd142m images/'.")
    if config.resume and config.teacher and config.data is None:
        raise UserError(f"--resume with one argument, {config.teacher}: pass TEACHER and DATA, or neither.")
    return DistilExperiment(config).run()


class DistilExperiment(LabelFreeExperiment[DistilConfig, ResolvedDistilConfig]):
    command = "distil"
    task: DistillationTask

    def resolve_values(self, options: DistilConfig, facts: Facts) -> ResolvedDistilConfig:
        return resolve_distillation(options, facts, self.auto_values)

    def build_task(self) -> DistillationTask:
        config, student = self.config, self.backbone
        if config.cache_teacher and self.images.streaming is not None:
            raise UserError("--cache-teacher needs access to single images: use --stream false.")
        teacher = load_teacher(str(config.teacher), student, config.teacher_size)
        network, (height, width) = teacher.network, teacher.network.img_size
        console.info(f"teacher: {teacher.name} at {height}×{width} px, {network.pooled_dim} features")
        objective = FeatureDistillation(
            student.dim, network.dim, student.pooled_dim, network.pooled_dim, **config.distillation.model_dump()
        )
        return DistillationTask(student, teacher, objective, config.optimizer.weight_decay)

    def build_batches(self) -> None:
        config, student, steps = self.config, self.backbone, self.plan.steps
        augment = TrainAugment(config.augment, student.img_size, student.mean, student.std)
        health = Health(0, steps, round(0.2 * steps), stop=config.health.stop_on_collapse)
        self.set_data(self.images, augment, health)
        if config.cache_teacher:
            batches: Any = self.task.batches
            teacher, batch, fingerprint = self.task.frozen_teacher, min(64, config.batch), self.images.fingerprint()
            self.task.cached = cache_targets(teacher, batches.store, augment, batch, self.fabric, fingerprint)
