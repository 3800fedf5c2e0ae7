"""What the ingress of a fleet says itself: to pages elsewhere, of its health and its replicas."""

import dataclasses
import re

import pytest
from starlette.testclient import TestClient

from jflash.server.about import About
from jflash.server.errors import ApiError
from jflash.server.fleet import SILENT, ForPages, Known, News, health
from jflash.server.metrics import Metrics, of_replicas
from jflash.serving.stats import SIZES, Stats

PAGE = {"Origin": "https://page.example"}


def test_pages_elsewhere_read_what_the_ingress_says_itself():
    full = ApiError("the server is full", status=503, code="queue_full").response()
    client = TestClient(ForPages(full, ["https://page.example"]))
    answer = client.post("/v1/completions", headers=PAGE)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
    assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
    other = client.post("/v1/completions", headers={"Origin": "https://other.example"})
    assert "Access-Control-Allow-Origin" not in other.headers
    asked = PAGE | {"Access-Control-Request-Method": "POST"}
    assert client.options("/v1/completions", headers=asked).status_code == 200


@pytest.mark.parametrize(
    ("path", "working", "waiting", "code"),
    [
        ("/health", 2, 99, None),  # a full fleet is well
        ("/health", 0, 0, "replica_lost"),
        ("/health/ready", 1, 9, None),
        ("/health/ready", 1, 10, "queue_full"),
        ("/health/ready", 0, 0, "replica_lost"),
    ],
)
def test_a_fleet_is_well_while_a_replica_works_and_ready_while_its_queue_has_room(
    path, working, waiting, code
):
    if code is None:
        assert health(path, working, waiting, 10).body == b'{"status":"ok"}'
        return
    with pytest.raises(ApiError) as error:
        health(path, working, waiting, 10)
    assert (error.value.status, error.value.code) == (503, code)


def figures(refused: int) -> bytes:
    numbers: dict = {field.name: refused for field in dataclasses.fields(Stats)}
    counts = (refused,) * (len(SIZES) + 1)
    stats = Stats(**numbers | {"ended": {}, "steps_by_rows": {}, "rounds_by_tokens": counts})
    metrics = Metrics("m", 2, lambda: stats)
    metrics.rejected.inc(refused)
    return metrics.text()


def test_what_replicas_have_said_is_told_without_them():
    now, known = [0.0], Known(lambda: now[0])
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "root_path": ""}
    assert known.answer(scope) is None  # nobody has said anything

    async def app(scope, receive, send) -> None:
        answer = known.answer(scope)
        assert answer is not None
        await answer(scope, receive, send)

    client = TestClient(app)
    old, new = About("old", "jflash 1", 1, 512), About("new", "jflash 2", 2, 512)
    known.hear(News("a", old, [], figures(3)))
    assert client.get("/version").json() == {"version": "jflash 1"}
    known.hear(News("b", new, [], figures(4)))
    known.hear(News("a", old, [], figures(5)))
    assert client.get("/version").json() == {"version": "jflash 2"}
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["created"], model["max_model_len"]) == ("new", 2, 512)
    assert client.get("/v1/models/new").json() == model
    assert client.get("/v1/models/old").json()["error"]["code"] == "model_not_found"
    assert client.head("/").status_code == 200 and client.post("/version").status_code == 405
    for path in ("/v1/completions", "/tokenize", "/health"):
        assert known.answer(scope | {"path": path}) is None
    name = r'vllm:admission_rejections_total{model_name="m",replica="(.)"} (.*)'
    assert re.findall(name, client.get("/metrics").text) == [("a", "5.0"), ("b", "4.0")]
    now[0] = SILENT + 1
    known.hear(News("b", new, [], figures(6)))
    assert re.findall(name, client.get("/metrics").text) == [("b", "6.0")]


def test_what_replicas_have_said_is_told_to_those_with_a_key():
    known = Known()
    known.hear(News("a", About("m", "1", 1, 8), ["secret"], b""))
    scope = {"type": "http", "method": "GET", "path": "/version", "root_path": ""}
    answer = known.answer(scope)
    assert answer is not None
    client = TestClient(answer)
    assert client.get("/version").status_code == client.get("/metrics").status_code == 401
    assert client.get("/").status_code == 200
    bearer = {"Authorization": "Bearer secret"}
    assert client.get("/version", headers=bearer).json() == {"version": "1"}


def parted(page: str) -> tuple[list[str], list[str]]:
    """Its names with texts and types, and its numbers."""
    lines = sorted(page.splitlines())
    return [x for x in lines if x[0] == "#"], [x for x in lines if x[0] != "#"]


def test_the_figures_of_replicas_stand_beside_one_another():
    """Each family has its name, text and type once."""
    text = of_replicas({"a": figures(1), "b": figures(2)}).decode()
    lines = [line for line in text.splitlines() if line.startswith("#")]
    assert sorted(lines) == sorted(
        line for line in figures(1).decode().splitlines() if line[0] == "#"
    )
    got = [line for line in text.splitlines() if line[0] != "#"]
    assert len(got) == 2 * sum(line[0] != "#" for line in figures(1).decode().splitlines())
