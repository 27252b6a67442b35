"""HTTP for the loopback Hub: requests, answers, faults to order, and the sockets they happen on."""

import json
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import RLock
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

UNKNOWN_TOKEN = "(unknown token)"  # how the log names a token that belongs to nobody


@dataclass
class Request:
    method: str
    path: str  # as sent, still quoted
    query: dict[str, list[str]]
    headers: Message
    user: str | None  # None without a token, UNKNOWN_TOKEN with a wrong one
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class LoggedRequest:
    """A line of ``hub.requests``. ``authorization``: a user's name, UNKNOWN_TOKEN or None, not the token."""

    method: str
    path: str
    authorization: str | None
    range: str | None = None
    fault: int | str | None = None
    status: int | None = None  # None when the connection was cut before an answer


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(payload: Any, status: int = 200, **headers: str) -> Answer:
    body = json.dumps(payload, default=str).encode()
    return Answer(status, body, {"Content-Type": "application/json; charset=utf-8", **headers})


class HubError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        payload: Mapping[str, Any] | None = None,
        **headers: str,
    ):
        super().__init__(message)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if code:
            headers["X-Error-Code"] = code
        headers["X-Error-Message"] = message.encode("ascii", "replace").decode().replace("\n", " ")
        self.answer = json_answer({"error": message, **(payload or {})}, status, **headers)


@dataclass
class Fault:
    method: str
    path_regex: str
    kind: int | str
    times: int | None
    seconds: float


class Faults:
    """Faults to come: ``hub.faults.add("PUT", "/lfs/", "cut-upload", times=2)``.

    Kinds: a status such as 503 or 429 (``Retry-After: seconds``); ``"cut-upload"`` closes the connection
    after half of the request's body, ``"cut-download"`` after half of the answer's, ``"reset"`` so, by TCP
    reset; ``"cut-answer"`` does what was asked and closes without an answer; ``"slow"`` answers after
    ``seconds``. ``method`` may be ``"*"``; ``path_regex`` is searched in the quoted path; ``times=None`` is
    for ever.
    """

    KINDS = ("cut-upload", "cut-download", "reset", "cut-answer", "slow")

    def __init__(self) -> None:
        self.pending: list[Fault] = []

    def add(self, method: str, path_regex: str, kind: int | str, times: int | None = 1, seconds: float = 0) -> None:
        if kind not in self.KINDS and not isinstance(kind, int):
            raise ValueError(f"Unknown fault {kind!r}: use a status code or one of {self.KINDS}")
        self.pending.append(Fault(method, path_regex, kind, times, seconds))

    def clear(self) -> None:
        self.pending.clear()

    def take(self, method: str, path: str) -> Fault | None:
        for fault in self.pending:
            if fault.method in ("*", method) and re.search(fault.path_regex, path):
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self.pending.remove(fault)
                return fault
        return None


class Hub(Protocol):
    """What a connection needs to know of the Hub."""

    users: dict[str, str]
    faults: Faults
    requests: list[LoggedRequest]
    lock: RLock

    def answer(self, request: Request) -> Answer: ...


class LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    hub: Hub

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # no polite FIN first, so that a "reset" is one

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that goes away is no news
            super().handle_error(request, client_address)


class Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    timeout = 60
    server: LoopbackServer

    def respond(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        user = hub.users.get(token, UNKNOWN_TOKEN) if token else None
        with hub.lock:
            fault = hub.faults.take(self.command, url.path)
            record = LoggedRequest(
                self.command, url.path, user, self.headers.get("Range"), fault.kind if fault else None
            )
            hub.requests.append(record)
        kind = fault.kind if fault else None

        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2 if kind == "cut-upload" else length)
        if kind == "cut-upload" or len(body) < length:
            self.close_connection = True
            return
        if fault and kind == "slow":
            time.sleep(fault.seconds)
        if fault and isinstance(kind, int):
            answer = HubError(kind, f"Injected fault {kind}").answer
            if kind == 429:
                answer.headers["Retry-After"] = f"{fault.seconds:.0f}"
        else:
            request = Request(self.command, url.path, parse_qs(url.query), self.headers, user, body)
            with hub.lock:
                answer = hub.answer(request)
        if kind == "cut-answer":
            self.close_connection = True
            return
        record.status = answer.status
        self.send(answer, cut=kind in ("cut-download", "reset"))
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = respond

    def send(self, answer: Answer, cut: bool) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
        self.wfile.flush()
        self.close_connection |= cut

    def log_message(self, format: str, *args: object) -> None:
        """Tests read ``hub.requests``; the terminal stays quiet."""
