"""An OpenAI-compatible chat endpoint on this machine, which answers what a test says, late, wrong or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answer:
    """What the server sends: a status, a body, headers, and what goes wrong on the way."""

    def __init__(self, body="", status=200, headers=None, delay=0.0, cut=False, endless=False, drip=0.0):
        self.body, self.status, self.headers, self.delay = body, status, headers or {}, delay
        self.cut, self.endless, self.drip = cut, endless, drip


def chat(content, prompt_tokens=100, reply_tokens=10, finish="stop", **options) -> Answer:
    message = {"role": "assistant", "content": content if isinstance(content, str | None) else json.dumps(content)}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": reply_tokens}
    return Answer(json.dumps({"choices": [{"message": message, "finish_reason": finish}], "usage": usage}), **options)


class ChatServer(ThreadingHTTPServer):
    """A chat endpoint. `reply(request, number)` returns an `Answer`, or the content of one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.headers, self.running, self.most = [], [], 0, 0
        self.lock = threading.Lock()
        self.reply = any_reply
        self.models = ["served"]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address):
        """Clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.requests)
            server.requests.append((self.path, request))
            server.headers.append(dict(self.headers))
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            answer = server.reply(request, number)
            self.send(answer if isinstance(answer, Answer) else chat(answer))
        finally:
            with server.lock:
                server.running -= 1

    def do_GET(self):
        self.send(Answer(json.dumps({"data": [{"id": name} for name in self.server.models]})))

    def send(self, answer: Answer):
        time.sleep(answer.delay)
        body = answer.body.encode("utf-8", "surrogatepass") if isinstance(answer.body, str) else answer.body
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if not answer.endless:
            self.send_header("Content-Length", str(len(body) + (100 if answer.cut else 0)))
        self.end_headers()
        if answer.drip:
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(answer.drip)
        while answer.endless:
            self.wfile.write(b"x" * 65536)
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def any_reply(request, number):
    """A reply that fits the schema of the request and depends on its content alone."""
    total = sum(request["messages"][-1]["content"].encode())

    def value(name, entry):
        if entry["type"] == "string":
            return f"{name} {total % 97}"
        return total % 2 == 0 if entry["type"] == "boolean" else total % (entry.get("maximum", 1) + 1)

    properties = request["response_format"]["json_schema"]["schema"]["properties"]
    return {name: value(name, entry) for name, entry in properties.items()}


@contextmanager
def serving() -> Iterator[ChatServer]:
    """A server that runs while the block does."""
    with ChatServer() as found:
        threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield found
        found.shutdown()
