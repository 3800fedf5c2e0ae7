"""The ingress on a local Ray, before replicas without a model: what it says while they are full."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from jflash.server.about import About
from jflash.server.relay import Asked
from tests.support.ray_marks import MARKS, served

pytestmark = MARKS
PAGE = "https://page.example"
OPTIONS = {"max_batch": 1, "max_queue": 1, "replicas": 1, "allow_origin": PAGE}
COMPLETIONS = "/v1/completions"


class Sleeper:
    """A replica that answers after a second."""

    def __init__(self, _: object) -> None:
        self._tells: asyncio.Task | None = None

    async def check_health(self) -> None:
        from jflash.serving.ray import tell

        if self._tells is None:
            tells = tell(About("sleeper", "1", 1, 8), [], lambda: b"naps_total 3\n")
            self._tells = asyncio.create_task(tells)

    async def answer(self, asked: Asked) -> AsyncIterator[dict]:
        await asyncio.sleep(1.0)
        yield {"type": "http.response.start", "status": 200, "headers": []}
        yield {"type": "http.response.body", "body": asked.body, "more_body": False}


@pytest.fixture(scope="module")
def url():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jflash.serving.ray.Replica", Sleeper)
        with served(OPTIONS) as url:
            yield url


async def answers_of(url: str, count: int) -> list[httpx.Response]:
    """Of so many clients at once: two fit the replica, and one waits."""
    async with httpx.AsyncClient(base_url=url, headers={"Origin": PAGE}, timeout=60) as client:
        asks = [client.post(COMPLETIONS, content=b"{}") for _ in range(count)]
        return await asyncio.gather(*asks)


def test_a_full_fleet_says_so_as_a_full_server_does(url):
    answers = asyncio.run(answers_of(url, 12))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < len(answers)
    for answer in refused:
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE


def test_the_health_of_a_full_fleet_waits_for_no_replica(url):
    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            assert (await client.get("/health/ready")).json() == {"status": "ok"}
            full = asyncio.create_task(answers_of(url, 9))
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            well, ready = [await client.get(path) for path in ("/health", "/health/ready")]
            assert not full.done() and time.monotonic() - begin < 1
            assert well.json() == {"status": "ok"}
            assert ready.status_code == 503 and ready.json()["error"]["code"] == "queue_full"
            await full

    asyncio.run(main())


def test_what_all_replicas_are_is_told_by_a_full_fleet(url):
    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            full = asyncio.create_task(answers_of(url, 9))
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            paths = "/v1/models", "/version", "/", "/metrics"
            models, version, page, figures = [await client.get(path) for path in paths]
            assert not full.done() and time.monotonic() - begin < 1
            assert models.json()["data"][0]["id"] == "sleeper"
            assert version.json() == {"version": "1"} and "<html" in page.text
            assert 'naps_total{replica="' in figures.text
            await full

    asyncio.run(main())
