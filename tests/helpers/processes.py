"""Start and end real processes of a run."""

import socket

from helpers.fork_server import Child, ForkServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun_variables(world: int) -> list[dict[str, str]]:
    """What torchrun sets for each of its processes."""
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def start(server: ForkServer, variables: list[dict[str, str]], *argv: str) -> list[Child]:
    return [server.start(*argv, "--device", "cpu", **own) for own in variables]


def finish(children: list[Child]) -> list[str]:
    statuses = [child.wait() for child in children]
    assert statuses == [0] * len(children), "\n".join(child.output() for child in children)
    return [child.output() for child in children]
