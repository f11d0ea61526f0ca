"""Tests `lockstep certs`: the files that it creates and its error messages."""

import datetime
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.common.rpc.tls import Role, read_identity
from services.coordinator.cli.certs import init
from services.coordinator.cli.main import main

Command = Callable[..., str]


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs `lockstep certs` in an empty directory and returns its output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["lockstep", "certs", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capfd.readouterr()
        assert (caught.value.code or 0) == code, said
        return said.err if code else said.out

    return run


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def days(certificate: x509.Certificate) -> float:
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return round(left / datetime.timedelta(days=1), 2)


def test_an_authority_and_what_it_issues(certs) -> None:
    assert "certs/ca/ca-key.pem secret and on this host" in certs("init")
    said = certs("issue", "trainer", "--host", "t.example", "--host", "10.0.0.7", "--host", "fd00::7", "--out", "t")
    assert said.startswith("t: trainer at t.example, 10.0.0.7, fd00::7, until ")
    ca, leaf = load(Path("certs/ca/ca.pem")), load(Path("t/cert.pem"))
    assert (days(ca), days(leaf)) == (3650, 90)
    leaf.verify_directly_issued_by(ca)
    for certificate in (ca, leaf):
        assert isinstance(certificate.public_key().curve, ec.SECP256R1)
    constraints = [c.extensions.get_extension_for_class(x509.BasicConstraints) for c in (ca, leaf)]
    assert [(c.critical, c.value.ca, c.value.path_length) for c in constraints] == [
        (True, True, 0),
        (True, False, None),
    ]
    identity = read_identity(Path("t"))
    assert identity.roles == {Role.TRAINER}
    assert identity.hosts == ("t.example", "10.0.0.7", "fd00::7")
    assert identity.ca == Path("certs/ca/ca.pem").read_bytes()
    assert str(identity.key) not in repr(identity)
    modes = {path: stat.S_IMODE(Path(path).stat().st_mode) for path in ("certs/ca/ca-key.pem", "t/key.pem")}
    assert set(modes.values()) == {0o600}


def test_who_serves_and_who_only_calls(certs) -> None:
    certs("init")
    for role in Role:
        certs("issue", role, "--out", role, *([] if role is Role.OPERATOR else ["--host", "h"]))
    for role in Role:
        uses = load(Path(role) / "cert.pem").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) is (role is not Role.OPERATOR)
        assert ExtendedKeyUsageOID.CLIENT_AUTH in uses
    # `lockstep run` calls the services that it starts at this address, with the coordinator's certificate.
    assert read_identity(Path("coordinator")).hosts == ("h", "127.0.0.1")
    assert read_identity(Path("operator")).hosts == ()


def test_nothing_is_overwritten(certs) -> None:
    certs("init", "ca")
    options = ("issue", "reward", "--host", "h", "--ca", "ca", "--out", "r")
    certs(*options)
    before = {path: path.read_bytes() for path in Path().rglob("*.pem")}
    assert "ca/ca.pem already exists" in certs("init", "ca", code=2)
    assert "lockstep certs renew" in certs(*options, code=2)
    Path("half").mkdir()
    (Path("half") / "key.pem").write_text("mine")
    assert "half/key.pem already exists" in certs(*options[:-1], "half", code=2)
    assert before == {path: path.read_bytes() for path in before}


def test_renewal_keeps_role_and_names_and_changes_key_and_date(certs) -> None:
    certs("init")
    certs("issue", "rollout", "--host", "r-*", "--out", "x", code=2)
    certs("issue", "rollout", "--host", "*.pool", "--host", "10.0.0.9", "--out", "r", "--days", "3")
    before = read_identity(Path("r"))
    assert "r: rollout at *.pool, 10.0.0.9, until" in certs("renew", "r")
    after = read_identity(Path("r"))
    assert (after.roles, after.hosts, after.ca) == (before.roles, before.hosts, before.ca)
    assert after.key != before.key
    assert days(load(Path("r/cert.pem"))) == 90
    assert stat.S_IMODE(Path("r/key.pem").stat().st_mode) == 0o600
    assert sorted(path.name for path in Path("r").iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    # Files of a renewal that was killed.
    Path("r/key.pem.new").write_text("half")
    certs("renew", "r")
    read_identity(Path("r"))
    certs("init", "other")
    assert "r/ca.pem does not belong to the authority in other" in certs("renew", "r", "--ca", "other", code=2)


def test_no_certificate_outlives_its_authority(certs) -> None:
    init(Path("ca"), datetime.timedelta(days=5))
    certs("issue", "reward", "--host", "h", "--out", "r", "--ca", "ca")
    assert load(Path("r/cert.pem")).not_valid_after_utc == load(Path("ca/ca.pem")).not_valid_after_utc
    init(Path("old"), datetime.timedelta(seconds=-1))
    assert "has expired" in certs("issue", "reward", "--host", "h", "--out", "o", "--ca", "old", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["issue", "boss", "--host", "h", "--out", "x"], ["unknown role 'boss'", "coordinator, rollout, trainer"]),
        (["issue", "reward", "--out", "x"], ["--host", "to reach the reward service"]),
        (["issue", "reward", "--host", "h:50051", "--out", "x"], ["'h:50051'", "omit the scheme and the port"]),
        (["issue", "reward", "--host", "https://h", "--out", "x"], ["'https://h'", "scheme"]),
        (["issue", "reward", "--host", "", "--out", "x"], ["''", "DNS name"]),
        (["issue", "reward", "--host", "h", "--out", "x", "--ca", "none"], ["--ca none", "lockstep certs init"]),
        (["issue", "reward", "--host", "h", "--out", "file/x"], ["file/x", "cannot write"]),
        (["renew", "none"], ["none/ca.pem", "No such file"]),
        (["renew", "torn"], ["key.pem is not the key of cert.pem"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(certs, arguments, words) -> None:
    certs("init")
    Path("file").write_text("")
    for name in ("torn", "whole"):
        certs("issue", "reward", "--host", "h", "--out", name)
    Path("torn/key.pem").write_bytes(Path("whole/key.pem").read_bytes())
    (line,) = certs(*arguments, code=2).splitlines()
    assert line.startswith("lockstep: error: ")
    assert all(word in line for word in words), line
    assert not Path("x").exists()
