"""The real bus and a real S3 server, for tests of the agent and of what it stores; linked workers for the exchange."""

from collections.abc import Callable, Iterator

import pytest

from resile_shared.testing.fixtures import pool, s3

from .link_group import PAIRS, Group

__all__ = ["pool", "s3"]


@pytest.fixture(params=PAIRS)
def connect_group(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Group]]:
    """Makes groups of linked workers; each test runs over TCP and over Unix sockets, whose buffers differ."""
    groups: list[Group] = []

    def connect(num_nodes: int) -> Group:
        groups.append(Group(num_nodes, PAIRS[request.param]))
        return groups[-1]

    yield connect
    for group in groups:
        group.close()
