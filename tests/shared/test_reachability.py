"""A machine is reached at an address only if it answers there itself."""

import socket

import pytest

from resile_shared.errors import UsageError
from resile_shared.reachability import is_loopback, is_own, listening, obstacle


async def test_a_machine_that_says_its_name_is_reached() -> None:
    async with listening("127.0.0.1", "host-1") as port:
        assert await obstacle("127.0.0.1", port, name="host-1") == ""
        assert await obstacle("127.0.0.1", port, name="host-2") == "another machine answers"
        assert await obstacle("127.0.0.2", port, name="host-1") == "Connection refused"
    assert await obstacle("127.0.0.1", port, name="host-1") == "Connection refused"


async def test_one_that_says_nothing_or_too_much_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resile_shared.reachability.CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await obstacle("127.0.0.1", silent.getsockname()[1], name="host-1") == "no answer"
    async with listening("127.0.0.1", "host-1" * 1000) as port:
        assert await obstacle("127.0.0.1", port, name="host-1") == "another machine answers"


async def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"--address: workers cannot listen on 192\.0\.2\.1 .*: use one of this machine"
    ):
        async with listening("192.0.2.1", "host-1"):
            pass
    assert not is_own("192.0.2.1")
    assert is_own("127.0.0.1")


def test_a_loopback_address_is_known_as_one() -> None:
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("localhost.example")
