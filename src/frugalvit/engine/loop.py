"""Trainer: the one loop that trains every task.

Everything random in a step is a function of (seed, step), so a killed and resumed run repeats the same steps.
The loop fetches, computes, steps, and at intervals logs, evaluates and saves.
"""

import math
import signal
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.engine import distributed, sharding
from frugalvit.engine.failure_dump import dump_failed_step, is_out_of_memory, out_of_memory_message
from frugalvit.engine.schedules import Gentler
from frugalvit.engine.step import TrainPlan, TrainStep, make_optimizer
from frugalvit.engine.task import Task
from frugalvit.errors import UserError
from frugalvit.runs.layout import BEST, GOOD
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils import console
from frugalvit.utils.signals import GracefulStop
from frugalvit.utils.text import short_message

GENTLER = 0.3
"""The factor of the learning rate at each rescue: low enough to matter, high enough to still learn. Not tuned."""


class RunInterrupted(Exception):
    """A signal stopped the run (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP); everything is saved."""


def fit(task: Task, plan: TrainPlan, run: RunFolder, fabric: Fabric) -> dict[str, Any]:
    """Train ``task`` to the end of ``plan``, from the last checkpoint if there is one; return the outcome."""
    distributed.convert_sync_batchnorm(task, fabric)
    sharded = sharding.is_sharded(fabric)
    module: Any = sharding.setup(task, fabric) if sharded else None  # before the optimizer takes its parameters
    optimizer: Any = make_optimizer(task, plan, fabric)
    try:
        limit = plan.rank_timeout
        with distributed.fail_on_lost_rank(fabric, run.folder, limit), distributed.collective_timeout(fabric, limit):
            if sharded:
                optimizer = fabric.setup_optimizers(optimizer)
            else:
                module, optimizer = fabric.setup(task, optimizer)
            trainer = Trainer(task, module, optimizer, plan, run, fabric)
            trainer.resume()
            trainer.train()
            if sharded:
                sharding.merge(task)
            fabric.barrier()  # other ranks read the best weights next
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory_message(error, plan.images_per_step, run.folder)) from error
    return {
        "steps": trainer.step,
        "best": trainer.best,
        "best_step": trainer.best_step,
        "seconds": trainer.seconds(),
        "seconds_per_step": statistics.median(trainer.paces) if trainer.paces else None,
        "skipped": int(trainer.guard[1]),
        "broken": task.nonfinite_outputs,
        "rescues": trainer.rescues,
    }


