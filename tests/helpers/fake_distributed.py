"""Ranks of one run as threads: collectives without the seconds of a launch."""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Meeting:
    """The values of all ranks in each round of collectives."""

    def __init__(self, count: int) -> None:
        self.count, self.somebody_left = count, False
        self.rounds: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self.changed = threading.Condition()

    def tell(self, number: int, rank: int, value: Any) -> list[Any]:
        said = self.rounds[number]
        with self.changed:
            said[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(said) == self.count or self.somebody_left, timeout=10)
        if len(said) < self.count:
            raise RuntimeError("[gloo] Connection closed by peer")
        return [said[peer] for peer in range(self.count)]

    def leave(self) -> None:
        with self.changed:
            self.somebody_left = True
            self.changed.notify_all()


class Peer:
    """A Fabric of one rank, in a thread."""

    device = torch.device("cpu")

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.global_rank, self.world_size, self.is_global_zero = rank, meeting.count, rank == 0
        self._meeting, self._round = meeting, 0

    def _tell(self, value: Any) -> list[Any]:
        self._round += 1
        return self._meeting.tell(self._round, self.global_rank, value)

    def broadcast(self, value: Any) -> Any:
        return self._tell(value)[0]

    def all_reduce(self, value: Tensor, reduce_op: str) -> Tensor:
        said = torch.stack(self._tell(value))
        return said.amax(0) if reduce_op == "max" else getattr(torch, reduce_op)(said, 0)

    def barrier(self) -> None:
        self._tell(None)


def gather(count: int, work: Callable[[Any], Any]) -> list[Any]:
    """Run ``work`` on ``count`` ranks; return each result, or the error that ended the rank."""
    meeting = Meeting(count)

    def live(rank: int) -> Any:
        try:
            return work(Peer(rank, meeting))
        except Exception as error:
            meeting.leave()
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(live, range(count)))
