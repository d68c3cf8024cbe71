"""Whatever is sent to the API of a real pool, it answers with what is asked for or with a problem document."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from resile.client import find_server
from resile.http_requests import Server
from resile_monitor.openapi import FILE, OPERATIONS
from resile_shared.http.api import Problem

from .conftest import TRAIN
from .pools import pool_up

SCHEMA = schemathesis.openapi.from_path(str(Path(__file__).parents[2] / FILE))
NAMES = [f"{operation.method.upper()} {operation.path}" for operation in OPERATIONS]
EXAMPLES = settings(
    max_examples=3,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
REAL = {"job": "job-1", "host": "host-1", "tenant": "default"}
"""Ids that the pool has: with others every request would end at the same check."""


@schemathesis.serializer("application/gzip")
def as_it_is(context: object, value: bytes) -> bytes:
    """Packages are sent as they are drawn."""
    return value


schemathesis.openapi.media_type("application/gzip", st.binary(max_size=200))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A pool with a job that has completed."""
    folder = tmp_path_factory.mktemp("pool")
    script = folder / "train.py"
    script.write_text(TRAIN)
    with pool_up(folder / "home", "--slots", 1) as pool:
        assert pool.submit(script, "--", "--epochs", "1") == REAL["job"]
        pool.completed(REAL["job"])
        yield find_server(home=pool.home)


def send(server: Server, case: Case, *, token: str | None = None) -> requests.Response | None:
    """The answer, without its body; None if no client would send this."""
    request = case.as_transport_kwargs(base_url=server.url)
    request["headers"] = {**request.get("headers", {}), "Authorization": f"Bearer {token or server.token}"}
    try:
        return requests.request(**request, timeout=60, stream=True, allow_redirects=False)
    except (requests.exceptions.InvalidHeader, UnicodeError):
        return None


def check(answer: requests.Response) -> None:
    """Fail unless the request was done, or refused by a problem document that does not blame the monitor."""
    with answer:
        if answer.status_code < 400:
            return
        assert answer.headers["Content-Type"].startswith("application/problem+json"), answer.text
        problem = Problem.model_validate_json(answer.content)
        assert problem.status == answer.status_code
        assert problem.status != 500, problem
        assert problem.detail
        assert "\n" not in problem.detail


def strategies(name: str) -> Iterator[Any]:
    """Valid and invalid requests of one operation, with any ids and with those that the pool has."""
    (operation,) = (found for found in (result.ok() for result in SCHEMA.get_all_operations()) if found.label == name)
    names = {parameter.name for parameter in operation.path_parameters}
    known = {key: value for key, value in REAL.items() if key in names}
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        yield operation.as_strategy(generation_mode=mode)
        if known:
            yield operation.as_strategy(generation_mode=mode, path_parameters=known)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_answered_or_refused_with_a_problem_document(server: Server, name: str) -> None:
    for cases in strategies(name):

        @EXAMPLES
        @given(case=cases)
        def run(case: Case) -> None:
            if (answer := send(server, case)) is not None:
                check(answer)

        run()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_no_request_is_answered_without_the_token(server: Server, name: str) -> None:
    method, path = name.split()
    url = server.url + re.sub(r"{(\w+)}", lambda name: REAL.get(name[1], "some-1"), path)
    for headers in ({}, {"Authorization": "Bearer wrong-token-wrong-token"}, {"Cookie": "resile=forged"}):
        answer = requests.request(method, url, headers=headers, timeout=60)
        check(answer)
        assert answer.status_code == 401
