"""An agent as the command line sees it: an HTTP server that says what it was told to say."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class ScriptedAgent:
    """Answers by path; what it was asked is kept."""

    url: str
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """(path with its query, body) of each request."""

    def says(self, path: str, body: Any, status: int = 200) -> None:
        self.answers[path] = (status, json.dumps(body).encode())

    def streams(self, path: str, *events: Any, end: str = "data: [DONE]\n\n") -> None:
        """Server-sent events; text is sent as it is, so that comments can be among them."""
        lines = [event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n" for event in events]
        self.answers[path] = (200, ("".join(lines) + end).encode())


@contextmanager
def scripted_agent() -> Iterator[ScriptedAgent]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            scripted.asked.append((self.path, json.loads(body) if body else None))
            status, content = scripted.answers.get(
                urlsplit(self.path).path, (404, b'{"error": {"message": "no such thing"}}')
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scripted = ScriptedAgent(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield scripted
    server.shutdown()
    thread.join()
    server.server_close()
