"""A client of OpenAI-compatible chat completions: time limits, retries, and errors that say what to change.

Nothing that a server sends is trusted: replies have a largest size, redirects are not followed, and the key, should a server repeat it,
is removed from what it says.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

LARGEST_REPLY = 2**20  # bytes
LONGEST_WAIT = 30.0  # seconds between two attempts, unless the server names a time
MOST_REFUSALS = 16  # in a row, after which it is not the requests that are refused, but the account or a parameter
LONGEST_RETRY_AFTER = 600.0  # a longer one ends the run, which would do nothing but wait
SECRET = 8  # characters; a shorter key, such as EMPTY, is a placeholder, and may be part of any text
CHATS = "/chat/completions"


class JudgeError(OSError):
    """The endpoint cannot be used, or stopped answering; a run resumes from its last checkpoint."""


@dataclass(frozen=True)
class Completion:
    """What an endpoint answers to one request.

    Attributes:
        text: the model's reply; empty if there is none.
        cut: the reply ends at the largest number of tokens.
        refused: why the endpoint does not answer this request, although it answers others; empty if it does.
        prompt_tokens, reply_tokens: as the server counts them; 0 if it does not.
        seconds: from the request to its answer.
        attempts: requests that were sent.
    """

    text: str
    cut: bool = False
    refused: str = ""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    seconds: float = 0.0
    attempts: int = 1


class _Unusable(Exception):
    """An answer that another attempt may improve.

    Attributes:
        wait: seconds that the server asks to wait for; None or 0 if it names no time.
    """

    def __init__(self, text: str, wait: float | None = None):
        super().__init__(text)
        self.wait = wait


class ChatEndpoint:
    """One model of one server.

    Args:
        url: the address without `/chat/completions`, such as `http://localhost:8000/v1`.
        model: its name on the server.
        key: the environment variable that holds the key; None if the server needs none.
        timeout: seconds of one attempt, from the connection to the last byte.
        retries: further attempts of a request that was not answered: no connection, the time limit, the statuses 408, 409, 425, 429
            and 5xx, or something else than a chat completion. The time between them doubles from one second on, up to
            `LONGEST_WAIT`, or is what the server asks for (`Retry-After`).

    Raises:
        ValueError: the address is none, the environment variable is not set, or a proxy of the environment cannot be used.
    """

    def __init__(self, url: str, model: str, key: str | None = None, *, timeout: float = 60.0, retries: int = 8):
        self.url, self.model, self.key_name = check_url(url), model, key
        self.timeout, self.retries = timeout, retries
        self.key = "" if key is None else read_key(key)
        self.takes_schema = True
        self.answered, self.refusals = False, 0  # refusals in a row
        self._said = 0.0  # when a retry was last logged
        # The client of huggingface_hub: httpx2 from its version 2 on, httpx before.
        self.httpx: Any = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
        self.certificates = self.httpx.create_ssl_context()
        try:
            self._client()
        except (ImportError, ValueError, self.httpx.InvalidURL) as error:
            raise ValueError(
                f"the judge at {self.url} cannot be reached by the proxy that the environment names (ALL_PROXY, HTTPS_PROXY, "
                f"HTTP_PROXY): {error}"
            ) from error

    def _client(self) -> Any:
        """A client for one request, with the proxies of the environment."""
        return self.httpx.AsyncClient(verify=self.certificates, timeout=None, follow_redirects=False)

    async def complete(self, body: Mapping[str, Any], schema: Mapping[str, Any], retries: int | None = None) -> Completion:
        """The answer to a request. If the server refuses it, it is asked without the schema; if that is answered, then also later.

        Args:
            body: the request without `model` and `response_format`.
            schema: JSON schema of the reply.
            retries: in place of those of the endpoint.

        Raises:
            JudgeError: there is no answer after all attempts, or none is to be expected, as after `MOST_REFUSALS` in a row.
        """
        completion = await self._complete({"model": self.model, **body}, schema, retries)
        self.answered |= not completion.refused
        self.refusals = self.refusals + 1 if completion.refused else 0
        if self.refusals >= MOST_REFUSALS:
            raise JudgeError(
                f"the judge at {self.url} has refused {self.refusals} requests in a row, the last with {completion.refused}: "
                "see to the account, the parameters of the judge file, or the length of its prompts, and continue the run"
            )
        return completion

    async def _complete(self, request: Mapping[str, Any], schema: Mapping[str, Any], retries: int | None) -> Completion:
        if not self.takes_schema:
            return await self._ask(request, retries)
        wanted = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": schema}}
        completion = await self._ask({**request, "response_format": wanted}, retries)
        if completion.refused:
            plain = await self._ask(request, retries)
            if not plain.refused and self.takes_schema:
                self.takes_schema = False
                logger.warning(
                    "%s refuses response_format json_schema (%s); it is asked in words only", self.url, completion.refused
                )
            return replace(plain, attempts=plain.attempts + completion.attempts)
        return completion

    async def _ask(self, request: Mapping[str, Any], retries: int | None) -> Completion:
        attempts = 1 + (self.retries if retries is None else retries)
        data = json.dumps(request).encode()
        problem = ""
        for attempt in range(1, attempts + 1):
            started = time.perf_counter()
            try:
                status, headers, content = await self._send("POST", CHATS, data)
                if status == 404:
                    raise await self._not_found(content)
                completion = self._read(status, headers, content)
            except (_Unusable, OSError, self.httpx.HTTPError) as error:  # OSError: also the time limit
                if isinstance(error, JudgeError):
                    raise
                problem = self._described(error)
                if attempt < attempts:
                    await self._wait(problem, attempt, error.wait if isinstance(error, _Unusable) else None, data)
            else:
                return replace(completion, seconds=time.perf_counter() - started, attempts=attempt)
        times = f"{attempts} attempts" if attempts > 1 else "one attempt"
        raise JudgeError(f"the judge at {self.url} does not answer, after {times}: {problem}")

    async def _send(self, method: str, path: str, data: bytes | None = None) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and content of an answer, from which the key is removed."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        content = bytearray()
        async with (
            asyncio.timeout(self.timeout),
            self._client() as client,
            client.stream(method, self.url + path, content=data, headers=headers) as answer,
        ):
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > LARGEST_REPLY:
                    raise _Unusable(f"its answer is larger than {LARGEST_REPLY // 2**20} MiB")
        found = bytes(content)
        secret = len(self.key) >= SECRET
        return answer.status_code, answer.headers, found.replace(self.key.encode(), b"[key]") if secret else found

    def _without_key(self, text: str) -> str:
        """JSON may spell the characters of a key in another way, so that `_send` does not find it."""
        return text.replace(self.key, "[key]") if len(self.key) >= SECRET else text

    def _described(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.timeout:g} s"
        return f"{type(error).__name__}: {error}".rstrip(": ") if not isinstance(error, _Unusable) else str(error)

    async def _wait(self, problem: str, attempt: int, asked: float | None, data: bytes) -> None:
        """Wait before the next attempt. Requests that failed together are not repeated together."""
        if asked is not None and asked > LONGEST_RETRY_AFTER:
            raise JudgeError(f"the judge at {self.url} asks to wait for {asked:.0f} s ({problem}): continue the run later")
        spread = hashlib.sha256(data + bytes([attempt % 256])).digest()[0] / 255
        wait = asked or min(2.0 ** min(attempt - 1, 10), LONGEST_WAIT) * (0.5 + 0.5 * spread)
        if time.monotonic() - self._said > 10.0:
            self._said = time.monotonic()
            logger.warning("the judge at %s: %s; asked again in %.1f s", self.url, problem, wait)
        await asyncio.sleep(wait)

    # ---- Reading answers -----------------------------------------------------------------------------------------------------

    def _read(self, status: int, headers: Mapping[str, str], content: bytes) -> Completion:
        """The completion in an answer.

        Raises:
            _Unusable: another attempt may bring one.
            JudgeError: none will.
        """
        said = self._without_key(message_of(content))
        # Of this request: too long, or against a content policy.
        if status in (400, 413, 422) or (status == 403 and self.answered):
            return Completion("", refused=f"status {status}: {said}")
        if status in (408, 409, 425, 429) or status >= 500:
            raise _Unusable(f"status {status}: {said}", retry_after(headers.get("Retry-After")))
        where = f"the judge at {self.url}"
        if status in (401, 403):
            held = (
                f"the key in {self.key_name}" if self.key else "a request without a key; name its environment variable by key:"
            )
            raise JudgeError(f"{where} refuses {held} (status {status}: {said})")
        if 300 <= status < 400:
            place = self._without_key(headers.get("Location", "nowhere"))[:200]
            raise JudgeError(f"{where} redirects to {place!r}, which is not followed: name that url")
        if status != 200:
            raise JudgeError(f"{where} refuses a request (status {status}: {said})")
        try:
            answer = json.loads(content)
            choices, usage = answer["choices"], answer.get("usage")
            if not choices and usage:
                choices = [{"message": {}}]  # a filter took the reply
            choice = choices[0]
            text = self._without_key(text_of(choice["message"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Unusable(f"its answer is not a chat completion: {said or 'it is empty'}") from error
        prompt, reply = (
            whole(usage.get(name)) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")
        )
        return Completion(text, choice.get("finish_reason") == "length", "", prompt, reply)

    async def _not_found(self, content: bytes) -> JudgeError:
        """Status 404: the path is wrong, or the model."""
        served: list[str] = []
        with suppress(Exception):  # the list is a courtesy
            _, _, models = await self._send("GET", "/models")
            served = [str(entry["id"]) for entry in json.loads(models)["data"]]
        text = self._without_key(message_of(content))
        if not served:
            text += "; expected an address such as http://localhost:8000/v1, and a model that it serves"
        elif self.model not in served:
            text += f"; the model is not one of {', '.join(name[:100] for name in served[:10])}"
            text += f" and {len(served) - 10} others" if len(served) > 10 else ""
        return JudgeError(f"the judge at {self.url} answers with status 404 to {CHATS} for the model {self.model!r}: {text}")


def check_url(url: str) -> str:
    """The address without a final `/chat/completions`.

    Raises:
        ValueError: it is not an http or https address, or has a password or a query.
    """
    try:
        found = urlsplit(url)
        valid = found.scheme in ("http", "https") and found.hostname and found.port != 0 and not re.search(r"\s", url)
    except ValueError:  # the host or the port
        valid = False
    if not valid:
        raise ValueError(f"url is {url[:200]!r}: expected an address such as http://localhost:8000/v1")
    if found.username or found.password or found.query or found.fragment:
        raise ValueError("url holds a user, a password, a query or a fragment: name the address alone, and the key by key:")
    return url.rstrip("/").removesuffix(CHATS).rstrip("/")


def read_key(name: str) -> str:
    """The content of an environment variable.

    Raises:
        ValueError: the name is none, or the variable is not set. The message does not show a text that may be the key itself.
    """
    if not re.fullmatch(r"[A-Za-z_]\w{0,99}", name):
        raise ValueError("key is the name of an environment variable, not the key itself, such as key: OPENAI_API_KEY")
    value = os.environ.get(name, "").strip()
    if not value:
        hint = "" if re.search(r"KEY|TOKEN", name, re.IGNORECASE) else " (key: takes the variable's name, not the key itself)"
        raise ValueError(f"the environment variable {name if not hint else 'that key: names'} is not set{hint}")
    if not value.isascii() or not value.isprintable():
        raise ValueError(f"the environment variable {name} holds characters that no key has")
    return value


def message_of(content: bytes) -> str:
    """What an answer says about an error, in one line."""
    text = content[:4096].decode("utf-8", "replace")
    with suppress(ValueError, RecursionError):
        found = json.loads(content)
        while isinstance(found, dict):  # {"error": {"message": ...}}, {"message": ...}, {"detail": ...}
            found = next((found[name] for name in ("error", "message", "detail") if name in found), None)
        text = found if isinstance(found, str) else text
    return " ".join(text.split())[:300]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, which may come in parts, or why the model refuses to reply; empty without either.

    Raises:
        TypeError, LookupError: the content is something else.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    text = content or message.get("refusal") or ""
    if not isinstance(text, str):
        raise TypeError(f"a text is expected, not {type(text).__name__}")
    return text


def retry_after(value: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks to wait: a number, or a date; None if it is neither."""
    if value is None:
        return None
    with suppress(ValueError, OverflowError):
        seconds = float(value)
        return max(seconds, 0.0) if seconds == seconds else None
    with suppress(ValueError, TypeError, OverflowError):
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    return None


def whole(value: Any) -> int:
    """A count, or 0 if it is none."""
    return value if type(value) is int and 0 <= value < 2**53 else 0
