"""Defines the options for service addresses and credentials, which every command that calls services shares."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Required, TypedDict

import typer

from services.common.errors import InvalidInput

if TYPE_CHECKING:
    from services.coordinator.fleet.launch import Addresses

_OwnTrainer = Annotated[str, typer.Option(help="HOST:PORT of the trainer dedicated to this model.")]
_Tls = Annotated[
    Path | None,
    typer.Option(
        help="Directory with ca.pem, cert.pem and key.pem, made by `lockstep certs`: all connections use mTLS. Without "
        "it they are plaintext, on this host only."
    ),
]
_OPTIONS: dict[str, tuple[object, object]] = {
    "rollout": (
        Annotated[list[str] | None, typer.Option(help="HOST:PORT of a running rollout replica; repeat for more.")],
        None,
    ),
    "reward": (
        Annotated[list[str] | None, typer.Option(help="HOST:PORT of a running reward service; repeat for more.")],
        None,
    ),
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


class Given(TypedDict, total=False):
    """The values of the options that a command takes."""

    rollout: list[str] | None
    reward: list[str] | None
    trainer: str
    reference: str
    critic: str
    tls: Required[Path | None]
    insecure: Required[bool]


def takes_addresses(*services: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds an address option for each of `services`, --tls and --insecure, to a command that ends with `**given`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "given"]
        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=_OPTIONS[name][0], default=_OPTIONS[name][1]
            )
            for name in (*services, "tls", "insecure")
        ]
        command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return command

    return decorate


def addresses(given: Given, *, is_operator: bool = False) -> "Addresses":
    """Returns the addresses of services and the credentials of the options.

    The certificate must be a coordinator's; if `is_operator`, an operator's is accepted too.

    Raises:
        InvalidInput: An option is invalid, contradicts another one, or would send plaintext to another host.
    """
    from services.common.rpc.address import require_secure
    from services.common.rpc.tls import Credentials, Role, Transport
    from services.coordinator.fleet.launch import Addresses

    tls, insecure = given["tls"], given["insecure"]
    rollout, reward = tuple(given.get("rollout") or ()), tuple(given.get("reward") or ())
    others = {name: str(address) for name, address in given.items() if name in ("trainer", "reference", "critic")}
    if tls and insecure:
        raise InvalidInput("--tls and --insecure exclude each other", field="--insecure")
    credentials = Credentials(tls) if tls else None
    if credentials:
        credentials.require_role(Role.COORDINATOR, *([Role.OPERATOR] if is_operator else []))
    transport = Transport(credentials, insecure)
    services = replace(Addresses(rollout, reward, transport=transport), **others)
    for name, address in services.named:
        require_secure(address, transport, field=f"--{name}")
    return services
