"""One completion stream in vLLM's format, and everything that can be wrong with one."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from tests.fake_stack.lines import VERSION
from tests.fake_stack.wire import Reply, compact

SEPARATORS = "\u2028\u2029\u0085"


class Stream:
    """The events of one answer, written as the request's faults demand."""

    def __init__(self, reply: Reply, faults: dict[str, Any], *, model: str):
        self._reply = reply
        self._faults = faults
        self._held: list[bytes] = []
        self._head = {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def begin(self) -> None:
        """The response head, and what comes before anything is computed."""
        await self._reply.begin_stream()
        if "hang_after_headers" in self._faults:
            await self._reply.hang()
        if "role_chunk" in self._faults:
            await self._event(
                self._chunk({"index": 0, "delta": {"role": "assistant", "content": ""}})
            )
        if "empty_chunk" in self._faults:
            await self._event(self._chunk(_choice("", None, None, None, None)))
        await self._comment()

    async def token(
        self,
        top: list[tuple[int, float]],
        *,
        first: bool,
        last: bool,
        logprobs: int | None,
        name_ids: bool,
        return_ids: bool,
        prompt: list[int],
    ) -> None:
        """One generated token."""
        word = _word(top[0][0])
        text = f" {word}"
        if "line_separators" in self._faults:
            text = f" {word}{SEPARATORS}"
        if "empty_text" in self._faults:
            text = ""
        choice = _choice(
            text,
            None if logprobs is None else _logprobs(top, logprobs, name_ids=name_ids),
            "length" if last else None,
            prompt if return_ids and first else None,
            [top[0][0]] if return_ids else None,
        )
        if "reasoning" in self._faults:
            field = self._faults["reasoning"] or "reasoning"
            choice = {"index": 0, "delta": {field: text}, "finish_reason": choice["finish_reason"]}
        await self._event(self._chunk(choice))
        await self._comment()
        if "hang_after_token" in self._faults:
            await self._reply.hang()
        if "truncated" in self._faults:
            await self._truncate()

    async def usage(self, usage: dict[str, Any]) -> None:
        await self._event(
            {
                **self._head,
                "choices": [],
                "usage": usage,
                "system_fingerprint": f"vllm-{VERSION}",
            }
        )

    async def error(self) -> None:
        error = {"message": "engine is gone", "type": "InternalServerError", "param": None}
        await self._event({"error": {**error, "code": 500}})

    async def end(self) -> None:
        """``[DONE]``, and everything that was held back."""
        await self._send(b"data: [DONE]\n\n")
        if self._held:
            await self._reply.chunk(b"".join(self._held))
        await self._reply.end_stream()

    async def _truncate(self) -> None:
        if self._held:
            await self._reply.chunk(b"".join(self._held))
        if self._faults["truncated"] == "clean":
            await self._reply.end_stream()
        self._reply.drop()

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [choice]}

    async def _comment(self) -> None:
        if "keep_alive" in self._faults:
            await self._send(b": keep-alive\n\n")

    async def _event(self, body: dict[str, Any]) -> None:
        data = compact(body)
        if "split_data_lines" in self._faults:
            data = data.replace(b',"', b',\ndata: "')
        await self._send(b"data: " + data + b"\n\n")

    async def _send(self, data: bytes) -> None:
        if "crlf" in self._faults:
            data = data.replace(b"\n", b"\r\n")
        if "coalesced" in self._faults:
            self._held.append(data)
            return
        size, pause_s = len(data), 0.0
        if "slow_loris" in self._faults:
            given = self._faults["slow_loris"]
            size, pause_s = 1, 0.0005 if given is None else given
        elif "split" in self._faults:
            size = self._faults["split"] or 7
        for start in range(0, len(data), size):
            await self._reply.chunk(data[start : start + size])
            if size < len(data):
                await asyncio.sleep(pause_s)


def _choice(
    text: str,
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    prompt_token_ids: list[int] | None,
    token_ids: list[int] | None,
) -> dict[str, Any]:
    return {
        "index": 0,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "prompt_token_ids": prompt_token_ids,
        "token_ids": token_ids,
    }


def _logprobs(top: list[tuple[int, float]], count: int, *, name_ids: bool) -> dict[str, Any]:
    token, value = top[0]
    name = (lambda token: f"token_id:{token}") if name_ids else _word
    return {
        "text_offset": [0],
        "token_logprobs": [value],
        "tokens": [name(token)],
        "top_logprobs": [{name(token): value for token, value in top[: max(1, count)]}],
    }


def _word(token: int) -> str:
    """A token's name: a word of the fake vocabulary."""
    return f"w{token:04d}"
