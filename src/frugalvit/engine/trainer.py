"""The one loop that trains every task.

A task is a module whose forward turns a batch into named losses; everything random in a step follows from
(seed, step), so a run that is killed and resumed goes through the very same steps. The loop itself only does what
every training does: fetch, forward, backward, clip, step, and now and then log, evaluate and save.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.engine.distributed import all_ranks_equal, collective_timeout, convert_sync_batchnorm, fail_on_lost_rank
from frugalvit.engine.failure_dump import dump_failed_step, is_out_of_memory, out_of_memory_message
from frugalvit.engine.param_groups import remap_optimizer_state, same_param_groups
from frugalvit.engine.step import TrainPlan, TrainStep, make_optimizer
from frugalvit.engine.task import Task
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder, Stopwatch
from frugalvit.utils import console
from frugalvit.utils.signals import STOP_NOW_SIGNALS, stop_signals


class RunInterrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP); everything is saved."""


def fit(task: Task, plan: TrainPlan, run: RunFolder, fabric: Fabric) -> dict[str, Any]:
    """Train ``task`` to the end of ``plan``, from the run's last checkpoint if it has one; what came out of it."""
    convert_sync_batchnorm(task, fabric)
    optimizer: Any = make_optimizer(task, plan, fabric)
    try:
        with (
            fail_on_lost_rank(fabric, run.folder, plan.patience_for_peers),
            collective_timeout(fabric, plan.patience_for_peers),
        ):
            module, optimizer = fabric.setup(task, optimizer)
            loop = Trainer(task, module, optimizer, plan, run, fabric)
            loop.resume()
            loop.train()
            fabric.barrier()  # whoever reads the best weights next must find them written
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory_message(error, plan.images_per_step, run.folder)) from error
    return {
        "steps": loop.step,
        "best": loop.best,
        "best_step": loop.best_step,
        "seconds": loop.watch.seconds(),
        "seconds_per_step": statistics.median(paces) if (paces := loop.paces or loop.earlier_paces) else None,
        "skipped": loop.skipped(),
        "broken": task.nonfinite_outputs,
    }


