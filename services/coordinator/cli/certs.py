"""The certificates for mTLS: creates an authority, and issues and renews the credentials of each process."""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.errors import InvalidInput
from services.common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Identity, Role, is_address, read_identity

CA_KEY_FILE = "ca-key.pem"
CA_VALIDITY = datetime.timedelta(days=3650)
LEAF_VALIDITY = datetime.timedelta(days=90)
# A certificate's validity begins slightly before its creation, because the clocks of hosts differ.
_CLOCK_SKEW = datetime.timedelta(minutes=5)
_DNS_NAME = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I)


def init(directory: Path, validity: datetime.timedelta = CA_VALIDITY) -> None:
    """Creates an authority: ca.pem, which every host needs, and ca-key.pem, which must stay on this host.

    Raises:
        InvalidInput: The directory already has an authority.
    """
    _require_absent(directory, CA_FILE, CA_KEY_FILE)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Lockstep CA")])
    builder = _builder(name, name, key, validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(is_ca=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write_key(directory / CA_KEY_FILE, key)
    _write(directory / CA_FILE, certificate.public_bytes(serialization.Encoding.PEM))


def issue(
    ca: Path, role: Role, hosts: Sequence[str], out: Path, *, validity: datetime.timedelta = LEAF_VALIDITY
) -> Identity:
    """Creates the credentials of one process in `out`.

    A coordinator's certificate is also valid for 127.0.0.1, where services started by `lockstep run --tls` listen.
    `ca` is the directory of the authority, which limits the `validity`. `hosts` are the DNS names and IP addresses that
    clients use to reach the process; none for an operator, who only calls.

    Raises:
        InvalidInput: An argument is wrong; the message names the option and says what to change.
    """
    names = list(dict.fromkeys([*hosts, *["127.0.0.1"] * (role is Role.COORDINATOR)]))
    if not names and role is not Role.OPERATOR:
        raise InvalidInput(
            f"--host: give the names or addresses that clients use to reach the {role} service", field="host"
        )
    _require_absent(out, CA_FILE, CERTIFICATE_FILE, KEY_FILE)
    key, certificate = _sign(ca, role, [_general_name(host) for host in names], validity)
    _write_key(out / KEY_FILE, key)
    _write(out / CERTIFICATE_FILE, certificate)
    _write(out / CA_FILE, (ca / CA_FILE).read_bytes())
    return read_identity(out)


def renew(ca: Path, directory: Path, *, validity: datetime.timedelta = LEAF_VALIDITY) -> Identity:
    """Replaces the key and certificate in `directory` by new ones with the same role and names.

    Raises:
        InvalidInput: `directory` was not made by `issue`, or does not trust this authority.
    """
    old = read_identity(directory)
    trusted = x509.load_pem_x509_certificates(old.ca)
    if _read_authority(ca)[0] not in trusted:
        raise InvalidInput(
            f"{directory / CA_FILE} does not belong to the authority in {ca}; give another with --ca", field="ca"
        )
    if len(old.roles) != 1:
        raise InvalidInput(f"{directory} has {len(old.roles)} roles: renew it where it was issued", field="directory")
    (role,) = old.roles
    key, certificate = _sign(ca, role, [_general_name(host) for host in old.hosts], validity)
    # Between the two renames key and certificate do not match. Readers keep their old ones then and try again.
    new = {name: directory / f"{name}.new" for name in (KEY_FILE, CERTIFICATE_FILE)}
    for path in new.values():
        path.unlink(missing_ok=True)
    _write_key(new[KEY_FILE], key)
    _write(new[CERTIFICATE_FILE], certificate)
    for name, path in new.items():
        path.replace(directory / name)
    return read_identity(directory)


def _sign(
    ca: Path, role: Role, names: Sequence[x509.GeneralName], validity: datetime.timedelta
) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    authority, ca_key = _read_authority(ca)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"lockstep {role}")])
    left = authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    if left <= datetime.timedelta(0):
        raise InvalidInput(f"the authority in {ca} has expired; create another with `lockstep certs init`", field="ca")
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    if role is Role.OPERATOR:  # it only calls
        uses = uses[1:]
    issuer_key = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(subject, authority.subject, key, min(validity, left))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([*names, x509.UniformResourceIdentifier(role.uri)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
    )
    return key, builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, validity: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + validity)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    # The class demands all nine. TLS 1.3 with elliptic curves encrypts nothing with a certificate's key.
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused += ("encipher_only", "decipher_only")
    used = {"digital_signature": not is_ca, "key_cert_sign": is_ca, "crl_sign": is_ca}
    return x509.KeyUsage(**used, **dict.fromkeys(unused, False))


def _general_name(host: str) -> x509.GeneralName:
    if is_address(host):
        return x509.IPAddress(ipaddress.ip_address(host))
    if len(host) > 253 or not _DNS_NAME.fullmatch(host):
        raise InvalidInput(
            f"--host: {host!r} is neither a DNS name nor an IP address; omit the scheme and the port", field="host"
        )
    return x509.DNSName(host)


def _read_authority(ca: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((ca / CA_FILE).read_bytes())
        key = serialization.load_pem_private_key((ca / CA_KEY_FILE).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"--ca {ca}: cannot read {CA_FILE} and {CA_KEY_FILE} ({error}); create them with `lockstep certs init`",
            field="ca",
        ) from error
    is_usable = isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey)
    if not is_usable or certificate.public_key() != key.public_key():
        raise InvalidInput(f"--ca {ca}: {CA_KEY_FILE} is not the key of {CA_FILE}", field="ca")
    return certificate, key


def _require_absent(directory: Path, *names: str) -> None:
    for name in names:
        if (directory / name).exists():
            raise InvalidInput(
                f"{directory / name} already exists; choose another directory, or use `lockstep certs renew`",
                field="out",
            )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(path, pem, mode=0o600)


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}", field="out") from error
