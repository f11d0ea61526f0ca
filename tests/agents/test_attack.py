"""Tests an agent that attacks: what it gets, what it is paid, and that its neighbor plays as if it were not there."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from services.reward.agents import endpoint
from services.reward.agents.endpoint import Endpoint
from tests.agents.harness import Stage, staged, table_of
from tests.agents.in_process import caught

Json = dict[str, Any]
Program = Callable[..., Json]
# The neighbor's processes start while the attacker has all that it can get.
_NEIGHBOR = """
import subprocess, sys
for index in range(3):
    text = ask(f"neighbor {index}")
    subprocess.run(["true"], check=True)
print(text, end="")
"""
_ATTACKER = """
import http.client, itertools, pathlib, socket, time
found, at = {}, ("127.0.0.1", 8000)
other, head = ask("keys"), "POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer %s\\r\\n"

def post(key, body, length=None):
    connection = socket.create_connection(at, 5)
    try:
        connection.sendall((head % key + (length or f"Content-Length: {len(body)}") + "\\r\\n\\r\\n").encode() + body)
    except OSError:
        pass
    return connection

def status(connection):
    try:
        return int(connection.recv(4096).split()[1])
    except (OSError, IndexError):
        return 0

def message(text):
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()

key = os.environ["OPENAI_API_KEY"]
found["other key"] = [status(post(one, message("mine?"))) for one in (other, "", "\\u00e9".encode().decode("latin1"))]
found["100 MB"] = status(post(key, bytes(100 << 20)))
found["endless"] = status(post(key, b"%x\\r\\n" % (9 << 20) + bytes(9 << 20), "Transfer-Encoding: chunked"))
found["garbage"] = [status(post(key, body)) for body in (b"[" * 10**6, b"{\\xff}", b'{"messages": 7}', b"7")]
lines = [b"GET / HTTP/9.9\\r\\n\\r\\n", b"\\0" * 9000, b"GET /" + b"a" * 10**5 + b" HTTP/1.1\\r\\n\\r\\n"]
raw = [socket.create_connection(at, 5) for _ in lines]
for connection, line in zip(raw, lines):
    connection.sendall(line)
found["raw"] = [status(connection) // 100 for connection in raw]
for path in ("reward.txt", "reward.json"):
    pathlib.Path(path).write_text('{"reward": 1000}')
idle = [socket.create_connection(at) for _ in range(900)]
for connection in idle:
    connection.setblocking(False)
time.sleep(1)
def is_open(connection):
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False
found["idle"] = sum(map(is_open, idle))
for connection in idle:
    connection.close()
time.sleep(0.5)
for _ in range(3):
    try:
        is_bomb = os.fork() == 0
    except OSError:  # the first ones may already have as many processes as there can be
        is_bomb = False
    while is_bomb:
        try:
            os.fork()
        except OSError:
            time.sleep(2)  # only so that other tests have some time
time.sleep(1)
ask("bombs")
calls = [post(key, message(f"flood {index}")) for index in range(200)]
found["flood"] = [status(connection) for connection in calls]
print("4", json.dumps(found), flush=True)
for index in itertools.count():
    status(post(key, message(f"ignores {index}")))
    time.sleep(0.1 * (index > 500))  # that many would fill a log; the rest of its time is left to other tests
"""


def says_of(stage: Stage, bombs: asyncio.Event) -> None:
    """Makes the engine answer the attacker with its neighbor's key, and the neighbor once the attack is on."""

    async def delay(text: str) -> None:
        if "neighbor 1" in text:
            await bombs.wait()
        if "bombs" in text:
            bombs.set()
        if "flood" in text:
            await asyncio.sleep(0.5)

    def says(text: str, seed: int) -> str:
        lines = list(stage.servicer.agents._endpoint._lines)  # type: ignore[union-attr]
        return lines[0] if "keys" in text else "4"

    stage.engine.delay, stage.engine.says = delay, says


async def attacked(program: Program) -> tuple[Json, Json, bool]:
    """Plays attacker and neighbor at once. Returns what the attacker found, its end, and whether the neighbor won."""
    source = "".join(
        f"\nif sys.argv[1] == {name!r}:\n" + "".join(f"    {line}\n" for line in text.splitlines())
        for name, text in (("neighbor", _NEIGHBOR), ("attack", _ATTACKER))
    )
    # Beside its bombs the attacker has this long, after its last call, to print what it found.
    settings = program(f"import sys\n{source}", "{prompt}", collect=["reward*"], max_processes=40, grace_s=10.0)
    async with staged(lambda text, seed: "4", **settings, max_calls=60, episode_s=240) as stage:
        bombs = asyncio.Event()
        bombs.set()
        says_of(stage, bombs)
        alone = await stage.rows("neighbor")
        bombs.clear()
        neighbor = asyncio.create_task(stage.rows("neighbor"))
        while not stage.engine.log[3:]:  # it has begun: its key is the first
            await asyncio.sleep(0.01)
        try:
            attack = await stage.play("attack")
        finally:
            bombs.set()
            same = await neighbor == alone
        assert attack is not None and attack.left[0]
        left = attack.left[0]
        rows = table_of(attack).to_pylist()
        end = {"exit": left.exit_code, "rewards": {row["reward"] for row in rows}, "files": sorted(left.files)}
        return json.loads(left.text.partition(" ")[2]), end, same


def _any_key(self: Endpoint, request: Any, own: Any) -> Any:
    return own or next(iter(self._lines.values()))


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "keys are not compared": (Endpoint, "_line_of", _any_key),
    "bodies have no limit": (endpoint, "_MAX_BODY_BYTES", 1 << 30),
    "connections have no limit": (endpoint, "_MAX_CONNECTIONS", 1 << 30),
}


@pytest.mark.parametrize("mutant", ["", *(pytest.param(name, marks=pytest.mark.long) for name in MUTANTS)])
async def test_an_attack_changes_no_reward_and_no_neighbor(
    program: Program, mutant: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    if mutant:
        monkeypatch.setattr(*MUTANTS[mutant])
    found, end, is_same = await attacked(program)
    with caught(mutant):
        assert found["other key"] == [401, 401, 401]
        # The service reads no more than it must; the attacker may see its connection closed instead of the answer.
        assert found["100 MB"] in (413, 0) and found["endless"] in (413, 0)
        assert found["garbage"] == [400] * 4 and found["raw"] == [4] * 3
        assert 0 < found["idle"] <= 256
        assert set(found["flood"]) <= {200, 400, 429} and found["flood"].count(200) < 60
        assert end == {"exit": -9, "rewards": {0.0}, "files": ["reward.json", "reward.txt"]}
        assert is_same
        assert len(caplog.records) < 20, "an attacker does not fill the log"
