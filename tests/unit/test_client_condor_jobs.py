"""``CondorJobClient``: requests with the node's token and with the job's token."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter

from vmjobs.client import CondorJobClient, Retries

JOB = "htc" + "a" * 29


class Service(HTTPAdapter):
    """Fake service in memory. busy: it answers so many of the next requests with 503."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = 0
        self.asked: list[tuple[str, str]] = []

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        self.asked.append((str(request.method), request.headers["Authorization"]))
        answer, body = requests.Response(), {"token": f"of-the-job-{len(self.asked)}"}
        answer.status_code, answer.request, answer.url = 201, request, str(request.url)
        if self.busy:
            self.busy, answer.status_code, body = self.busy - 1, 503, {}
        elif request.method == "DELETE":
            answer.status_code = 204
        answer.raw = io.BytesIO(json.dumps(body).encode())
        answer.headers["Content-Type"] = "application/json"
        return answer


def test_a_job_that_begins_anew_is_claimed_with_the_nodes_token_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same retries as before."""
    service = Service()
    monkeypatch.setattr(requests.Session, "get_adapter", lambda *_, **__: service)
    retries = Retries(deadline=10.0, ceiling=0.01)
    client = CondorJobClient("http://service", "node", JOB, "ada@grid", retries=retries)
    client.begin("1" * 32)
    client.delete_checkpoints()
    service.busy = 2
    client.begin("2" * 32)
    client.delete_checkpoints()
    node, first, second = "Bearer node", "Bearer of-the-job-1", "Bearer of-the-job-5"
    posts = [("POST", node)] * 3
    assert service.asked == [("POST", node), ("DELETE", first), *posts, ("DELETE", second)]
    client.close()
