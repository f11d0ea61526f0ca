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

_OWN_TRAINER = (str, "", "HOST:PORT of the trainer dedicated to this model.")
_TLS = (
    "Directory with ca.pem, cert.pem and key.pem, made by `lockstep certs`: all connections use mTLS. Without it they "
    "are plaintext, on this host only."
)
_OPTIONS: dict[str, tuple[object, object, str]] = {
    "rollout": (list[str] | None, None, "HOST:PORT of a running rollout replica; repeat for more."),
    "reward": (list[str] | None, None, "HOST:PORT of a running reward service; repeat for more."),
    "trainer": (str, "", "HOST:PORT of a running trainer."),
    "reference": _OWN_TRAINER,
    "critic": _OWN_TRAINER,
    "teacher": _OWN_TRAINER,
    "tls": (Path | None, None, _TLS),
    "insecure": (bool, False, "Allow plaintext connections to other hosts."),
}
"""Maps the name of an option to its type, default and help."""
_TRAINERS = ("trainer", "reference", "critic", "teacher")

CoordinatorAddress = Annotated[
    str, typer.Option("--coordinator", envvar="LOCKSTEP_COORDINATOR", help="HOST:PORT of a running coordinator daemon.")
]


class ServiceOptions(TypedDict, total=False):
    rollout: list[str] | None
    reward: list[str] | None
    trainer: str
    reference: str
    critic: str
    teacher: str
    tls: Required[Path | None]
    insecure: Required[bool]


def takes_addresses(*services: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds an address option for each of `services`, --tls and --insecure, to a command that ends with `**options`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "options"]
        options = [_parameter(name, *_OPTIONS[name]) for name in (*services, "tls", "insecure")]
        # typer reads the options of a command from its signature.
        command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str, kind: object, default: object, text: str) -> inspect.Parameter:
    # The name alone: a flag would otherwise get --no-insecure too.
    annotation = Annotated[kind, typer.Option(f"--{name}", help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def addresses_of(options: ServiceOptions, *, is_operator: bool = False) -> "Addresses":
    """Returns the addresses of services and the credentials of the options.

    The certificate must be a coordinator's; if `is_operator`, an operator's is accepted too.

    Raises:
        InvalidInput: An option is invalid, contradicts another one, or would send plaintext to another host.
    """
    from services.common.rpc.address import require_secure
    from services.common.rpc.tls import Credentials, Role, Transport
    from services.coordinator.fleet.launch import Addresses

    tls, insecure = options["tls"], options["insecure"]
    rollout, reward = tuple(options.get("rollout") or ()), tuple(options.get("reward") or ())
    others = {name: str(address) for name, address in options.items() if name in _TRAINERS}
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
