"""Secrets that an attached deployment asks for: from the environment into headers, nowhere else."""

from __future__ import annotations

import os

from kvlab.errors import UsageError
from kvlab.profile import Profile


def headers(profile: Profile) -> dict[str, str]:
    """The headers of every request to the profile's servers; none for servers that kvlab starts.

    A profile names only environment variables, so that no run folder holds a secret. Raises
    UsageError, naming the variable, when one is not set.
    """
    attach = profile.attach
    if profile.fresh or attach is None:
        return {}
    found = {name: _value(variable) for name, variable in attach.headers_env.items()}
    if attach.api_key_env:
        found["Authorization"] = f"Bearer {_value(attach.api_key_env)}"
    return found


def _value(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UsageError(
            f"the environment variable {variable}, which the profile's attach section names, is "
            "not set",
            hint=f"export {variable}=… in the shell that runs kvlab",
        )
    return value
