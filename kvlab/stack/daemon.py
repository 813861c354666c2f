"""The container engine: where it is, found as docker's own client finds it, and what it says.

``DOCKER_HOST`` first, then ``DOCKER_CONTEXT``, then the current context of docker's configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import docker
from docker.context import ContextAPI
from docker.errors import APIError, DockerException

from kvlab.errors import EngineMissing

KEPT_VARIABLES = (
    *("PATH", "HOME", "LD_LIBRARY_PATH", "SSH_AUTH_SOCK"),
    *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"),
    *("DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY"),
)
"""What finding the engine depends on."""
ANSWER_S = 60
"""An engine that starts a container on a busy machine may take so long to answer."""
NEAR = ("", "localhost", "127.0.0.1", "::1")
UNREACHABLE = (DockerException, OSError)
"""What docker-py raises when nobody answers; the errors of requests are OSErrors."""


@dataclass(frozen=True)
class Daemon:
    """A container engine that answers."""

    client: docker.DockerClient
    address: str
    """``unix:///var/run/docker.sock``, ``tcp://host:port``, ``ssh://user@host``."""

    @property
    def api(self) -> Any:
        """The engine's API, one method per call."""
        return self.client.api

    @property
    def machine(self) -> str | None:
        """The machine that the engine runs on; None: this one."""
        parts = urlsplit(self.address.removeprefix("http+"))
        near = parts.scheme in ("unix", "npipe") or (parts.hostname or "") in NEAR
        return None if near else parts.hostname

    @cached_property
    def info(self) -> dict[str, Any]:
        """What the engine says of itself."""
        found: dict[str, Any] = self.api.info()
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """What a run keeps of the engine."""
        return {
            "address": self.address,
            "machine": self.machine,
            "version": self.info.get("ServerVersion"),
            "storage": self.info.get("Driver"),
            "cgroups": self.info.get("CgroupVersion"),
            "runtimes": sorted(self.info.get("Runtimes") or {}),
        }


def connect() -> Daemon:
    """The engine that docker's own client would use; EngineMissing when none answers."""
    client, address = None, "the set address"
    try:
        address, tls = _endpoint()
        _knock(address)
        options: dict[str, Any] = {"timeout": ANSWER_S, "use_ssh_client": True}
        if "DOCKER_HOST" in os.environ:
            client = docker.from_env(**options)
        else:
            client = docker.DockerClient(base_url=address, tls=tls, **options)
        client.ping()
    except UNREACHABLE as error:
        if client is not None:
            client.close()
        raise EngineMissing(
            f"no container engine answers at {address}: {_plain(error)}",
            hint="start Docker, or set DOCKER_HOST or a docker context; the profile `embedded` "
            "needs none",
        ) from error
    return Daemon(client, address)


def _knock(address: str) -> None:
    """Raise OSError when nobody listens on a local socket; docker-py would leave its own open."""
    scheme, _, path = address.removeprefix("http+").partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.connect(path)


def _endpoint() -> tuple[str, Any]:
    """The engine's address, and how to prove who we are there."""
    if address := os.environ.get("DOCKER_HOST"):
        return address, None
    name = os.environ.get("DOCKER_CONTEXT")
    context = ContextAPI.get_context(name)
    if context is None:
        raise EngineMissing(
            f"there is no docker context {name or 'of the name in the configuration'}",
            hint="see `docker context ls`",
        )
    tls = context.TLSConfig
    return str(context.Host), tls or False


def variables() -> dict[str, str]:
    """The environment in which another process finds the same engine."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def said(error: APIError) -> str:
    """The engine's own words, on one line and without a full stop."""
    text = error.explanation or str(error)
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["message"]
    return " ".join(str(text).split()).rstrip(".")


def _plain(error: BaseException) -> str:
    """The innermost reason, without the names of the libraries around it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
