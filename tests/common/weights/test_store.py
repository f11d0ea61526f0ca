"""Tests the gate before the weight group's store: which connections it accepts, and that it cannot be bypassed."""

import asyncio
import gc
import logging
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lockstep.types.v1.types_pb2 import WeightGroup as GroupMessage

from services.common.errors import Aborted, InvalidInput
from services.common.weights.group import WeightGroup
from services.common.weights.store import HELLO, NONCE_BYTES, ServedStore, StoreAddress, StoreClient
from tests.support import PATIENCE_S, raises

HOST = "127.0.0.1"


@pytest.fixture
def store() -> Iterator[ServedStore]:
    store = ServedStore(HOST)
    store.tcp_store.set("digest", b"secret of the run")
    yield store


def raw(store: ServedStore, timeout_s: float = 1.0) -> dist.TCPStore:
    """Connects torch's client without the secret, as anybody with torch can."""
    return dist.TCPStore(
        HOST, store.address.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def test_ending_the_connections_of_a_run_logs_nothing(store: ServedStore, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection((HOST, store.address.port)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(HELLO)
        assert len(connection.recv(NONCE_BYTES)) == NONCE_BYTES  # the gate waits for the proof
        store.renew()
        assert connection.recv(1) == b""
    for _ in range(3):  # lets the loop run the callbacks for the end of the connection
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), store._loop).result(PATIENCE_S)
    assert not caplog.records


def test_a_store_of_torch_tells_whoever_connects_everything() -> None:
    """Shows why there is a gate. If this fails, a secret prefix of the keys is enough."""
    bare = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore(secrets.token_hex(32), bare).set("key", b"value")
    stranger = dist.TCPStore(HOST, bare.port, is_master=False, wait_for_workers=False)
    (name,) = stranger.list_keys()
    assert name.endswith("/key")
    # And it listens everywhere: on an address of this host that it was not given.
    socket.create_connection(("127.0.0.2", bare.port), PATIENCE_S).close()


def test_who_knows_the_secret_has_a_store(store) -> None:
    first, second = (StoreClient(store.address, PATIENCE_S) for _ in range(2))
    first.set("a", b"x" * 1_000_000)
    assert second.get("a") == b"x" * 1_000_000
    assert second.check(["a", "digest"])
    with pytest.raises(dist.DistStoreError):
        second.wait(["never"], timedelta(seconds=0.1))
    assert store.tcp_store.get("a") == second.get("a")


@pytest.mark.parametrize("secret", [b"", b"x", bytes(32)])
def test_who_does_not_has_none(store, secret) -> None:
    with pytest.raises(ConnectionRefusedError, match="does not accept the secret"):
        StoreClient(StoreAddress(HOST, store.address.port, secret), PATIENCE_S)
    with pytest.raises(dist.DistError):
        raw(store)
    # The refusals of others do not keep a member out.
    assert StoreClient(store.address, PATIENCE_S).get("digest") == b"secret of the run"


def test_a_proof_cannot_be_used_again(store) -> None:
    with socket.create_connection((HOST, store.address.port), PATIENCE_S) as seen:
        seen.sendall(b"\xfe")
        nonce = seen.recv(32, socket.MSG_WAITALL)
    with socket.create_connection((HOST, store.address.port), PATIENCE_S) as again:
        again.sendall(b"\xfe")
        assert again.recv(32, socket.MSG_WAITALL) != nonce


def test_who_knows_it_does_not_open_it_for_others_of_its_host(store) -> None:
    member = StoreClient(store.address, PATIENCE_S)
    with pytest.raises(dist.DistError):
        raw(store)
    assert member.get("digest") == b"secret of the run"


STRANGER = """
import socket, sys
source, port = sys.argv[1], int(sys.argv[2])
own = port if source != "127.0.0.1" else 0  # a port that the member itself has on another address
print(socket.create_connection(("127.0.0.1", port), 120, (source, own)).recv(1))
"""


def test_the_way_of_a_member_is_closed_to_other_processes_of_its_host(store) -> None:
    member = StoreClient(store.address, PATIENCE_S)
    for source in ("127.0.0.1", "127.0.0.2"):
        command = [sys.executable, "-c", STRANGER, source, str(member.port)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "b''\n"
    # This process itself may connect as often as it likes, as torch's backends do, until the member has left.
    other = dist.TCPStore(HOST, member.port, is_master=False, wait_for_workers=False)
    assert other.get("digest") == b"secret of the run"
    member.leave()
    member.leave()
    assert other.get("digest") == member.get("digest")
    deadline = time.monotonic() + PATIENCE_S
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection((HOST, member.port), PATIENCE_S).close()


def test_a_secret_is_of_one_run(store, caplog) -> None:
    caplog.set_level(logging.INFO)
    before = store.address
    member = StoreClient(before, PATIENCE_S)
    assert member.get("digest") == b"secret of the run"
    now = store.renew()
    assert (now.host, now.port, now.secret != before.secret) == (before.host, before.port, True)
    # The old secret is of use neither on a new connection nor on the one that the member has.
    with pytest.raises(ConnectionRefusedError, match="does not accept the secret"):
        StoreClient(before, PATIENCE_S)
    with pytest.raises(dist.DistError):
        member.get("digest")
    assert StoreClient(now, PATIENCE_S).get("digest") == b"secret of the run"
    # A member of the run before is no stranger.
    (refused,) = [record for record in caplog.records if "refused" in record.message]
    assert (refused.levelname, "a run that was replaced or has ended" in refused.message) == ("INFO", True)


def test_only_the_given_address_listens(store) -> None:
    listening = {
        bytes.fromhex(host)[::-1]
        for host, port in re.findall(r": ([0-9A-F]+):([0-9A-F]{4}) 0+:0000 0A", _sockets())
        if int(port, 16) in (store.address.port, store.tcp_store.port)
    }
    assert listening == {socket.inet_aton(HOST)}


def _sockets() -> str:
    return "".join(Path(f"/proc/self/net/{kind}").read_text() for kind in ("tcp", "tcp6"))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "[::1]"])
def test_a_host_that_is_not_this_one_is_refused(host) -> None:
    with raises(InvalidInput, field="listen"):
        ServedStore(host)


def test_a_member_with_another_secret_is_told_at_once(store) -> None:
    group = GroupMessage(
        run_id="r", epoch=1, store_host=HOST, store_port=store.address.port, world_size=2, timeout_s=PATIENCE_S
    )
    with pytest.raises(Aborted, match="does not accept the secret"):  # and not that it waited for the others
        WeightGroup(group, rank=1, device=torch.device("cpu"))
    assert not store.tcp_store.check(["r/1/member/1"])


def test_a_member_that_the_store_fails_leaves_no_thread(store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise dist.DistNetworkError("failed to send")

    monkeypatch.setattr(dist.PrefixStore, "set", broken)
    group = GroupMessage(
        run_id="r",
        epoch=1,
        store_host=HOST,
        store_port=store.address.port,
        store_secret=store.address.secret,
        world_size=2,
        timeout_s=PATIENCE_S,
    )
    before = set(threading.enumerate())
    with pytest.raises(Aborted, match="cannot be reached: failed to send") as caught:
        WeightGroup(group, rank=1, device=torch.device("cpu"))
    del caught  # its traceback holds the client, and the proxy's thread ends only after the client's connection
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread


def test_the_secret_is_not_shown(store) -> None:
    group = GroupMessage(store_secret=store.address.secret)
    assert "secret" not in repr(store.address)
    assert store.address.secret != ServedStore(HOST).address.secret
    assert len(group.store_secret) == 32
