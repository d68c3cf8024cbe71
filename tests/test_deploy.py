"""What is in deploy/: rules and dashboards that can be parsed, name metrics that are documented, and are explained."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
OPERATIONS = (ROOT / "docs/operations.md").read_text()


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    dashboards = (json.loads(file.read_text()) for file in sorted((DEPLOY / "grafana/dashboards").glob("*.json")))
    return [panel for dashboard in dashboards for panel in dashboard["panels"]]


def expressions() -> list[str]:
    """All expressions for Prometheus that rules and dashboards hold."""
    return [rule["expr"] for rule in rules()] + [target["expr"] for panel in panels() for target in panel["targets"]]


def names_in(expression: str) -> Iterator[str]:
    """The metrics that an expression reads. Raises ValueError for one that Prometheus would not take."""

    def visit(part: Any) -> bool:
        if isinstance(part, promql_parser.VectorSelector):
            found.append(part.name)
        return True

    found: list[str] = []
    promql_parser.walk(promql_parser.parse(expression), visit)
    yield from found


def used_metrics() -> set[str]:
    """All metrics that rules and dashboards read."""
    return {name for expression in expressions() for name in names_in(expression)}


@pytest.mark.parametrize("expression", expressions())
def test_prometheus_takes_each_expression(expression: str) -> None:
    assert list(names_in(expression))


def test_a_wrong_expression_is_noticed() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        list(names_in("sum(rate(resile_jobs[5m])"))


def test_each_metric_that_is_used_is_documented() -> None:
    documented = set(re.findall(r"`((?:resile|process)_[a-z_]+)`", OPERATIONS))
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in used_metrics()}
    assert families - documented == {"up"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_alert_says_what_it_means_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert rule["annotations"]["summary"]
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (file, anchor) == ("docs/operations.md", rule["alert"].lower())
    section = re.search(rf"^### {rule['alert']}\n(.+)", OPERATIONS, re.MULTILINE)
    assert section is not None
    assert len(section[1]) > 40


def unknown_fields(dashboard: Any) -> list[str]:
    """The paths of what Grafana's schema, as it generates it for Python, does not have, or has with another value."""

    def visit(given: Any, known: Any, path: str) -> Iterator[str]:
        match given, known:
            case dict(), dict():
                for name, value in given.items():
                    yield from visit(value, known.get(name), f"{path}/{name}")
            case list(), list() if len(given) == len(known):
                for index, pair in enumerate(zip(given, known, strict=True)):
                    yield from visit(*pair, f"{path}/{index}")
            case _ if given != known:
                yield path

    register_default_plugins()
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    return list(visit(dashboard, known, ""))


@pytest.mark.parametrize("file", sorted((DEPLOY / "grafana/dashboards").glob("*.json")), ids=lambda file: file.name)
def test_grafana_knows_each_field_of_a_dashboard(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    assert unknown_fields(dashboard) == []
    dashboard["panels"][0]["fieldConfig"]["defaults"]["unitt"] = "s"
    dashboard["panels"][1]["targets"][0]["legend"] = "up"
    assert unknown_fields(dashboard) == ["/panels/0/fieldConfig/defaults/unitt", "/panels/1/targets/0/legend"]


def test_panels_have_titles_of_their_own_and_do_not_overlap() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    cells = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_grafana_reads_the_prometheus_of_the_pool() -> None:
    provisioning = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["uid"]}
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services["prometheus"]["network_mode"] == "service:pool", "so its address is that of the pool"
    assert source["url"] == "http://pool:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/resile.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted


def test_all_files_that_containers_mount_are_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    assert [name for name in mounted if name.startswith(".") and not (DEPLOY / name).exists()] == []
    assert (DEPLOY / "Dockerfile").exists()