class Trainer(TrainStep):
    def __init__(
        self, task: Task, module: nn.Module, optimizer: Any, plan: TrainPlan, run: RunFolder, fabric: Fabric
    ) -> None:
        super().__init__(task, module, optimizer, plan, fabric)
        self.run = run
        self.best, self.best_step = -math.inf, -1
        self.watch = Stopwatch()
        self.saved_at = time.monotonic()
        self.paces: list[float] = []  # seconds a step, one per logged window
        self.earlier_paces: list[float] = []  # before the run was resumed
        self.window_began = (time.monotonic(), 0)
        self.stop_signal = self.shared_signal = 0  # what this process was sent, and what any of them was
        self.writing = self.impatient = False
        self.hopeless = False  # the task has seen enough: going on would be a waste

    # -- the run

    def train(self) -> None:
        plan, meter = self.plan, console.ProgressBar(self.plan.steps, "training", start=self.step)
        self.window_began = (time.monotonic(), self.step)
        with self._stop_on_signals():
            while self.step < plan.steps and not self.hopeless:
                self.one_step()
                self.step += 1
                if self.step % plan.log_every == 0 or self.step == plan.steps:
                    text = self.log()
                    meter.show(self.step, text)
                last = self.step == plan.steps or self.hopeless
                if last or (plan.evaluate_every and self.step % plan.evaluate_every == 0):
                    self.evaluate(last)
                    self.window_began = (time.monotonic(), self.step)
                stop = self.agreed_stop()
                if last or stop or self.hopeless or self.time_to_save():
                    self.save()
                if stop and not last:
                    self.fabric.barrier()  # whoever leaves before the first process has saved would end it
                    raise RunInterrupted(signal.Signals(stop).name)
        self.run.asked_to_stop = bool(self.agreed_stop())
        meter.close()

    # -- now and then

    def log(self) -> str:
        """Write the window's means to the metrics; a few words for the bar. Too many bad steps end the run here."""
        means = self._means()
        self._share_signal()
        streak, skipped = (int(value) for value in self.guard.tolist())
        epoch = self.step / self.plan.steps_per_epoch
        lr = self.plan.lr.at(self.step - 1)  # the schedule's: groups of parameters scale it
        pace = self._pace()
        with self._finish_deferred():
            self.run.log(
                self.step, split="train", epoch=round(epoch, 4), lr=lr, skipped=skipped, **_finite(means), **pace
            )
        self.hopeless |= self.task.on_metrics(self.step, means)
        if streak >= self._patience():
            self._abort_nonfinite(streak)
        taken = torch.cuda.max_memory_allocated() / 2**30 if self.fabric.device.type == "cuda" else 0.0
        memory = f" · {taken:.1f} GiB" if taken else ""
        return f"loss {means['loss']:.4g} · lr {lr:.2g}{memory}"

    def _means(self) -> dict[str, float]:
        """What the losses and signs of the window were on average, over all processes; a new window begins."""
        totals: dict[str, tuple[float, float]] = {}
        for names, row in self._reduce_window().items():
            *values, count = row.tolist()
            for name, value in zip(names, values, strict=True):
                total, times = totals.get(name, (0.0, 0.0))
                totals[name] = total + value, times + count
        self.window = {}
        return {name: total / times for name, (total, times) in totals.items()}

    def _reduce_window(self) -> dict[tuple[str, ...], Tensor]:
        """The window's sums and counts over all processes, on the host."""
        if not self.window:
            return {}
        rows = sorted(self.window.items())
        summed: Any = self.fabric.all_reduce(torch.cat([row for _, row in rows]), reduce_op="sum")
        parts = summed.cpu().split([len(row) for _, row in rows])
        return {names: part for (names, _), part in zip(rows, parts, strict=True)}

    def _restore_window(self, everywhere: dict[tuple[str, ...], Tensor]) -> None:
        """Go on with a window of all processes: the first has it, the others add to nothing."""
        first = self.fabric.is_global_zero
        rows = {names: row if first else torch.zeros_like(row) for names, row in everywhere.items()}
        self.window = {names: row.to(self.fabric.device) for names, row in rows.items()}

    def _pace(self) -> dict[str, float]:
        """Images a second since the last line; reading the metrics has just waited for the device, so it is fair."""
        now, (began, at) = time.monotonic(), self.window_began
        self.window_began = (now, self.step)
        if self.step == at:
            return {}
        self.paces.append((now - began) / (self.step - at))
        return {"images_per_second": round(self.plan.images_per_step / self.paces[-1], 1)}

    def evaluate(self, last: bool = False) -> None:
        # Devices may round differently; what the first process saw decides for all.
        scores, self.task.nonfinite_outputs = self.fabric.broadcast(
            (self.task.evaluate(self.step), self.task.nonfinite_outputs)
        )
        if not scores:
            return
        epoch = self.step / self.plan.steps_per_epoch
        with self._finish_deferred():
            self.run.log(self.step, split=self.task.eval_split, epoch=round(epoch, 4), **_finite(scores))
        words = " · ".join(f"{name} {value:.4g}" for name, value in scores.items())
        console.info(f"epoch {epoch:.4g} (step {self.step}): {words}")
        self.hopeless |= self.task.on_metrics(self.step, scores)
        score = scores.get(self.task.best_metric)
        # Few validation images often score alike: of equals the later one has learned for longer.
        if self.task.nonfinite_outputs:
            self._handle_nonfinite_eval(last)
        elif self.task.eval_split == "val" and score is not None and score >= self.best:
            self.best, self.best_step = score, self.step
            self._write({"step": self.step, "task": self.task.state_dict(), "scores": scores}, best=True)

    # -- state

    def _share_signal(self) -> None:
        """Several processes must stop at the same step, whichever of them was told to: they agree when they log."""
        if self.fabric.world_size > 1:
            sent = torch.tensor(self.stop_signal, device=self.fabric.device)
            self.shared_signal = int(self.fabric.all_reduce(sent, reduce_op="max"))  # type: ignore[arg-type]

    def agreed_stop(self) -> int:
        return self.shared_signal if self.fabric.world_size > 1 else self.stop_signal

    def time_to_save(self) -> bool:
        plan = self.plan
        if plan.save_every:
            return self.step % plan.save_every == 0
        on_epoch = bool(plan.evaluate_every) and self.step % plan.evaluate_every == 0
        waited = time.monotonic() - self.saved_at
        due = waited > 60 * plan.save_minutes or (on_epoch and waited > 20)
        if self.fabric.world_size == 1:
            return due
        # What is saved is gathered from all of them: the first one's clock counts, where they meet anyway.
        return (on_epoch or self.step % plan.log_every == 0) and self.fabric.broadcast(due)

    def save(self) -> None:
        self.saved_at = time.monotonic()
        window = self._reduce_window()
        self._restore_window(window)  # as whoever resumes here does: the means to come are the same to the bit
        self._write(
            {
                "format": _FORMAT,
                "step": self.step,
                "task": self.task.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.fabric.strategy.precision.state_dict(),
                "best": self.best,
                "best_step": self.best_step,
                "seconds": self.watch.seconds(),
                "window": window,
                "guard": self.guard,
            }
        )

    def _write(self, state: dict[str, Any], *, best: bool = False) -> None:
        with self._finish_deferred():
            self.run.save_checkpoint(state, best=best)

    def resume(self) -> None:
        self.fabric.barrier()
        state = self.run.load_checkpoint()
        if not all_ranks_equal(self.fabric, -1 if state is None else state["step"]):
            raise UserError(
                f"The processes find different checkpoints in {self.run.folder}: it must lie on a file system that all "
                "machines share."
            )
        if state is None:
            self.run.truncate_metrics(-1)
            return
        if state.get("format") != _FORMAT:
            raise UserError(
                f"{self.run.folder} was begun by an earlier frugalvit, whose checkpoints are made otherwise: finish it "
                "with that one, or begin anew in another --out."
            )
        try:
            self.task.load_state_dict(state["task"])
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self.run.folder} was begun with another network than its configuration makes here ({reason}…): "
                "finish it with the frugalvit that began it, or begin anew in another --out."
            ) from None
        stored, ours = state["optimizer"], self.optimizer.state_dict()
        if not same_param_groups(stored, ours):  # an earlier version decayed other parameters than this one
            stored = remap_optimizer_state(stored, ours)
        self.optimizer.load_state_dict(_for_this_machine(stored, self.optimizer.param_groups))
        if state["scaler"]:  # without one, the run was in bf16 or single precision till now: fp16 looks for its scale
            self.fabric.strategy.precision.load_state_dict(state["scaler"])
        self.step = state["step"]
        if self.task.eval_split == "val":  # others have chosen nothing; earlier versions let those learned from do so
            self.best, self.best_step = state["best"], state["best_step"]
        self.watch = Stopwatch(state["seconds"])
        self._restore_window(state["window"])
        self.guard.copy_(state["guard"])
        self.run.truncate_metrics(self.step)
        self.fabric.barrier()
        self._replay_metrics()
        console.info(f"resuming {self.run.folder} at step {self.step} of {self.plan.steps}")

    def _replay_metrics(self) -> None:
        """Show the task what was logged before, so that it knows what it would have known without the interruption."""
        for line in self.run.metrics():
            values = {name: math.nan if value is None else value for name, value in line.items() if name not in _LABELS}
            self.hopeless |= self.task.on_metrics(line["step"], values)
            if line.get("images_per_second"):
                self.earlier_paces.append(self.plan.images_per_step / line["images_per_second"])

    def skipped(self) -> int:
        return int(self.guard[1])

    # -- trouble

    def _patience(self) -> int:
        """Bad steps in a row that are borne. With fp16 some are meant: its scaler halves 65,536 at every overflow."""
        return self.plan.patience_for_bad_steps + (16 if self.scaled else 0)

    def _abort_nonfinite(self, streak: int) -> None:
        """Several non-finite steps in a row: keep the evidence, leave the last good checkpoint alone, and say so."""
        kept, culprit = self._keep_evidence()
        raise UserError(
            f"{streak} steps in a row gave infinite or undefined gradients{culprit}; stopped at step {self.step}. "
            f"{kept}, the last good checkpoint is intact. Lower --lr or use --precision 32."
        )

    def _handle_nonfinite_eval(self, last: bool) -> None:
        """The network's answers are no numbers: never the best, and no result where there is nothing else."""
        if not last or (self.best_step >= 0 and not self.task.export_last):
            console.warning(f"at step {self.step} the network's answers are not finite: these weights are not kept")
            return
        kept, culprit = self._keep_evidence()
        before = "the checkpoint before is intact" if self.run.has_checkpoint() else "no checkpoint was saved before"
        raise UserError(
            f"The run ends with weights whose answers are not finite{culprit}: {self.skipped():,} of {self.step:,} "
            f"steps were skipped, and there is no model to hand out. {kept}, {before}. Lower --lr or use "
            "--precision 32, and begin anew in another --out."
        )

    def _keep_evidence(self) -> tuple[str, str]:
        """The last step's batch and state in the folder; what became of that, what was bad first."""
        step = self.step - 1
        plan, number = self.plan, step * self.plan.accumulate  # of the first part of the step
        parts = (self.task.batch_at(number + part) for part in range(plan.accumulate))  # one at a time on the device
        facts = {"step": step, "seed": plan.seed, "steps": plan.steps, "steps_per_epoch": plan.steps_per_epoch}
        facts |= {"log_every": plan.log_every, "kind": type(self.task).__name__}
        facts |= {"number": number, "world": self.fabric.world_size}
        return dump_failed_step(self.run.folder, self.task, parts, self.fabric.global_rank, facts)

    def _handle_signal(self, number: int, frame: object) -> None:
        # SLURM warns with SIGUSR1 before it sends SIGTERM, and a closed terminal sends SIGHUP beside others: neither
        # is somebody who has lost patience.
        if self.stop_signal in STOP_NOW_SIGNALS and number in STOP_NOW_SIGNALS:
            if self.writing and not self.impatient:  # whoever asks a third time does not wait for a disk either
                self.impatient = True
                return
            raise KeyboardInterrupt
        if not self.stop_signal:
            console.warning("stopping after this step; once more to leave at once")
        if self.stop_signal not in STOP_NOW_SIGNALS:
            self.stop_signal = number

    @contextmanager
    def _finish_deferred(self) -> Iterator[None]:
        """What is written here becomes whole before a second signal leaves.

        TensorBoard's thread sleeps half a minute after a queue that was left half-way, and an exception from a signal
        may be swallowed in the midst of ``torch.save``, or look like a fault of the disk.
        """
        self.writing = True
        try:
            yield
        finally:
            self.writing = False
        if self.impatient:
            raise KeyboardInterrupt

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """The first signal finishes the step, saves and leaves; a second Ctrl-C or SIGTERM leaves (``_to_the_end``)."""
        try:
            before = {number: signal.signal(number, self._handle_signal) for number in stop_signals()}
        except ValueError:  # not the main thread: whoever runs us there handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """JSON has no word for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _for_this_machine(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A stored optimiser with the settings this run has made it with.

    PyTorch takes the settings from the stored one. A run that was begun without a GPU (or carried over from another)
    would then go on without the fused step that leaves bad gradients out, and with other averaging rates.
    """
    ours = [{name: group[name] for name in _SETTINGS if name in group} for group in groups]
    stored = zip(state["param_groups"], ours, strict=True)
    return state | {"param_groups": [group | settings for group, settings in stored]}


_SETTINGS = ("betas", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")

# Of checkpoints. 2: parameters that learn alike are one group and values that come together one row of the window.
_FORMAT = 2

# What a line of metrics holds besides what the task was shown.
_LABELS = ("step", "split", "epoch", "lr", "skipped", "images_per_second")
