"""Which hosts take workers of a job: those of its class of device that have the labels it asks for."""

from collections.abc import Iterable
from dataclasses import dataclass

from resile_shared.messages.hosts import HostState

from ..state.pool import Pool
from ..state.topology import Domain


@dataclass(frozen=True)
class HostGroup:
    """Some hosts, how many slots they have together, and how many the largest of them has."""

    hosts: frozenset[str] = frozenset()
    num_slots: int = 0
    most_on_one: int = 0


class HostGroups:
    """The usable hosts by class of device and labels. All are recomputed when a host has changed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._version = -1
        self._by_class: dict[str, HostGroup] = {}
        self._by_labels: dict[tuple[str, str], HostGroup] = {}
        self._drained: dict[str, list[str]] = {}
        """The hosts that are drained, by class of device."""
        self.domains: dict[str, Domain] = {}
        """The domains of the usable hosts that have a label for their location."""

    def refresh(self) -> bool:
        """Find the usable hosts; return whether they may have changed."""
        if self._version == self._pool.hosts_version:
            return False
        self._version = self._pool.hosts_version
        self._by_labels.clear()
        by_class: dict[str, list[str]] = {}
        self._drained = {}
        for name, host in self._pool.hosts.items():
            if host.is_usable:
                by_class.setdefault(host.record.device_class, []).append(name)
            elif host.record.state is HostState.DRAINING:
                self._drained.setdefault(host.record.device_class, []).append(name)
        self._by_class = {device_class: self._group(names) for device_class, names in by_class.items()}
        self.domains = {name: host.domain for name, host in self._pool.hosts.items() if host.domain and host.is_usable}
        return True

    def classes(self) -> list[str]:
        """Return the classes of usable hosts, sorted."""
        return sorted(self._by_class)

    def of_class(self, device_class: str) -> HostGroup:
        """Return the usable hosts of ``device_class``."""
        return self._by_class.get(device_class, HostGroup())

    def fitting(self, device_class: str, labels: str) -> HostGroup:
        """Return the usable hosts of ``device_class`` that have ``labels``, as in ``gpu=h200,zone=a``."""
        if not labels:
            return self.of_class(device_class)
        key = (device_class, labels)
        if key not in self._by_labels:
            hosts = self.of_class(device_class).hosts
            self._by_labels[key] = self._group(name for name in hosts if self._pool.hosts[name].fits(labels))
        return self._by_labels[key]

    def drained_classes(self) -> list[str]:
        """Return the classes of drained hosts, sorted."""
        return sorted(self._drained)

    def drained(self, device_class: str, labels: str) -> HostGroup:
        """Return the drained hosts of ``device_class`` that have ``labels``."""
        names = self._drained.get(device_class, ())
        return self._group(name for name in names if self._pool.hosts[name].fits(labels))

    def num_slots(self, host: str) -> int:
        """Return how many slots a host has."""
        return len(self._pool.hosts[host].slots)

    def without(self, group: HostGroup, hosts: frozenset[str]) -> HostGroup:
        """Return ``group`` without ``hosts``."""
        return self._group(group.hosts - hosts)

    def with_environment(self, group: HostGroup, job: str) -> HostGroup:
        """Return those of ``group`` that have the environment of ``job``."""
        return self._group(self._pool.with_environment(job) & group.hosts)

    def _group(self, names: Iterable[str]) -> HostGroup:
        hosts = frozenset(names)
        sizes = [len(self._pool.hosts[name].slots) for name in hosts]
        return HostGroup(hosts, sum(sizes), max(sizes, default=0))
