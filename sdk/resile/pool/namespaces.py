"""Network namespaces that stand in for machines in tests: each part of a pool gets one, with a link that can be cut.

Each pool has a bridge with a subnet of its own. All names contain its number: bridge ``resile7``, namespaces
``resile7-host-1``, links ``resile7-0``. All state is in the kernel; what a killed process leaves is removed by the next
`Namespaces.create` on this machine.
"""

import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from resile_shared.bus.credentials import write_private
from resile_shared.errors import ResileError, UsageError

FILE = "namespaces.json"
MAX_PARTS = 250
_LOCK = Path("/run/resile-namespaces.lock")
_NETWORKS = tuple(IPv4Network(f"10.213.{number}.0/24") for number in range(256))
_BRIDGE = re.compile(r"resile\d+")
_NOBODY = "02:00:00:00:00:01"
"""An unused Ethernet address: frames to it are dropped silently."""
_BURST = ("burst", "128kb", "latency", "200ms")


class Part(BaseModel):
    """One part of the pool, in its namespace."""

    model_config = ConfigDict(frozen=True)

    name: str
    namespace: str
    port: str
    """The end of the part's virtual cable at the bridge; the other end is ``eth0`` in the namespace."""
    address: str
    ethernet: str


class Namespaces(BaseModel):
    """All parts on one bridge. This machine is on it too, with ``address``."""

    model_config = ConfigDict(frozen=True)

    bridge: str
    address: str
    parts: dict[str, Part]

    @classmethod
    def create(cls, names: Sequence[str]) -> Self:
        """Make a namespace for each name, and remove those of processes that are gone. Raises ResileError."""
        _check_rights()
        assert len(names) <= MAX_PARTS, "a subnet has no more addresses"
        with _alone():
            _remove_leftovers()
            number = _free_number()
            _, gateway, *free = (str(address) for address in _NETWORKS[number])
            bridge = f"resile{number}"
            parts = (
                Part(
                    name=name,
                    namespace=f"{bridge}-{name}",
                    port=f"{bridge}-{index}",
                    address=free[index],
                    ethernet=f"02:52:53:{number:02x}:00:{index:02x}",
                )
                for index, name in enumerate(names)
            )
            made = cls(bridge=bridge, address=gateway, parts={part.name: part for part in parts})
            try:
                made._build()
            except BaseException:
                _remove(bridge)
                raise
        return made

    @classmethod
    def of(cls, home: Path) -> Self:
        """Return the namespaces of the pool that runs in ``home``. Raises UsageError when it has none."""
        try:
            return cls.model_validate_json((home.expanduser() / FILE).read_bytes())
        except FileNotFoundError:
            raise UsageError(
                f"the parts of the pool in {home} share one network, which cannot be cut: "
                "start it with `resile up --namespaces`"
            ) from None
        except (OSError, ValidationError) as error:
            raise ResileError(f"{home / FILE} cannot be read: restart the pool") from error

    def save(self, home: Path) -> None:
        """Let other processes find them with `of`, until `remove`."""
        write_private(home / FILE, self.model_dump_json().encode())

    def remove(self, home: Path | None = None) -> None:
        """Remove all of it. Processes in the namespaces go on without a network."""
        if home is not None:
            (home / FILE).unlink(missing_ok=True)
        with _alone():
            _remove(self.bridge)

    def part(self, name: str) -> Part:
        """Return one part. Raises UsageError."""
        if name not in self.parts:
            raise UsageError(f"the pool has no part {name}: its parts are {', '.join(self.parts)}")
        return self.parts[name]

    def enter(self, name: str) -> tuple[str, ...]:
        """Return a prefix with which a command runs in the part's network; its process becomes that of the command."""
        return ("nsenter", f"--net=/run/netns/{self.part(name).namespace}")

    def cut(self, name: str) -> None:
        """Pull the cable of one part: it reaches nobody, and nobody reaches it."""
        _ip("link", "set", self.part(name).port, "down")

    def mend(self, name: str) -> None:
        """Plug the cable in again."""
        _ip("link", "set", self.part(name).port, "up")

    def cut_one_way(self, sender: str, receiver: str) -> None:
        """Silently drop what one part sends to another, and nothing else."""
        source, target = self.part(sender), self.part(receiver)
        _in(source, "neigh", "replace", target.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def mend_one_way(self, sender: str, receiver: str) -> None:
        """Undo `cut_one_way`."""
        source, target = self.part(sender), self.part(receiver)
        _in(source, "neigh", "replace", target.address, "lladdr", target.ethernet, "dev", "eth0", "nud", "permanent")

    def cut_between(self, first: str, second: str) -> None:
        """Drop everything that two parts send to each other; both still reach all others."""
        self.cut_one_way(first, second)
        self.cut_one_way(second, first)

    def mend_between(self, first: str, second: str) -> None:
        """Let both reach each other again."""
        self.mend_one_way(first, second)
        self.mend_one_way(second, first)

    def slow(self, name: str, rate: str) -> None:
        """Let a part send, and be sent, no more than ``rate``, as `tc` has it: ``5mbit``."""
        part = self.part(name)
        shape = ("root", "tbf", "rate", rate, *_BURST)
        _run("tc", "qdisc", "replace", "dev", part.port, *shape)
        _run("tc", "-n", part.namespace, "qdisc", "replace", "dev", "eth0", *shape)

    def unslow(self, name: str) -> None:
        """Undo `slow`."""
        part = self.part(name)
        for where in (("dev", part.port), ("dev", "eth0")):
            inside = ("-n", part.namespace) if where[1] == "eth0" else ()
            with suppress(CommandFailed):  # it was not slow
                _run("tc", *inside, "qdisc", "del", *where, "root")

    def mend_all(self) -> None:
        """Undo all that was cut or slowed."""
        for name in self.parts:
            self.mend(name)
            self.unslow(name)
        for first, second in itertools.permutations(self.parts, 2):
            self.mend_one_way(first, second)

    def _build(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "alias", _owner(os.getpid()) or "")
        _ip("link", "set", self.bridge, "address", self._ethernet, "up")
        _ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        for part in self.parts.values():
            _ip("netns", "add", part.namespace)
            _ip("link", "add", part.port, "type", "veth", "peer", "name", "eth0", "netns", part.namespace)
            _in(part, "link", "set", "lo", "up")
            _in(part, "link", "set", "eth0", "address", part.ethernet, "up")
            _in(part, "addr", "add", f"{part.address}/24", "dev", "eth0")
            _in(part, "route", "add", "default", "via", self.address)
            _ip("link", "set", part.port, "master", self.bridge, "up")

    @property
    def _ethernet(self) -> str:
        return f"02:52:53:{int(self.bridge.removeprefix('resile')):02x}:01:00"


class CommandFailed(ResileError):
    """One of the system's own commands failed."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        super().__init__(f"`{' '.join(command)}` failed: {said.strip() or 'it said nothing'}")


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise UsageError("--namespaces requires root: run the command as root, or omit the option")
    missing = [command for command in ("ip", "tc", "nsenter") if shutil.which(command) is None]
    if missing:
        raise UsageError(f"--namespaces requires {', '.join(missing)}: install iproute2 and util-linux")


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process of this machine at a time make or remove namespaces."""
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _free_number() -> int:
    taken = [ip_network(text) for text in _networks_in_use()]
    names = _bridges()
    for number, network in enumerate(_NETWORKS):
        if f"resile{number}" not in names and not any(network.overlaps(other) for other in taken):
            return number
    raise ResileError(f"all networks from {_NETWORKS[0]} to {_NETWORKS[-1]} are in use: stop other pools")


def _networks_in_use() -> Iterator[str]:
    for route in _ask("ip", "-j", "-4", "route", "show", "table", "all"):
        if route["dst"] not in ("default", "0.0.0.0/0"):
            yield route["dst"]


def _bridges() -> dict[str, str]:
    """Return the bridges of all pools on this machine, and the owner of each."""
    links = _ask("ip", "-j", "link", "show", "type", "bridge")
    return {link["ifname"]: link.get("ifalias", "") for link in links if _BRIDGE.fullmatch(link.get("ifname", ""))}


def _remove_leftovers() -> None:
    for bridge, owner in _bridges().items():
        pid = owner.partition(" ")[0]
        if not pid.isdigit() or _owner(int(pid)) != owner:
            _remove(bridge)


def _remove(bridge: str) -> None:
    for namespace in _ask("ip", "-j", "netns", "list"):
        if namespace["name"].startswith(f"{bridge}-"):
            _ip("netns", "del", namespace["name"])
    for link in _ask("ip", "-j", "link", "show"):
        if link["ifname"].startswith(f"{bridge}-"):
            with suppress(CommandFailed):  # it went with its namespace
                _ip("link", "del", link["ifname"])
    with suppress(CommandFailed):  # it was never made
        _ip("link", "del", bridge)


def _owner(pid: int) -> str | None:
    """Return what distinguishes a process from earlier ones with its id; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return f"{pid} {text.rpartition(')')[2].split()[19]}"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _in(part: Part, *words: str) -> None:
    _run("ip", "-n", part.namespace, *words)


def _ask(*command: str) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = json.loads(_run(*command) or "[]")
    return answer


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandFailed(command, done.stderr)
    return done.stdout
