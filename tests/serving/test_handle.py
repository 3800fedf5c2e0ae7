"""A request's events on their way to a reader of an event loop."""

import asyncio
import threading

from jflash.serving.handle import Handle
from jflash.serving.request import Event, Request


def test_many_readers_wake_by_one_call_of_their_loop(monkeypatch):
    """Each call is one of the system; nobody is forgotten, and a later event wakes again."""
    handles = [Handle(Request(prompt_ids=[1], max_tokens=2), lambda _: None) for _ in range(8)]

    def give(event: Event) -> None:
        thread = threading.Thread(target=lambda: [handle.give([event]) for handle in handles])
        thread.start()
        thread.join()  # the loop cannot come between

    async def main() -> list[list[int]]:
        loop, calls = asyncio.get_running_loop(), []
        soon = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda do: (calls.append(do), soon(do)))

        async def read(handle: Handle) -> list[int]:
            return [token async for event in handle for token in event.token_ids]

        readers = [asyncio.create_task(read(handle)) for handle in handles]
        for token, reason in ((3, None), (4, "length")):
            for _ in range(3):
                await asyncio.sleep(0)
            give(Event((token,), finish_reason=reason))
        texts = await asyncio.gather(*readers)
        assert len(calls) == 2
        return texts

    assert asyncio.run(main()) == [[3, 4]] * 8


def test_every_reader_of_a_loop_hears_of_the_end():
    """A second one, as after a task that was cancelled, left the first one waiting for ever."""
    handle = Handle(Request(prompt_ids=[1], max_tokens=2), lambda _: None)

    async def read() -> list[int]:
        return [token async for event in handle for token in event.token_ids]

    async def main() -> list[list[int]]:
        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        readers.pop(0).cancel()
        for token, reason in ((3, None), (4, "length")):
            handle.give([Event((token,), finish_reason=reason)])
            await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.gather(*readers), 20)

    assert sorted(token for ids in asyncio.run(main()) for token in ids) == [3, 4]
