"""Tests that the dashboard and the manual name exactly the metrics that a process exports."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.exported import Exported, exported
from tests.support import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "run.json").read_text())
EXPORTED = exported()
METRICS = {name: metric for own in EXPORTED.values() for name, metric in own.items()}
SAMPLES = {sample: metric for metric in METRICS.values() for sample in metric.samples}
# These are vLLM's own metrics. tests/rollout/test_metrics.py reads them from a replica.
FOREIGN = {"vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"}
# Every process has these metrics. They help if something is wrong with it, but are not worth a panel.
NOT_SHOWN = {"process_virtual_memory_bytes", "process_start_time_seconds", "process_open_fds", "process_max_fds"}

_FUNCTIONS = {"rate", "sum", "histogram_quantile", "label_values"}
# Labels that come from the scrape configuration, and the one that the buckets of every histogram have.
_TARGET_LABELS = {"job", "instance", "lockstep_process", "le"}
_TOKEN = re.compile(r"(?P<string>\"[^\"]*\")|(?P<range>\[[^\]]*\])|(?P<word>[a-zA-Z_:][\w:]*)|(?P<other>\S)")


def expressions() -> Iterator[tuple[str, str]]:
    """Yields the title of a panel and the PromQL, for each target of each panel."""
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))


def names_in(promql: str) -> tuple[set[str], set[str]]:
    """Returns the metrics and labels of an expression. Any other word that is not in _FUNCTIONS counts as a metric."""
    metrics, labels, rest = set(), set(), promql
    for matchers in re.findall(r"\{([^}]*)\}", rest):
        labels |= set(re.findall(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)", matchers))
    rest = re.sub(r"\{[^}]*\}", "", rest)
    for listed in re.findall(r"\bby \(([^)]*)\)", rest):
        labels |= {label.strip() for label in listed.split(",")}
    rest = re.sub(r"\bby \([^)]*\)", "", rest)
    for match in _TOKEN.finditer(rest):
        word = match["word"]
        if word and word not in _FUNCTIONS:
            metrics.add(word)
    assert rest.count("(") == rest.count(")"), promql
    return metrics, labels


@pytest.mark.parametrize(("title", "promql"), expressions())
def test_a_panel_asks_for_what_is_exported(title: str, promql: str) -> None:
    names, labels = names_in(promql)
    assert names and names <= SAMPLES.keys() | FOREIGN
    known = {label for name in names & SAMPLES.keys() for label in SAMPLES[name].labels}
    assert labels <= known | _TARGET_LABELS
    for rated in re.findall(r"rate\(([\w:]+)", promql):
        assert SAMPLES[rated].type in ("counter", "histogram"), f"{rated} does not only grow"


def test_every_metric_is_in_a_panel() -> None:
    shown = set().union(*(names_in(promql)[0] for _, promql in expressions()))
    missing = {name for name, metric in METRICS.items() if not shown & set(metric.samples)}
    assert missing == NOT_SHOWN


def test_what_vllm_counts_is_shown_and_in_the_manual() -> None:
    shown = set().union(*(names_in(promql)[0] for _, promql in expressions()))
    manual = (ROOT / "docs" / "observability.md").read_text()
    assert {name for name in shown if name.startswith("vllm:")} == FOREIGN
    assert all(f"`{name}`" in manual for name in FOREIGN)


def test_a_wrong_expression_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        test_a_panel_asks_for_what_is_exported("x", 'sum by (method) (rate(lockstep_rpc_begun_total{job="x"}[5m]))')
    with pytest.raises(AssertionError):
        test_a_panel_asks_for_what_is_exported("x", "sum by (methods) (lockstep_rpc_started_total)")
    with pytest.raises(AssertionError):
        test_a_panel_asks_for_what_is_exported("x", "rate(lockstep_coordinator_step[5m])")


def test_units_are_in_the_names() -> None:
    own = [metric for name, metric in METRICS.items() if name.startswith("lockstep_")]
    assert len(own) > 20
    for metric in own:
        assert metric.help.endswith("."), metric
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric
        assert metric.name.endswith("_seconds") or metric.type != "histogram", metric


def test_variables_exist() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    for _, promql in expressions():
        assert set(re.findall(r"\$(\w+)", promql)) <= variables.keys() | {"__rate_interval"}
    for variable in variables.values():
        if variable["type"] == "query":
            assert names_in(variable["query"]["query"])[0] & SAMPLES.keys()


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"]) and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in ("row", "stat", "timeseries", "table") and panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        ids = [target["refId"] for target in panel["targets"]]
        assert ids == sorted(set(ids)) and ids
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
    for first, second in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        assert not _overlap(first, second)
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))


def row(metric: Exported) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} |"


def test_the_manual_has_every_metric_once() -> None:
    manual = (ROOT / "docs" / "observability.md").read_text()
    rows = [line for line in manual.splitlines() if line.startswith(("| `lockstep_", "| `process_"))]
    assert rows == [row(metric) for own in EXPORTED.values() for metric in own.values()]


def test_the_sample_configuration_is_read() -> None:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == {"lockstep", "lockstep-services"}
    (files,) = config["scrape_configs"][0]["file_sd_configs"]
    assert files["files"] == ["../runs/*/prometheus.json"]