class Trainer(TrainStep):
    """Repeats ``one_step`` to the end of the plan; logs, evaluates, saves, resumes, stops on signals."""

    def __init__(
        self, task: Task, module: nn.Module, optimizer: Any, plan: TrainPlan, run: RunFolder, fabric: Fabric
    ) -> None:
        super().__init__(task, module, optimizer, plan, fabric)
        self.run = run
        self.best, self.best_step = -math.inf, -1
        self.began = self.saved_at = time.monotonic()  # ``began`` is earlier by the seconds before a resume
        self.paces: list[float] = []  # seconds per step, one value per logged window
        self.window_began = (time.monotonic(), 0)
        self.stop = GracefulStop()
        self.shared_signal = 0  # a stop signal that any rank received
        self.should_end = False  # the task says that more steps cannot help
        self.nonfinite = False  # several steps in a row had non-finite gradients
        self.rescues: list[dict[str, Any]] = []
        self.good_step = 0  # of the weights that a rescue goes back to
        self.initial: dict[str, Any] | None = None  # these weights, until they are in a file

    # -- the run

    def train(self) -> None:
        plan, progress = self.plan, console.ProgressBar(self.plan.steps, "training", self.step, "steps")
        self.window_began = (time.monotonic(), self.step)
        with self.stop.installed():
            if plan.evaluate_first and self.step == 0:
                self.evaluate()
            while self.step < plan.steps and not self.should_end:
                self.one_step()
                self.step += 1
                if self.step % plan.log_every == 0 or self.step == plan.steps:
                    progress.show(self.step, self.log())
                last = self.step == plan.steps or self.should_end
                if last or (plan.evaluate_every and self.step % plan.evaluate_every == 0):
                    self.evaluate(last)
                    self.window_began = (time.monotonic(), self.step)
                health = self.task.health
                if not last and self.can_rescue() and (self.nonfinite or (health is not None and health.collapsed)):
                    self.rescue()
                stop = self.agreed_stop()
                if last or stop or self.should_end or self.time_to_save():
                    self.save()
                if stop and not last:
                    self.fabric.barrier()  # a rank that leaves before rank 0 has saved would end rank 0 too
                    raise RunInterrupted(signal.Signals(stop).name)
        self.run.stop_requested = bool(self.agreed_stop())
        self.run.remove_good()
        progress.close()

    def seconds(self) -> float:
        return time.monotonic() - self.began

    # -- at intervals

    def log(self) -> str:
        """Log the window's means; return the text of the progress bar.

        Too many non-finite steps in a row end the run here, unless it can be rescued.
        """
        means = self._means()
        self.shared_signal = distributed.all_reduce_max(self.fabric, self.stop.received)  # all stop at the same step
        streak, skipped = (int(value) for value in self.guard.tolist())
        epoch = self.step / self.plan.steps_per_epoch
        lr = self.plan.lr.at(self.step - 1)  # the schedule's value; parameter groups scale it
        pace = self._pace()
        with self.stop.deferred():
            self.run.log(
                self.step, split="train", epoch=round(epoch, 4), lr=lr, skipped=skipped, **_finite(means), **pace
            )
        self.should_end |= self.task.on_metrics(self.step, means)
        self.nonfinite = streak >= self._max_nonfinite()
        if self.nonfinite and (not self.can_rescue() or self.step == self.plan.steps):
            self._abort_nonfinite(streak)
        is_cuda = self.fabric.device.type == "cuda"
        memory = f" · {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if is_cuda else ""
        return f"loss {means['loss']:.4g} · lr {lr:.2g}{memory}"

    def _means(self) -> dict[str, float]:
        """Return the means of the window's values over all ranks, and start a new window."""
        totals: dict[str, tuple[float, float]] = {}
        for names, row in self._reduce_window().items():
            *values, count = row.tolist()
            for name, value in zip(names, values, strict=True):
                total, times = totals.get(name, (0.0, 0.0))
                totals[name] = total + value, times + count
        self.window = {}
        return {name: total / times for name, (total, times) in totals.items()}

    def _reduce_window(self) -> dict[tuple[str, ...], Tensor]:
        """Return the window's sums and counts over all ranks, on the CPU."""
        if not self.window:
            return {}
        rows = sorted(self.window.items())
        summed: Any = self.fabric.all_reduce(torch.cat([row for _, row in rows]), reduce_op="sum")
        parts = summed.cpu().split([len(row) for _, row in rows])
        return {names: part for (names, _), part in zip(rows, parts, strict=True)}

    def _restore_window(self, window: dict[tuple[str, ...], Tensor]) -> None:
        """Continue a window that was summed over ranks: rank 0 takes it, the others start from zero."""
        first = self.fabric.is_global_zero
        rows = {names: row if first else torch.zeros_like(row) for names, row in window.items()}
        self.window = {names: row.to(self.fabric.device) for names, row in rows.items()}

    def _pace(self) -> dict[str, float]:
        """Return images per second since the last log. Reading the metrics just synchronized the device."""
        now, (began, first) = time.monotonic(), self.window_began
        self.window_began = (now, self.step)
        if self.step == first:
            return {}
        self.paces.append((now - began) / (self.step - first))
        return {"images_per_second": round(self.plan.images_per_step / self.paces[-1], 1)}

    def evaluate(self, last: bool = False) -> None:
        # Devices may round differently: rank 0's scores decide for all ranks.
        with sharding.gathered_weights(self.task):
            scores = self.task.evaluate(self.step)
        scores, self.task.nonfinite_outputs = self.fabric.broadcast((scores, self.task.nonfinite_outputs))
        if not scores:
            return
        epoch = self.step / self.plan.steps_per_epoch
        with self.stop.deferred():
            self.run.log(self.step, split=self.task.eval_split, epoch=round(epoch, 4), **_finite(scores))
        console.info(f"epoch {epoch:.4g} (step {self.step}): {self.task.describe_scores(scores)}")
        self.should_end |= self.task.on_metrics(self.step, scores)
        self._keep_good()
        score = scores.get(self.task.best_metric)
        # With few validation images scores often tie; the later checkpoint has trained longer. Only a fitted start wins
        # ties: it needed no training.
        wins_tie = not (self.plan.evaluate_first and self.best_step == 0)
        if self.task.nonfinite_outputs:
            self._handle_nonfinite_eval(last)
        elif (
            self.task.eval_split == "val"
            and score is not None
            and (score > self.best or (score == self.best and wins_tie))
        ):
            self.best, self.best_step = score, self.step
            with self.stop.deferred():
                state = {"step": self.step, "task": self._weights(), "scores": scores}
                self.run.save_checkpoint(state, BEST)

    # -- rescue: a collapsed run goes back to earlier weights and takes smaller steps

    def _keep_good(self) -> None:
        """Save the weights if they are worth going back to; at fixed steps, so that a resumed run does the same."""
        health, plan = self.task.health, self.plan
        due = self.step - self.good_step >= max(200, plan.steps // 20)  # at most twenty times a run
        if plan.rescues and due and health is not None and health.is_good:
            self.good_step, self.initial = self.step, None
            with self.stop.deferred():
                self.run.save_checkpoint({"step": self.step, "task": self._weights()}, GOOD)

    def can_rescue(self) -> bool:
        return self.task.health is not None and len(self.rescues) < self.plan.rescues

    def rescue(self) -> None:
        """Load the last good weights and restart the optimizer with a lower rate.

        Only the weights are from before: the run keeps its number of steps and the batch of each step. It saves at
        once, so that a resumed run continues after the rescue.
        """
        health = self.task.health
        assert health is not None
        state = distributed.run_on_rank_zero(self.fabric, lambda: self.initial or self.run.load_good())
        if state is None:
            self.plan = replace(self.plan, rescues=len(self.rescues))
            return
        sharding.load_task(self.task, state["task"])
        self.inner.state.clear()
        self.window = {}
        reason = "non-finite gradients" if self.nonfinite else health.verdict()
        self.guard[0], self.nonfinite = 0, False
        values = {"from_step": state["step"], "lr_scale": GENTLER ** (len(self.rescues) + 1)}
        self.rescues.append({"step": self.step, "reason": reason, **values})
        self._apply_rescues()
        console.warning(f"rescue {describe_rescue(self.rescues[-1])} (--no-rescue turns this off)")
        epoch = self.step / self.plan.steps_per_epoch
        with self.stop.deferred():
            self.run.log(self.step, split="rescue", epoch=round(epoch, 4), reason=reason, **values)
        self.task.on_metrics(self.step, values)
        self.save()

    def _apply_rescues(self) -> None:
        if self.rescues:
            last, warmup = self.rescues[-1], max(self.plan.log_every, self.plan.steps // 20)
            base = self.plan.lr.base if isinstance(self.plan.lr, Gentler) else self.plan.lr
            self.plan = replace(self.plan, lr=Gentler(base, last["lr_scale"], last["step"], warmup))

    # -- state

    def agreed_stop(self) -> int:
        return self.shared_signal if self.fabric.world_size > 1 else self.stop.received

    def time_to_save(self) -> bool:
        plan = self.plan
        if plan.save_every:
            return self.step % plan.save_every == 0
        on_epoch = bool(plan.evaluate_every) and self.step % plan.evaluate_every == 0
        waited = time.monotonic() - self.saved_at
        due = waited > 60 * plan.save_minutes or (on_epoch and waited > 20)
        if self.fabric.world_size == 1:
            return due
        # All ranks take part in saving, so rank 0's clock decides, at steps where the ranks synchronize.
        return (on_epoch or self.step % plan.log_every == 0) and self.fabric.broadcast(due)

    def save(self) -> None:
        self.saved_at = time.monotonic()
        if self.initial is not None and self.step < self.plan.steps:
            self.run.save_checkpoint(self.initial, GOOD)
            self.initial = None
        window = self._reduce_window()
        self._restore_window(window)  # as a resumed run does: later means are equal bit for bit
        state = {
            "step": self.step,
            "task": self._weights(),
            "optimizer": sharding.full_state(self.optimizer.state_dict()),
            "scaler": self.fabric.strategy.precision.state_dict(),
            "best": self.best,
            "best_step": self.best_step,
            "seconds": self.seconds(),
            "window": window,
            "guard": self.guard,
            "rescues": self.rescues,
            "good_step": self.good_step,
        }
        with self.stop.deferred():
            self.run.save_checkpoint(state)

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights as full tensors; all ranks call this together."""
        state = self.task.state_dict()
        return sharding.full_state(state) if sharding.is_sharded(self.fabric) else state

    def resume(self) -> None:
        self.fabric.barrier()
        state = self.run.load_checkpoint()
        if not distributed.all_ranks_equal(self.fabric, -1 if state is None else state["step"]):
            raise UserError(
                f"The ranks see different checkpoints in {self.run.folder}. Put the run on a file system that all "
                "machines share."
            )
        if state is None:
            self.run.truncate_metrics(-1)
            weights = self._weights() if self.plan.rescues else {}
            if self.plan.rescues and self.run.writer:
                weights = {name: value.to("cpu", copy=True) for name, value in weights.items()}
                self.initial = {"step": 0, "task": weights}
            return
        try:
            sharding.load_task(self.task, state["task"])
        except RuntimeError as error:
            raise UserError(
                f"The checkpoint in {self.run.folder} does not fit the network of its config.yaml "
                f"({short_message(error)}…). Start a new run in another --out."
            ) from None
        settings = _with_settings(state["optimizer"], self.optimizer.param_groups)
        sharding.load_optimizer(self.optimizer, settings, self.learning)
        if state["scaler"]:  # empty if the run used bf16 or fp32 so far; fp16 then searches its scale
            self.fabric.strategy.precision.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.best, self.best_step = state["best"], state["best_step"]
        self.began = time.monotonic() - state["seconds"]
        self._restore_window(state["window"])
        self.guard.copy_(state["guard"])
        self.rescues, self.good_step = state.get("rescues", []), state.get("good_step", 0)
        self._apply_rescues()
        self.run.truncate_metrics(self.step)
        self.fabric.barrier()
        for line in self.run.metrics():  # the task sees them as if the run had not been interrupted
            values = {name: math.nan if value is None else value for name, value in line.items() if name not in _LABELS}
            self.should_end |= self.task.on_metrics(line["step"], values)
        console.info(f"resuming {self.run.folder} at step {self.step} of {self.plan.steps}")

    # -- failures

    def _max_nonfinite(self) -> int:
        """Return the non-finite steps in a row to tolerate. fp16 has some: its scaler starts too high, at 65,536."""
        return self.plan.max_nonfinite_steps + (16 if self.scaled else 0)

    def _abort_nonfinite(self, streak: int) -> None:
        """Stop after several non-finite steps in a row: dump the step, keep the last good checkpoint."""
        dumped, tensor = self._dump_step()
        raise UserError(
            f"{streak} steps in a row had non-finite gradients{tensor}; the run stopped at step {self.step}. "
            f"{dumped}; the last good checkpoint is intact. Lower --lr or use --precision 32."
        )

    def _handle_nonfinite_eval(self, last: bool) -> None:
        """Non-finite outputs are never the best weights; at the end of the run they are an error."""
        if not last or (self.best_step >= 0 and not self.task.export_last):
            console.warning(f"step {self.step}: non-finite outputs; these weights cannot become the best")
            return
        dumped, tensor = self._dump_step()
        before = "the checkpoint before is intact" if self.run.has_checkpoint() else "no checkpoint was saved before"
        raise UserError(
            f"The run ends with non-finite outputs{tensor}: {int(self.guard[1]):,} of {self.step:,} steps were "
            f"skipped, and there is no model to export. {dumped}; {before}. Lower --lr or use --precision 32, and "
            "start again in another --out."
        )

    def _dump_step(self) -> tuple[str, str]:
        """Write batch and state of the last step; return two texts: the path, the first non-finite tensor."""
        if sharding.is_sharded(self.fabric):
            sharding.merge(self.task)  # the run ends here
        step = self.step - 1
        plan, number = self.plan, step * self.plan.accumulate  # of the step's first micro-batch
        parts = (self.task.batch_at(number + part) for part in range(plan.accumulate))  # one on the device at a time
        facts = {"step": step, "seed": plan.seed}
        return dump_failed_step(self.run.folder, self.task, parts, self.fabric.global_rank, facts)


def describe_rescue(rescue: dict[str, Any]) -> str:
    """Return what a rescue did, for the log and the report."""
    start = f"the weights of step {rescue['from_step']:,}" if rescue["from_step"] else "the initial weights"
    scale = f"{rescue['lr_scale']:.2g} times the learning rate"
    return f"at step {rescue['step']:,} ({rescue['reason']}): the run continues from {start} with {scale}"


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """Replace non-finite values by None: JSON cannot hold them."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _with_settings(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a stored optimizer state with this run's settings.

    PyTorch would take the stored settings. A run started on a CPU and resumed on a GPU would then lack the fused step
    that skips non-finite gradients.
    """
    ours = [{name: group[name] for name in _SETTINGS if name in group} for group in groups]
    stored = zip(state["param_groups"], ours, strict=True)
    return state | {"param_groups": [group | settings for group, settings in stored]}


_SETTINGS = ("betas", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")

# Keys of a metrics line that on_metrics() does not receive.
_LABELS = ("step", "split", "epoch", "lr", "skipped", "images_per_second", "reason")
