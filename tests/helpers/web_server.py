"""An HTTP server that can break connections."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; the first ``breaks`` responses with a shard end in the middle."""

    breaks = 0
    requests: list[tuple[str, str | None]]  # path and range

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        cls: Any = type(self)
        bytes_range = self.headers.get("Range")
        cls.requests.append((self.path, bytes_range))
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        start = int(bytes_range.removeprefix("bytes=").rstrip("-")) if bytes_range else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content)
        if cls.breaks and path.suffix == ".tar":
            cls.breaks -= 1
            end = start + (len(content) - start) // 2
        self.wfile.write(content[start:end])


@contextmanager
def serving(folder: Path, breaks: int = 0) -> Iterator[tuple[str, type[Handler]]]:
    """Serve ``folder``; yields the address, and the class that records the requests."""
    handler = type("RecordingHandler", (Handler,), {"breaks": breaks, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
