"""Ranks of one run as threads: collectives without the seconds of a launch."""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class FakeGroup:
    """The values of all ranks in each round of collectives."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.broken = world_size, False
        self.rounds: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self.changed = threading.Condition()

    def all_gather(self, number: int, rank: int, value: Any) -> list[Any]:
        values = self.rounds[number]
        with self.changed:
            values[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(values) == self.world_size or self.broken, timeout=10)
        if len(values) < self.world_size:
            raise RuntimeError("[gloo] Connection closed by peer")
        return [values[rank] for rank in range(self.world_size)]

    def leave(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class FakeFabric:
    """The Fabric of one rank, in a thread."""

    device = torch.device("cpu")

    def __init__(self, rank: int, group: FakeGroup) -> None:
        self.global_rank, self.world_size, self.is_global_zero = rank, group.world_size, rank == 0
        self._group, self._round = group, 0

    def _all_gather(self, value: Any) -> list[Any]:
        self._round += 1
        return self._group.all_gather(self._round, self.global_rank, value)

    def broadcast(self, value: Any) -> Any:
        return self._all_gather(value)[0]

    def all_reduce(self, value: Tensor, reduce_op: str) -> Tensor:
        values = torch.stack(self._all_gather(value))
        return values.amax(0) if reduce_op == "max" else getattr(torch, reduce_op)(values, 0)

    def barrier(self) -> None:
        self._all_gather(None)


def run_ranks(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Run ``work`` on all ranks; return each result, or the error that ended the rank."""
    group = FakeGroup(world_size)

    def run_rank(rank: int) -> Any:
        try:
            return work(FakeFabric(rank, group))
        except Exception as error:
            group.leave()
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run_rank, range(world_size)))
