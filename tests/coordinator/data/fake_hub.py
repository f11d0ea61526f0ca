"""The part of the Hugging Face Hub's HTTP API that a download or an upload of one dataset or model needs."""

import base64
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support import ROOT

_ID = "openai/gsm8k"
_SHA = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    files: Mapping[str, bytes] = {}
    pushed: dict[str, bytes]

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

    def do_POST(self) -> None:
        own = f"http://{self.headers['Host']}/{_ID}"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer may-write":
            self.send_error(401)
        elif "/preupload/" in self.path:
            wanted = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in wanted]
            self._answer(json.dumps({"files": files}).encode())
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            values = [line["value"] for line in lines if line["key"] == "file"]
            self.pushed.update({value["path"]: base64.b64decode(value["content"]) for value in values})
            self._answer(json.dumps({"commitUrl": f"{own}/commit/{_SHA}", "commitOid": _SHA}).encode())
        else:
            self._answer(json.dumps({"url": own, "name": _ID}).encode())

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
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub(files: Mapping[str, bytes], pushed: dict[str, bytes] | None = None) -> Iterator[str]:
    """Serves `files` as the dataset and as the model openai/gsm8k, in every revision; its URL.

    What a client uploads with the token may-write gets into `pushed`.
    """
    served = {"files": files, "pushed": {} if pushed is None else pushed}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), served))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_ANSWERING = """
import json, os, sys
out, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    print(json.dumps(answer(*json.loads(line))), file=out, flush=True)
"""


@contextmanager
def asking(program: str, endpoint: str, directory: Path) -> Iterator[Callable[..., str]]:
    """Runs `program`, which defines answer(*arguments) -> str, in a new process in `directory`, and yields this
    function.

    The Hub client reads its settings only when it is imported; they name the Hub at `endpoint`, and a cache in
    `directory`.
    """
    env = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "PATH": "/usr/bin:/bin",
    }
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'protos'}"
    process = subprocess.Popen(
        [sys.executable, "-c", program + _ANSWERING],
        env=env,
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout

    def ask(*arguments: object) -> str:
        print(json.dumps(arguments), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, process.communicate()[1]
        return json.loads(answer)

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()
