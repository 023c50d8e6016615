"""Rollouts by vLLM servers, in an environment of their own or on other machines.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 16 --max-cpu-loras 4 --generation-config vllm
    firedistill train gsm8k-qwen2.5-1.5b --rollouts http://host:8000

Each version of the student's weights is registered with every server under a name of its own, from a folder that the servers can read.
The prompts are divided among the servers. A server that does not answer or has restarted is retried for `patience` seconds.
"""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from firedistill.models.states import unwrap
from firedistill.rollouts.padding import HeadPadding, padding_in
from firedistill.rollouts.remote import VERSIONS, RemoteEngine, Request, RolloutError, check_vllm
from firedistill.rollouts.weights import version_of, write_adapter

RETRY_AFTER = 1.0
PATIENCE = 600.0
"""Seconds for which a server that does not answer is asked again."""


def unreachable(server: str) -> str:
    """Why a server does not answer; an empty text if it does."""
    try:
        request_json(server.rstrip("/"), "/v1/models", None, timeout=5.0)
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""


class Refusal(ValueError):
    """A server's answer that a request is wrong; `status` is its HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def request_json(server: str, path: str, body: dict[str, Any] | None, timeout: float = 10.0) -> dict[str, Any]:
    """The JSON object with which a server answers; empty if it answers with something else.

    Args:
        body: sent by POST; None sends a GET request.
        timeout: seconds.

    Raises:
        Refusal: the answer has the status of an error.
        OSError: there is no answer, or one that is not complete.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, {"Content-Type": "application/json"})
    try:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise Refusal(error.code, " ".join(error.read().decode(errors="replace").split())[:300]) from error
    except http.client.HTTPException as error:  # an answer that is cut short, or not HTTP
        raise OSError(repr(error)[:300]) from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


Item = TypeVar("Item")
Result = TypeVar("Result")


