"""Defines where a run finds its rollout replicas, which may come and go: in a file, or under a DNS name."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from services.common.config.base import Strict


class FileDiscoveryConfig(Strict):
    """Reads the replicas from a file."""

    kind: Literal["file"] = "file"
    """Each line of a file is a replica, HOST:PORT; # begins a comment. The file is read whenever it is written or
    replaced, and before each publication."""
    path: Path
    """The file, on the coordinator's host."""


class DnsDiscoveryConfig(Strict):
    """Takes all addresses of a DNS name as the replicas."""

    kind: Literal["dns"] = "dns"
    """The replicas are the addresses of a DNS name, such as that of a headless service of Kubernetes. The name is
    resolved before each publication."""
    name: str = Field(min_length=1)
    """The name. With mTLS, the replicas' certificates must be valid for it."""
    port: int = Field(default=50051, ge=1, le=65535)
    """Port of every replica."""


DiscoveryConfig = Annotated[FileDiscoveryConfig | DnsDiscoveryConfig, Field(discriminator="kind")]
