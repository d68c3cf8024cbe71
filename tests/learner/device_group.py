"""Linked workers in one process whose sums travel over process groups of gloo, from the first round of a generation."""

import threading
from collections.abc import Collection

import torch

from resile_learner.collectives.device.communicator import Condition
from resile_learner.collectives.device.communicators import Communicators
from resile_learner.collectives.exchange import Exchange, ExchangeRound, Key
from resile_learner.collectives.memory_agreement import MemoryAgreement
from resile_learner.collectives.spec import RoundSpec

from .link_group import PATIENCE_SECONDS, Group, Node


class FormedExchange(Exchange):
    """An exchange whose members need no round to agree on their communicators."""

    def __init__(self, node: "DeviceNode", group: "DeviceGroup") -> None:
        super().__init__(node.poller, node.exchange, node.communicators, node.reports.append)
        self._group = group

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        key = spec.tag.generation, spec.members
        if key != self._key:
            self._uses_devices = self._group.form(key)
            self._key = key
        return super().begin(spec)


class DeviceNode(Node):
    """A worker with communicators."""

    def __init__(self, worker: int, group: "DeviceGroup") -> None:
        super().__init__(worker, MemoryAgreement(worker))
        self.reports: list[str] = []
        self.communicators = Communicators(worker, host="127.0.0.1", send=group.send, notify=self.poller.wake)
        self.communicators.enable(torch.device("cpu"))
        self.exchange = FormedExchange(self, group)  # type: ignore[assignment]


class DeviceGroup(Group):
    """Nodes, each linked to all others, with a communicator for each generation."""

    nodes: list[DeviceNode]  # type: ignore[assignment]

    def __init__(self, num_nodes: int) -> None:
        self._forming = threading.Lock()
        self._formed: set[Key] = set()
        super().__init__(num_nodes)

    def make_node(self, worker: int) -> DeviceNode:
        return DeviceNode(worker, self)

    def send(self, workers: Collection[int], generation: int, key: str, value: bytes) -> None:
        for worker in workers:
            self.nodes[worker].communicators.receive(generation, key, value)

    def form(self, key: Key) -> bool:
        """Form the communicators of a generation, unless a member is no node; return whether that succeeded."""
        generation, members = key
        if len(members) < 2 or not all(worker < len(self.nodes) for worker in members):
            return False
        with self._forming:
            if key in self._formed:  # a member may have died since
                return True
            self._formed.add(key)
            nodes = [self.nodes[worker] for worker in members]
            for node in nodes:
                if node.communicators.of(generation) is None:
                    node.communicators.want({generation: members})
            for node in nodes:
                communicator = node.communicators.of(generation)
                assert communicator is not None
                communicator.await_forming(PATIENCE_SECONDS)
                assert communicator.condition is not Condition.FORMING, communicator.reason
        return True

    def kill(self, worker: int) -> None:
        self.nodes[worker].communicators.close()
        super().kill(worker)

    def close(self) -> None:
        for node in self.nodes:
            node.communicators.close()
        super().close()
