"""Images: found on the engine's machine by tag or digest, never pulled unless that is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from docker.errors import APIError, ImageNotFound

from kvlab.errors import EngineMissing
from kvlab.stack import daemon
from kvlab.stack.daemon import Daemon

OWN_IMAGE = "kvlab-engine-cpu"
"""What ``make image`` builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image as it is on the engine's machine."""

    reference: str
    """As the profile names it."""
    id: str
    """``sha256:…`` of its configuration: what containers are made from."""
    digest: str | None
    """``name@sha256:…`` in its registry; None for one that was built or loaded here."""
    created: str | None
    architecture: str | None

    def as_dict(self) -> dict[str, Any]:
        """The image as a manifest keeps it."""
        return asdict(self)


def resolve(engine: Daemon, reference: str) -> Image:
    """The image of that name on the engine's machine; EngineMissing when it is not there."""
    try:
        found = engine.api.inspect_image(reference)
    except ImageNotFound as error:
        raise EngineMissing(
            f"the image {reference} is not on {_where(engine)}", hint=_remedy(reference)
        ) from error
    return Image(
        reference=reference,
        id=found["Id"],
        digest=_digest(found.get("RepoDigests") or [], reference),
        created=found.get("Created"),
        architecture=found.get("Architecture"),
    )


def pull(engine: Daemon, reference: str) -> Image:
    """The image, fetched from its registry; EngineMissing, with the engine's reason, when not."""
    name, digest, tag = _parts(reference)
    try:
        # The engine answers 200 and reports what went wrong in the stream.
        for line in engine.api.pull(name, tag=digest or tag, stream=True, decode=True):
            if "error" in line:
                raise _not_pulled(engine, reference, " ".join(str(line["error"]).split()))
    except APIError as error:
        raise _not_pulled(engine, reference, daemon.said(error)) from error
    return resolve(engine, reference)


def _parts(reference: str) -> tuple[str, str | None, str | None]:
    """Name, digest and tag; a registry's port is no tag."""
    name, at, digest = reference.partition("@")
    head, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{head}{slash}{last}", digest if at else None, tag or None


def _digest(known: list[str], reference: str) -> str | None:
    """The digest in the registry that the reference names, else in any that is known."""
    name = _parts(reference)[0]
    own = [one for one in known if one.partition("@")[0] == name]
    return next(iter(own or known), None)


def _where(engine: Daemon) -> str:
    return f"{engine.machine}, where the engine runs" if engine.machine else "this machine"


def _remedy(reference: str) -> str:
    if _parts(reference)[0] == OWN_IMAGE:
        return "build it with `make image`"
    return f"kvlab pulls nothing by itself: `docker pull {reference}`, or give --pull"


def _not_pulled(engine: Daemon, reference: str, reason: str) -> EngineMissing:
    return EngineMissing(
        f"the image {reference} cannot be pulled to {_where(engine)}: {reason}",
        hint="is its registry reachable from there, and is the name right? without a network, "
        "bring it with `docker save` and `docker load`",
    )
