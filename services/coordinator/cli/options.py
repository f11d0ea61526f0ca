"""Options for service addresses and credentials, shared by every command that calls services."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.common.errors import InvalidInput

if TYPE_CHECKING:
    from services.coordinator.services.launch import Addresses

_OwnTrainer = Annotated[str, typer.Option(help="HOST:PORT of the trainer dedicated to this model.")]
_Tls = Annotated[
    Path | None,
    typer.Option(
        help="Directory with the coordinator's ca.pem, cert.pem and key.pem, made by `lockstep certs`. Every "
        "connection then uses mTLS, also to services started here. Without it, connections are plaintext and stay on "
        "this host."
    ),
]
_OPTIONS: dict[str, tuple[object, object]] = {
    "rollout": (
        Annotated[list[str] | None, typer.Option(help="HOST:PORT of a running rollout replica; repeat for more.")],
        None,
    ),
    "reward": (Annotated[str, typer.Option(help="HOST:PORT of a running reward service.")], ""),
    "trainer": (Annotated[str, typer.Option(help="HOST:PORT of a running trainer.")], ""),
    "reference": (_OwnTrainer, ""),
    "critic": (_OwnTrainer, ""),
    "tls": (_Tls, None),
    "insecure": (
        Annotated[bool, typer.Option("--insecure", help="Allow plaintext connections to other hosts.")],
        False,
    ),
}
"""Maps the name of an option to its type and default."""


def takes_addresses(*services: str, is_operator: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds an address option for each of `services`, --tls and --insecure; the command gets them as argument `given`.

    The certificate must be a coordinator's; if `is_operator`, an operator's is accepted too.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = (*services, "tls", "insecure")

        def with_options(**arguments: Any) -> None:
            chosen = {name: arguments.pop(name) for name in names}
            command(**arguments, given=_addresses(**chosen, is_operator=is_operator))

        own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "given"]
        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=_OPTIONS[name][0], default=_OPTIONS[name][1]
            )
            for name in names
        ]
        with_options.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
        return with_options

    return decorate


def _addresses(
    tls: Path | None, insecure: bool, *, is_operator: bool, rollout: list[str] | None = None, **others: str
) -> "Addresses":
    from services.common.rpc.address import require_secure
    from services.common.rpc.identities import Role
    from services.common.rpc.tls import Credentials, Transport
    from services.coordinator.services.launch import Addresses

    if tls and insecure:
        raise InvalidInput("--tls and --insecure exclude each other", field="--insecure")
    credentials = Credentials(tls) if tls else None
    if credentials:
        credentials.require_role(Role.COORDINATOR, *([Role.OPERATOR] if is_operator else []))
    transport = Transport(credentials, insecure)
    for name, address in [*others.items(), *(("rollout", address) for address in rollout or ())]:
        if address:
            require_secure(address, transport, field=f"--{name}")
    return replace(Addresses(tuple(rollout or ()), transport=transport), **others)
