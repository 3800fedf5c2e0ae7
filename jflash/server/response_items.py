"""The output items of /v1/responses and the events that announce them, in OpenAI's order."""

import uuid
from collections.abc import Iterator
from typing import Any

from jflash.server.answers import Usage
from jflash.server.tools import Call, Parts


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
        if parts.reasoning:
            yield from self._say("reasoning", parts.reasoning)
        if parts.content:
            yield from self._say("message", parts.content)
        for call in parts.calls:
            yield from self._call(call)

    def end(self, finish: str) -> Iterator[dict[str, Any]]:
        yield from self._close()
        whole = finish == "stop"
        self._status = "completed" if whole else "incomplete"
        self._incomplete = None if whole else {"reason": "max_output_tokens"}
        yield self._event(f"response.{self._status}", response=self.body())

    def _tokens(self) -> dict[str, Any]:
        used = self._usage
        return {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": used.cached},
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
        item: dict[str, Any] = {"id": f"{kind[:3]}_{uuid.uuid4().hex}", "type": kind}
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

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        [part] = self._open["content"]
        name = part["type"]
        yield self._event(f"response.{name}.done", **self._place(), text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=part)
        if "status" in self._open:
            self._open["status"] = "completed"
        index, item, self._open = len(self._items) - 1, self._open, None
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _call(self, call: Call) -> Iterator[dict[str, Any]]:
        yield from self._close()
        item = {
            "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed",
            "call_id": f"call_{uuid.uuid4().hex[:24]}", "name": call.name,
            "arguments": call.arguments,
        }  # fmt: skip
        place: dict[str, Any] = {"output_index": len(self._items)}
        self._items.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", **place, item=begun)
        place["item_id"] = item["id"]
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event(
            "response.function_call_arguments.done", **place, arguments=call.arguments,
            name=call.name,
        )  # fmt: skip
        del place["item_id"]
        yield self._event("response.output_item.done", **place, item=item)
