"""A real Prometheus takes the rules, finds a real pool, scrapes it, and evaluates every rule and panel."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resile_shared.processes import dying_with_parent
from resile_testing.waiting import PATIENCE_SECONDS

from ..test_deploy import DEPLOY, expressions, rules
from .pools import pool_up

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no Prometheus on this machine: install Debian's package"
)
PARTS = {"registry", "scheduler", "monitor", "host-1"}


def configured(folder: Path, home: Path) -> Path:
    """Copy the configuration, for a pool whose home is ``home``; it scrapes and evaluates each second."""
    text = (DEPLOY / "prometheus/prometheus.yaml").read_text().replace('"/pool/', f'"{home}/')
    shutil.copy(DEPLOY / "prometheus/alerts.yaml", folder)
    file = folder / "prometheus.yaml"
    file.write_text(re.sub(r"(_interval): \d+s", r"\1: 1s", text))
    return file


@contextmanager
def prometheus(configuration: Path) -> Iterator[str]:
    """Run Prometheus while the block runs; gives its URL."""
    log = configuration.with_name("prometheus.log")
    options = (f"--config.file={configuration}", f"--storage.tsdb.path={configuration.parent / 'data'}")
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["prometheus", *options, "--web.listen-address=127.0.0.1:0"], stderr=stderr, preexec_fn=dying_with_parent()
        )
    try:
        listening = re.compile(r"address=(127\.0\.0\.1:[1-9]\d*)")
        until(lambda: listening.search(log.read_text()), lambda: log.read_text()[-2000:])
        found = listening.search(log.read_text())
        assert found is not None
        until(lambda: "is ready to receive web requests" in log.read_text(), lambda: log.read_text()[-2000:])
        yield f"http://{found[1]}"
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], object], seen: Callable[[], object]) -> None:
    """Wait for the condition; what is seen instead is told."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.2)


def asked(url: str, **query: str) -> Any:
    """What the API of Prometheus answers."""
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        document = json.load(answer)
    assert document["status"] == "success", document
    return document["data"]


@pytest.mark.nightly
@needs_prometheus
@pytest.mark.long
def test_prometheus_scrapes_a_pool_and_evaluates_all_rules_and_panels(tmp_path: Path) -> None:
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 1) as pool:
        configuration = configured(tmp_path, pool.home)
        for words in (("check", "rules", tmp_path / "alerts.yaml"), ("check", "config", configuration)):
            done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        for file in (pool.home / "health").glob("*.json"):
            (target,) = json.loads(file.read_text())
            with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=30) as answer:
                done = subprocess.run(
                    ["promtool", "check", "metrics"], input=answer.read(), capture_output=True, check=False
                )
            assert (done.returncode, done.stdout + done.stderr) == (0, b""), "names, types or help texts are unusual"
        with prometheus(configuration) as url:

            def up() -> set[str]:
                found = asked(f"{url}/api/v1/query", query='up{job="resile"} == 1')["result"]
                return {sample["metric"]["part"] for sample in found}

            until(lambda: up() == PARTS, up)

            def evaluated() -> dict[str, str]:
                groups = asked(f"{url}/api/v1/rules")["groups"]
                return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

            until(lambda: evaluated() == {rule["alert"]: "ok" for rule in rules()}, evaluated)
            for expression in expressions():
                asked(f"{url}/api/v1/query", query=expression)
            (slots,) = asked(f"{url}/api/v1/query", query='sum(resile_slots{state="free"})')["result"]
            assert slots["value"][1] == "1"
