"""What speaks of metrics speaks of those that there are: the documentation, the dashboard, the scrape configuration."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.runtime.telemetry import catalogue
from pdserve.runtime.telemetry.catalogue import Kind, Metric

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy/grafana/pdserve.json"
DECLARED = {metric.name: metric for metric in (*catalogue.PROXY, *catalogue.KVD, *catalogue.DECODE)}
SERIES: dict[str, Metric] = {
    metric.name + suffix: metric
    for metric in DECLARED.values()
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}
SPOKEN = {"sum", "max", "count", "by", "rate", "increase", "histogram_quantile", "scalar", "vector", "or", "h"}
"""Of PromQL, what the dashboard uses."""
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


def panels() -> list[dict[str, Any]]:
    """Those that show something."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """(panel's title, expression)."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def words(expression: str) -> set[str]:
    """What of an expression must be a metric: all words outside of braces, brackets and lists of labels."""
    rest = re.sub(r"\{[^}]*\}|\[[^]]*\]|\bby \([^)]*\)", " ", expression)
    return set(re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", rest)) - SPOKEN


def faults(expression: str) -> list[str]:
    """What of an expression Prometheus would find nothing for."""
    found = [f"no metric {word}" for word in sorted(words(expression)) if word not in SERIES]
    for name, selector in re.findall(r"([A-Za-z_:][A-Za-z0-9_:]*)\{([^}]*)\}", expression):
        if name in SERIES:
            for label in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selector):
                if label not in {*SERIES[name].labels, *SCRAPED}:
                    found.append(f"{name} has no label {label}")
    grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    for word in words(expression) & SERIES.keys():
        metric = SERIES[word]
        own = {*metric.labels, *SCRAPED, *(("le",) if word.endswith("_bucket") else ())}
        found += [f"{word} has no label {label} to group by" for label in sorted(grouped - own)]
    return found


def test_the_documentation_has_every_metric_as_it_is() -> None:
    """Its tables are those that scripts/metrics_table.py writes; run that after a change of the catalogue."""
    script = runpy.run_path(str(ROOT / "scripts/metrics_table.py"))
    text = (ROOT / "docs/metrics.md").read_text()
    assert script["filled"](text) == text
    for name in DECLARED:
        assert f"| `{name}` |" in text
    assert set(re.findall(r"\b(?:pdserve|gen_ai)_[a-z_]+[a-z]", text)) <= {
        *DECLARED,
        *(label for metric in DECLARED.values() for label in metric.labels),
    }


def test_a_table_without_a_place_is_an_error() -> None:
    """Or a metric would go missing from the documentation in silence."""
    script = runpy.run_path(str(ROOT / "scripts/metrics_table.py"))
    with pytest.raises(ValueError, match="no place for the table proxy"):
        script["filled"]("<!-- every -->\n\n<!-- end of every -->")


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    """Every word of every expression is a metric of ours, every label one of its own."""
    asked = list(expressions())
    assert len(asked) > 40
    assert {title: wrong for title, expression in asked if (wrong := faults(expression))} == {}


def test_the_dashboard_shows_what_it_is_for() -> None:
    """The parts of the time to first token, RDMA wait, proxy serialization, gaps, incidents: each is asked for."""
    text = " ".join(expression for _, expression in expressions())
    for wanted in ('part="kv.wait"', 'part="proxy.serialization"', 'deadline="lease"', "pdserve_itl_seconds_bucket"):
        assert wanted in text
    services = {catalogue.PROXY[-1].name.split("_")[1], "kvd", "engine"}
    assert services == {"proxy", "kvd", "engine"} <= {word.split("_")[1] for _, e in expressions() for word in words(e)}


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(pdserve_request_total[1m]))", "no metric pdserve_request_total"),
        ('pdserve_kvd_blocks{states="free"}', "pdserve_kvd_blocks has no label states"),
        ("sum by (transport) (pdserve_kvd_blocks)", "pdserve_kvd_blocks has no label transport to group by"),
        ("sum(rate(pdserve_itl_seconds[1m]))", "no metric pdserve_itl_seconds"),
        ("sum by (le) (pdserve_itl_seconds_sum)", "pdserve_itl_seconds_sum has no label le to group by"),
    ],
)
def test_a_wrong_expression_would_be_seen(expression: str, fault: str) -> None:
    """The check above can fail: a typo in a name, a label that is not there, a histogram as such."""
    assert faults(expression) == [fault]


def test_the_dashboard_can_be_imported() -> None:
    """Panels have ids of their own and do not overlap; every target names the data source that is asked for."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]} == {"${datasource}"}
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "mode"]


def test_the_scrape_configuration_names_the_flags_that_there_are() -> None:
    """Prometheus' own defaults are kept: the path is /metrics."""
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    assert {*re.findall(r"--[a-z-]+", text)} == {"--metrics-port"}
    assert "metrics_path" not in text