def mapped(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """The results for all items, in order, by this many threads.

    If the caller stops or a call fails, no further call begins, and nothing waits for those that have begun, not even the end of the
    process: a server may hang.
    """
    results: list[Future[Result]] = [Future() for _ in items]
    waiting, lock = iter(list(zip(items, results, strict=True))), threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                item, result = next(waiting, (None, None))
            if item is None or result is None:
                return
            try:
                result.set_result(function(item))
            except BaseException as error:
                result.set_exception(error)

    for _ in range(min(threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for result in results:
            yield result.result()
    finally:
        stopped.set()


class VLLMServerEngine(RemoteEngine):
    """An engine on one or more vLLM servers.

    Args:
        model, tokenizer, context: see `RemoteEngine`.
        servers: their addresses, `http://host:port`.
        folder: where adapters are written; every server reads the same path.
        sequences: requests at the same time per server.
        patience: seconds for which a server that fails is retried, and for which an answer is awaited beyond a second per token.
        process: index of the trainer's process. The requests of each one begin with the server after those of the one before.
    """

    sharded = True

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        servers: Sequence[str],
        folder: Path,
        *,
        context: int,
        sequences: int = 32,
        patience: float = PATIENCE,
        process: int = 0,
    ):
        super().__init__(model, tokenizer, context=context, sequences=sequences)
        self.servers, self.folder, self.patience = [url.rstrip("/") for url in servers], folder, patience
        self.process = process
        self.run = uuid.uuid4().hex[:12]  # names of two runs never collide on a server
        self.versions: list[str] = []  # those whose folders exist, oldest first
        self.padding: HeadPadding | None = None  # of the servers' base model
        self.checked = False

    def _sample(self, requests: Sequence[Request]) -> Iterable[tuple[Request, list[int], list[float]]]:
        if not self.checked:
            self._check_servers()
        version = self._hand_over()

        def complete(numbered: tuple[int, Request]) -> tuple[Request, list[int], list[float]]:
            position, request = numbered
            server = self.servers[(self.process * len(requests) + position) % len(self.servers)]
            return request, *self._complete(server, version, {**request.parameters, "prompt": request.prompt})

        with self.metrics.timed("seconds_sampling", self.model.device):
            yield from mapped(complete, list(enumerate(requests)), self.sequences * len(self.servers))

    def close(self) -> None:
        """Take the adapters from the servers and remove their folders."""
        while self.versions:
            self._withdraw(self.versions.pop(0))
        with suppress(OSError):  # it does not exist, or holds other files
            self.folder.rmdir()

    # ---- Weights ---------------------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> str:
        """Register the current weights with all servers; returns their name."""
        with self.metrics.timed("seconds_export", self.model.device):
            version = f"firedistill-{self.run}-{version_of(self.model)}"
            if version in self.versions:
                return version
            write_adapter(self.model, self.folder / version, self.padding)
            # A server that does not get it now answers that it has no such model, and gets it then.
            self.versions.append(version)
        with self.metrics.timed("seconds_load", self.model.device):
            for server in self.servers:
                self._register(server, version)
        while len(self.versions) > VERSIONS:
            self._withdraw(self.versions.pop(0))
        return version

    def _register(self, server: str, version: str) -> None:
        body = {"lora_name": version, "lora_path": str((self.folder / version).absolute())}
        try:
            self._post(server, "/v1/load_lora_adapter", body)
        except Refusal as refusal:
            if "already" not in str(refusal):  # another thread was faster, or an answer was lost on its way
                raise RolloutError(
                    f"{server} refuses the adapter in {body['lora_path']} ({refusal}): it needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, "
                    "--enable-lora, a --max-lora-rank of at least lora_r, and access to this folder"
                ) from refusal

    def _withdraw(self, version: str) -> None:
        for server in self.servers:
            with suppress(OSError, ValueError):  # it has restarted, or is gone: the name is never used again
                request_json(server, "/v1/unload_lora_adapter", {"lora_name": version})
        shutil.rmtree(self.folder / version, ignore_errors=True)

    # ---- Requests --------------------------------------------------------------------------------------------------------------------

    def _check_servers(self) -> None:
        paddings = []
        for server in self.servers:
            try:
                models = self._post(server, "/v1/models", None).get("data")
            except Refusal as refusal:
                raise RolloutError(
                    f"{server} refuses /v1/models ({refusal.status}: {refusal}): expected the address of a vLLM server without /v1, "
                    "and no key"
                ) from refusal
            if not (isinstance(models, list) and models and isinstance(models[0], dict)):
                raise RolloutError(f"{server} lists no models at /v1/models: expected a vLLM server")
            with suppress(Refusal):  # behind a proxy that hides it
                if version := self._post(server, "/version", None).get("version"):
                    check_vllm(str(version), server)
            length = models[0].get("max_model_len")
            if isinstance(length, int) and length < self.context:
                raise RolloutError(
                    f"{server} has --max-model-len {length}; expected max_context_tokens, {self.context}, or more"
                )
            root = models[0].get("root")
            try:
                paddings.append(padding_in(root if isinstance(root, str) else "", unwrap(self.model).config.get_text_config()))
            except ValueError as error:
                raise RolloutError(f"{server} serves {root!r}, which is another model than the student: {error}") from error
        if len(set(paddings)) > 1:
            raise RolloutError(
                f"the servers {', '.join(self.servers)} serve models with different head sizes (padding {paddings}): "
                "serve the same folder on all of them"
            )
        self.padding = paddings[0]
        self.checked = True

    def _complete(self, server: str, version: str, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Token ids and log-probabilities of one response; a server that has lost the adapter gets it again, once."""
        request = {**body, "model": version, "return_token_ids": True, "skip_special_tokens": False}
        try:
            answer = self._post(server, "/v1/completions", request)
        except Refusal as refusal:
            if refusal.status != 404:
                raise RolloutError(f"{server} refuses a request: {refusal}") from refusal
            self._register(server, version)
            try:
                answer = self._post(server, "/v1/completions", request)
            except Refusal as again:
                raise RolloutError(f"{server} has lost the adapter {version} twice: {again}") from again
        try:
            choice, model = answer["choices"][0], answer["model"]
            ids, log_probs = [int(i) for i in choice["token_ids"]], [float(p) for p in choice["logprobs"]["token_logprobs"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RolloutError(
                f"{server} answers without token ids or log-probabilities ({error!r}); vLLM 0.32 or newer has them"
            ) from error
        if model != version:
            raise RolloutError(f"{server} answered with the model {model!r}; expected {version!r}")
        if not 0 < len(ids) == len(log_probs) <= body["max_tokens"]:
            raise RolloutError(
                f"{server} answered with {len(ids)} tokens and {len(log_probs)} log-probabilities, limit {body['max_tokens']}"
            )
        if len(ids) < body["max_tokens"] and ids[-1] not in self.stop_ids:
            raise RolloutError(
                f"{server} ended a response after {len(ids)} of {body['max_tokens']} tokens without a stop token (finish reason "
                f"{choice.get('finish_reason')!r}): start it with --generation-config vllm and without a limit of its own"
            )
        return ids, log_probs

    def _post(self, server: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """A request that is repeated while the server refuses or cuts connections, or has an internal error other than with an adapter.

        A completion comes when its last token is sampled, so its time limit is a second per token longer than that of other answers.
        """
        limit, failing_since = self.patience + (body or {}).get("max_tokens", 0), None
        while True:
            try:
                return request_json(server, path, body, timeout=max(limit, 1.0))
            except Refusal as refusal:
                # "Call to add_lora method failed: LoRA rank 32 is greater ..." has the status 500
                if (refusal.status < 500 and refusal.status not in (408, 425, 429)) or "add_lora" in str(refusal):
                    raise
                problem: Exception = refusal
            except OSError as error:  # no connection, a connection that was cut, or a time limit
                problem = error
            now = time.monotonic()
            failing_since = failing_since or now
            if (silent := isinstance(problem, TimeoutError)) or now > failing_since + self.patience:
                raise RolloutError(
                    f"{server} has not answered for {limit if silent else self.patience:.0f} s ({problem}); the run resumes from its "
                    "last checkpoint"
                )
            time.sleep(RETRY_AFTER)
