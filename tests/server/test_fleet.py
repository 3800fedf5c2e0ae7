"""What the ingress of a fleet says itself: to pages elsewhere, and about its health."""

from starlette.testclient import TestClient

from jflash.server.errors import ApiError
from jflash.server.fleet import ForPages

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
