"""How many workers share each device, where several slots are on one.

A host has several slots on an accelerator if workers share it (`--slots-per-gpu`). So it has in `resile run`, where a
new worker need not wait for the process of an old one. A worker goes to the device that fewest others have, so that no
two share one while another is idle. A worker has its device until its process is gone; one that leaves counts less.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..state.pool import Host
from ..state.slot_sets import SlotId

NO_HOSTS: Mapping[str, Host] = MappingProxyType({})


class Device(NamedTuple):
    """An accelerator of a host."""

    host: str
    name: str


class SharedDevices:
    """The devices of ``hosts``. Workers hold the slots ``held``; those on the slots ``leaving`` are about to end."""

    def __init__(
        self,
        hosts: Mapping[str, Host] = NO_HOSTS,
        *,
        held: Collection[SlotId] = (),
        leaving: Collection[SlotId] = (),
    ) -> None:
        self._hosts = hosts
        self._held = held
        self._leaving = leaving

    def of(self, slot: SlotId) -> Device | None:
        """Return the device of ``slot``, if its host has devices with several slots."""
        name = self._of_host(slot.host).get(slot)
        return Device(slot.host, name) if name else None

    def num_staying(self, hosts: Iterable[str]) -> Counter[Device | None]:
        """Return how many workers stay on each device of ``hosts``."""
        slots = (slot for host in hosts for slot in self._of_host(host))
        return Counter(self.of(slot) for slot in slots if slot in self._held and slot not in self._leaving)

    def in_order(self, host: str, free: Sequence[SlotId]) -> list[SlotId]:
        """Return the ``free`` slots of ``host`` in the order in which workers should get them."""
        staying = self.num_staying([host])
        leaving = Counter(self.of(slot) for slot in self._of_host(host) if slot in self._leaving)
        keys = {}
        for slot in sorted(free):
            device = self.of(slot)
            keys[slot] = staying[device], leaving[device], slot
            staying[device] += device is not None  # the next worker shares it with the one on this slot
        return sorted(free, key=keys.__getitem__)

    def _of_host(self, host: str) -> Mapping[SlotId, str]:
        return self._hosts[host].shared_devices if host in self._hosts else {}
