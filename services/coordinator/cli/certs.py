"""Implements `lockstep certs`, which creates and renews the certificates for mTLS."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.common.errors import InvalidInput
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from services.common.rpc.security.tls import Identity

_AUTHORITY = Path("certs/ca")
_Ca = Annotated[Path, typer.Option(help="Directory of the certificate authority.")]
_Days = Annotated[float, typer.Option(min=1, help="Days until the certificate expires; renew it before then.")]


def app() -> typer.Typer:
    """Returns the subcommands of `lockstep certs`. They raise LockstepError."""
    certs = typer.Typer(help="Create the certificates for mTLS (see docs/security.md).", no_args_is_help=True)
    certs.command("init")(_init)
    certs.command("issue")(_issue)
    certs.command("renew")(_renew)
    return certs


def _init(directory: Annotated[Path, typer.Argument(help="Directory to create.")] = _AUTHORITY) -> None:
    """Create a certificate authority that is valid for ten years. Keep its private key on this host."""
    from services.coordinator.certs.authority import CA_KEY_FILE, init

    init(directory)
    _print(f"created an authority in {directory}; keep {directory / CA_KEY_FILE} secret and on this host")


def _issue(
    role: Annotated[str, typer.Argument(help="coordinator, rollout, trainer, reward or operator.")],
    out: Annotated[Path, typer.Option(help="Directory to create; pass it to --tls.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address that clients use to reach the process; repeat for more."),
    ] = None,
    ca: _Ca = _AUTHORITY,
    days: _Days = 90,
) -> None:
    """Create the credentials of one process: ca.pem, cert.pem and key.pem."""
    from services.common.rpc.security.identities import Role
    from services.coordinator.certs.authority import issue

    if role not in list(Role):
        raise InvalidInput(f"unknown role {role!r}; the roles are {', '.join(Role)}", field="role")
    _show(issue(ca, Role(role), host or [], out, validity=datetime.timedelta(days=days)), out)


def _renew(
    directory: Annotated[Path, typer.Argument(help="Directory that `issue` created.")],
    ca: _Ca = _AUTHORITY,
    days: _Days = 90,
) -> None:
    """Replace a certificate and its key. Processes that use them keep running and switch to the new ones."""
    from services.coordinator.certs.authority import renew

    _show(renew(ca, directory, validity=datetime.timedelta(days=days)), directory)


def _show(identity: "Identity", directory: Path) -> None:
    hosts = ", ".join(sorted(identity.hosts)) or "no host"
    _print(f"{directory}: {', '.join(identity.roles)} at {hosts}, until {identity.expires:%Y-%m-%d %H:%M} UTC")


def _print(line: str) -> None:
    literal_console(soft_wrap=True, highlight=False).print(line)
