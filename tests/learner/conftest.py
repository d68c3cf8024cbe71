"""The real bus and a real S3 server, for tests of the agent and of what it stores; linked workers for the exchange."""

from collections.abc import Callable, Iterator

import pytest

from resile_testing.fixtures import pool, s3

from .device_group import DeviceGroup
from .link_group import PAIRS, Group, sharing_group

__all__ = ["pool", "s3"]


MAKERS: dict[str, Callable[[int], Group]] = {
    **{name: lambda num_nodes, pair=pair: Group(num_nodes, pair) for name, pair in PAIRS.items()},  # type: ignore[misc]
    "memory": lambda num_nodes: sharing_group(num_nodes, range(num_nodes)),
    "memory and tcp": lambda num_nodes: sharing_group(num_nodes, [worker for worker in range(num_nodes) if worker % 3]),
    "two hosts": lambda num_nodes: sharing_group(num_nodes, range(2), range(2, num_nodes)),
    "three hosts": lambda num_nodes: sharing_group(num_nodes, range(3), range(3, 5), range(5, num_nodes)),
    "two hosts in turns": lambda num_nodes: sharing_group(num_nodes, range(0, num_nodes, 2), range(1, num_nodes, 2)),
    "gloo": DeviceGroup,
}


@pytest.fixture(params=PAIRS)
def connect_group(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Group]]:
    """Makes groups of linked workers; each test runs over TCP and over Unix sockets, whose buffers differ."""
    yield from _making(MAKERS[request.param])


@pytest.fixture(params=MAKERS)
def connect_exchange(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Group]]:
    """As ``connect_group``, and also with members of which all or some share memory."""
    yield from _making(MAKERS[request.param])


def _making(make: Callable[[int], Group]) -> Iterator[Callable[[int], Group]]:
    groups: list[Group] = []

    def connect(num_nodes: int) -> Group:
        groups.append(make(num_nodes))
        return groups[-1]

    yield connect
    for group in groups:
        group.close()
