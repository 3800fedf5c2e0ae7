"""The output items of /v1/responses and the events that announce them, in OpenAI's order."""

import uuid
from collections import deque
from collections.abc import Iterator
from typing import Any

from jflash.server.answers import Usage
from jflash.server.calls import CallPart
from jflash.server.tools import Parts

PREFIXES = {"message": "msg", "reasoning": "rs"}  # of an item's id, by its type


class Output:
    """One response as it grows; each method gives the events of what it adds."""

    def __init__(self, frame: dict[str, Any], usage: Usage) -> None:
        self._frame, self._usage = frame, usage
        self._items = list[dict[str, Any]]()
        self._open: dict[str, Any] | None = None
        self._number = 0
        self._status, self._incomplete = "in_progress", None

    def body(self) -> dict[str, Any]:
        whole = self._status in ("completed", "incomplete")
        return self._frame | {
            "status": self._status,
            "incomplete_details": self._incomplete,
            "output": [dict(item) for item in self._items],
            "usage": self._tokens() if whole else None,
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self.body())
        yield self._event("response.in_progress", response=self.body())

    def add(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """Text of the same piece comes after the call that is open, and before the next one."""
        calls = deque(parts.calls)
        while calls and calls[0].name is None:
            yield from self._call(calls.popleft())
        if parts.reasoning:
            yield from self._say("reasoning", parts.reasoning)
        if parts.content:
            yield from self._say("message", parts.content)
        for part in calls:
            yield from self._call(part)

    def end(self, finish: str) -> Iterator[dict[str, Any]]:
        whole = finish == "stop"
        yield from self._close(None if whole else False)
        self._status = "completed" if whole else "incomplete"
        self._incomplete = None if whole else {"reason": "max_output_tokens"}
        yield self._event(f"response.{self._status}", response=self.body())

    def _tokens(self) -> dict[str, Any]:
        used = self._usage
        return {
            "input_tokens": used.prompt,
            # To write costs nothing of its own here, as it does in some of OpenAI's prices.
            "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0},
            "output_tokens": used.new,
            "output_tokens_details": {
                "accepted_prediction_tokens": used.accepted,
                "rejected_prediction_tokens": used.drafted - used.accepted,
                "reasoning_tokens": used.reasoning,
            },
            "total_tokens": used.prompt + used.new,
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | fields

    def _say(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Text of the open item, or of a new one."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin_text(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        yield self._event(f"response.{name}.delta", **self._place(), delta=text, logprobs=[])

    def _begin_text(self, kind: str) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind}
        if kind == "message":
            item |= {"role": "assistant", "status": "in_progress"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        else:
            item |= {"summary": []}
            part = {"type": "reasoning_text", "text": ""}
        added = self._event(
            "response.output_item.added", output_index=len(self._items), item=item | {"content": []}
        )
        self._open = item | {"content": [part]}
        self._items.append(self._open)
        yield added
        yield self._event("response.content_part.added", **self._place(), part=dict(part))

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {
            "item_id": self._open["id"],
            "output_index": len(self._items) - 1,
            "content_index": 0,
        }

    def _close(self, whole: bool | None = None) -> Iterator[dict[str, Any]]:
        """Ends the open item; unless `whole` says so, a text is whole and a call is not."""
        if self._open is None:
            return
        index, item, self._open = len(self._items) - 1, self._open, None
        whole = item["type"] != "function_call" if whole is None else whole
        if "status" in item:
            item["status"] = "completed" if whole else "incomplete"
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done", **place, arguments=item["arguments"],
                name=item["name"],
            )  # fmt: skip
        else:
            [part] = item["content"]
            name, text = part["type"], part["text"]
            place["content_index"] = 0
            yield self._event(f"response.{name}.done", **place, text=text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _call(self, part: CallPart) -> Iterator[dict[str, Any]]:
        if part.name is not None:
            yield from self._close()
            self._open = {
                "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress",
                "call_id": f"call_{uuid.uuid4().hex[:24]}", "name": part.name, "arguments": "",
            }  # fmt: skip
            self._items.append(self._open)
            yield self._event(
                "response.output_item.added", output_index=len(self._items) - 1,
                item=dict(self._open),
            )  # fmt: skip
        assert self._open is not None
        if part.arguments:
            self._open["arguments"] += part.arguments
            yield self._event(
                "response.function_call_arguments.delta", item_id=self._open["id"],
                output_index=len(self._items) - 1, delta=part.arguments,
            )  # fmt: skip
        if part.ended:
            yield from self._close(whole=True)
