"""The part of the Hugging Face Hub's HTTP API that a download of one dataset or model needs."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_ID = "openai/gsm8k"
_SHA = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    files: Mapping[str, bytes] = {}

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if re.fullmatch(f"/api/(datasets|models)/{_ID}(/revision/.*)?", path):
            siblings = [{"rfilename": name} for name in self.files]
            self._answer(json.dumps({"id": _ID, "sha": _SHA, "siblings": siblings}).encode())
        elif path.startswith((f"/api/datasets/{_ID}/tree/", f"/api/models/{_ID}/tree/")):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": name}
                for name, content in self.files.items()
            ]
            self._answer(json.dumps(tree).encode())
        else:
            _, _, file = path.partition(f"/{_ID}/resolve/")
            self._answer(self.files.get(file.partition("/")[2]))

    do_HEAD = do_GET

    def _answer(self, content: bytes | None) -> None:
        if content is None:
            self.send_response(404)
            # The Hub's response for a repository that does not exist or is private.
            self.send_header("X-Error-Code", "RepoNotFound")
            content = b""
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        self.send_header("X-Repo-Commit", _SHA)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub(files: Mapping[str, bytes]) -> Iterator[str]:
    """Serves `files` as the dataset and as the model openai/gsm8k, in every revision; its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"files": files}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
