"""The client without asyncio has each call of the one with it."""

from tests.sdk.sync_calls import TARGET, written


def test_the_calls_are_those_of_the_client_for_asyncio() -> None:
    assert TARGET.read_text() == written(), "run `python -m tests.sdk.sync_calls`"
