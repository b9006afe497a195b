"""values.yaml, its schema and its table say the same; dashboards and alerts use metrics that exist. Nothing here needs Helm."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from tests.charts import chart_pages
from tests.charts.chart_pages import CHART, DASHBOARDS, NAMES, PAGE, ROOT

HOW = "run: python -m tests.charts.chart_pages"


@pytest.mark.page
def test_the_schema_is_that_of_the_values_and_settings() -> None:
    assert (CHART / "values.schema.json").read_text() == chart_pages.schema_text(), HOW


@pytest.mark.page
def test_the_names_by_which_typos_are_noticed_are_those_of_the_values() -> None:
    assert NAMES.read_text() == chart_pages.names_text(), HOW


@pytest.mark.page
def test_the_page_has_the_table_of_values() -> None:
    page = PAGE.read_text()
    assert page == chart_pages.with_table(page), HOW


@pytest.mark.page
def test_the_chart_has_the_dashboards_of_the_docs() -> None:
    copies = {path.name: path.read_text() for path in (CHART / "files" / "dashboards").iterdir()}
    assert copies == {path.name: path.read_text() for path in DASHBOARDS.iterdir()}, HOW


@pytest.mark.page
def test_every_value_is_described() -> None:
    described = chart_pages.descriptions()
    assert [path for path, _ in chart_pages._leaves("", chart_pages.values()) if path not in described] == []


@pytest.mark.page
def test_dashboards_and_alerts_use_metrics_that_exist() -> None:
    documented = set(re.findall(r"`((?:cepheid|pulsar|process)_\w+)`", (ROOT / "docs" / "admin.md").read_text()))
    used = {name for path in DASHBOARDS.iterdir() for name in re.findall(r"\b(?:cepheid|pulsar|process)_\w+", path.read_text())}
    assert len(used) > 30
    assert {name for name in used if re.sub(r"_(bucket|sum|count)$", "", name) not in documented} == set()


def test_alerts_judge_each_release_by_itself() -> None:
    groups = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text())["groups"]
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    by_release = r"\b(?:max|min|sum) by \(namespace, app_kubernetes_io_instance\b"
    assert [one for one in expressions if len(re.findall(by_release, one)) != len(re.findall(r"\b(?:max|min|sum)\b", one))] == []


def test_profiles_have_only_values_that_exist_and_are_empty_otherwise() -> None:
    """What values.yaml has itself would win over the profile."""

    def check(part: dict[str, Any], defaults: dict[str, Any], path: str) -> None:
        for name, value in part.items():
            assert name in defaults, f"{path}.{name} is not a value"
            if isinstance(value, dict) and defaults[name]:
                check(value, defaults[name], f"{path}.{name}")
            else:
                assert defaults[name] in ("", {}, []), f"{path}.{name} has a default in values.yaml"

    for name in chart_pages.PROFILES:
        check(chart_pages.profile(name), chart_pages.values(), name)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, ""),
        ({"profile": "production", "broker": {"replicas": 5, "config": {"dispatch": {"max_permits": 10}}}}, ""),
        ({"bookie": {"config": {"storage": {"write_cache_bytes": 2.0}}}}, "write_cache_bytes"),
        ({"broker": {"replicas": 0}}, "replicas"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"zookeeper": {"replicas": 4}}, "replicas"),
    ],
)
def test_the_schema_refuses_what_is_not_a_value(values: dict[str, Any], said: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = list(jsonschema.Draft7Validator(schema).iter_errors(values))
    if not said:
        assert found == []
    else:
        assert any(said in f"{'.'.join(map(str, error.absolute_path))} {error.message}" for error in found)


def test_the_values_of_the_chart_fit_its_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(yaml.safe_load((CHART / "values.yaml").read_text()))
    for name in chart_pages.PROFILES:
        jsonschema.Draft7Validator(schema).validate(chart_pages.profile(name))
