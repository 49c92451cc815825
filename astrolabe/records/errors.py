"""Errors that a user can mend.

An error that the user caused (a file, a row, a flag, a server that is down) is an `AstrolabeError`: one line
that says what is wrong, and one that says how to mend it. The command prints both and exits with its code;
nothing of it is a traceback. Anything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_PARTIAL = 0, 1, 2, 3


class AstrolabeError(Exception):
    """A failure with a mend. `exit_code` follows FORMATS: 1 failed, 2 usage, 3 partial."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message} ({self.mend})" if self.mend else self.message


class UsageError(AstrolabeError):
    """A wrong flag, file, row or configuration key: nothing was started."""

    exit_code = EXIT_USAGE


class ServerError(AstrolabeError):
    """A model server that cannot be reached, or that answers what no retry mends."""


class Interrupted(AstrolabeError):
    """Stopped by a signal, with what was done kept."""

    exit_code = EXIT_PARTIAL


class RunError(AstrolabeError):
    """A run folder that cannot be used or continued."""
