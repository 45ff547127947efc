"""The bodies of vLLM's OpenAI-compatible API: what a request says, and what an answer looks like."""

import json
import time
from typing import Any

from .records import Request, RequestRecord

CHAT_PATH = "/v1/chat/completions"
WORD = " word"  # what every token reads


class BadRequestError(Exception):
    """Refused before it reached the engine, with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_request(body: dict[str, Any], *, path: str, client: str, model: str, output_tokens: int) -> Request:
    """A prompt is as long as it has words (or token ids).

    It ends by itself after *output_tokens*, or with ignore_eos only at its max_tokens.
    Raises BadRequestError.
    """
    if body.get("model", model) != model:
        raise BadRequestError(404, f"The model `{body['model']}` does not exist.")
    prompt = _chat_text(body) if path == CHAT_PATH else body.get("prompt")
    if not isinstance(prompt, str | list) or not prompt:
        raise BadRequestError(400, "there is no prompt")
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise BadRequestError(400, f"max_tokens must be at least 1, got {max_tokens}.")
    if body.get("ignore_eos") and max_tokens is not None:
        output_tokens = max_tokens
    return Request(
        prompt_tokens=max(len(prompt.split()) if isinstance(prompt, str) else len(prompt), 1),
        output_tokens=output_tokens,
        max_tokens=max_tokens,
        stream=bool(body.get("stream")),
        path=path,
        prompt=prompt if isinstance(prompt, str) else "",
        client=client,
    )


def _chat_text(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequestError(400, "there are no messages")
    return " ".join(str(message.get("content", "")) for message in messages)


def error(status: int, message: str) -> dict[str, Any]:
    kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def refusal(record: RequestRecord, max_model_len: int) -> str:
    """Why the engine did not answer *record*."""
    if record.finish_reason == "too_long":
        asked = record.prompt_tokens + (record.request.max_tokens or 0)
        return f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked}."
    if record.finish_reason == "queue_full":
        return "The server is overloaded: too many queued requests. Please retry later."
    return "EngineCore encountered an issue. See stack trace (above) for the root cause."


def answer(record: RequestRecord) -> dict[str, Any]:
    text = WORD * record.generated_tokens
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": record.finish_reason}
    if record.request.path == CHAT_PATH:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if record.request.path == CHAT_PATH else "text_completion"
    return _envelope(record, kind) | {"choices": [choice], "usage": _usage(record)}


def chunk(record: RequestRecord, *, last: bool = False) -> dict[str, Any]:
    """One token of a stream; the last chunk has none and says why it ended."""
    text = "" if last else WORD
    reason = record.finish_reason if last else None
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
    if record.request.path == CHAT_PATH:
        choice["delta"] = {"content": text}
    else:
        choice["text"] = text
    kind = "chat.completion.chunk" if record.request.path == CHAT_PATH else "text_completion"
    return _envelope(record, kind) | {"choices": [choice]}


def usage_chunk(record: RequestRecord) -> dict[str, Any]:
    """The extra one for stream_options.include_usage."""
    return chunk(record, last=True) | {"choices": [], "usage": _usage(record)}


def event(body: dict[str, Any] | str) -> bytes:
    """As server-sent event."""
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def _envelope(record: RequestRecord, kind: str) -> dict[str, Any]:
    return {"id": record.id, "object": kind, "created": int(time.time()), "model": record.model}


def _usage(record: RequestRecord) -> dict[str, int]:
    prompt, generated = record.prompt_tokens, record.generated_tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
