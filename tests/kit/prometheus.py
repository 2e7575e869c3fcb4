"""An agent's metrics, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import requests
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, ...], float]


def scrape(listen: str) -> Samples:
    """Every sample, by its name and its label values in the order of the label names."""
    answer = requests.get(f"http://{listen}/metrics", timeout=60)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
