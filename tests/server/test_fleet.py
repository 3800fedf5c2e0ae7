"""What the ingress of a fleet says itself: to pages elsewhere, and about its health."""

import pytest
from starlette.testclient import TestClient

from jflash.server.errors import ApiError
from jflash.server.fleet import ForPages, health

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
