"""Every error that kvlab shows a person: one sentence that says what and on what, and a hint.

KvlabError              anything a user can act on; ``kvlab`` prints it without a traceback
├── UsageError          the command or its arguments are wrong                      (exit 2)
├── ProfileError        a profile or an override is wrong                           (exit 2)
├── EngineMissing       the engine environment or the model is not there            (exit 2)
├── RunFolderError      a run folder cannot be read, written or resumed             (exit 2)
├── PreflightFailed     what is about to run has an error that was found beforehand (exit 1)
├── HostBusy            a port is taken, the disk is full, another run is going on  (exit 1)
├── StackNotReady       a server did not start, or stopped                          (exit 1)
├── MeasurementError    a round could not be completed; what was measured is kept   (exit 1)
└── NotebookFailed      a notebook did not run to its end                           (exit 1)
"""

from __future__ import annotations


class KvlabError(Exception):
    """What went wrong, on what, and what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, log_tail: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log_tail = log_tail

    def __str__(self) -> str:
        lines = [self.message]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        if self.log_tail:
            lines += ["last log lines:", self.log_tail]
        return "\n".join(lines)


class UsageError(KvlabError):
    """The command or one of its arguments is wrong."""

    exit_code = 2


class ProfileError(KvlabError):
    """A profile, or an override of one, is wrong."""

    exit_code = 2


class EngineMissing(KvlabError):
    """The engine environment, or the model that it serves, is not there."""

    exit_code = 2


class RunFolderError(KvlabError):
    """A run folder cannot be read, written or resumed."""

    exit_code = 2


class PreflightFailed(KvlabError):
    """A setting of what is about to run, or the machine, would stop or spoil it."""


class HostBusy(KvlabError):
    """The machine cannot take the run now: a port, the disk, or another run stands in the way."""


class StackNotReady(KvlabError):
    """A server did not become ready, or stopped while it was needed."""


class MeasurementError(KvlabError):
    """A round could not be completed; every record written so far is kept."""


class NotebookFailed(KvlabError):
    """A notebook did not run to its end."""
