"""The kinds of failures, and the address of the page that explains each.

An error of ours has a `kind`, and shows its address as the last line. The page is the section of that name
in `notebooks/docs/failures.md`; the site has a page at each address that leads there. An address is written
into saved notebooks and logs: a kind is added, and never renamed or removed.
"""

from __future__ import annotations

from enum import StrEnum

DOCUMENTATION = "https://nblaunch.github.io/"
"""Where the documentation is published; the only place that has it besides `pyproject.toml`."""
DIRECTORY = "e"
"""Below it: the site's directory with a page for each kind."""


class FailureKind(StrEnum):
    """What a user would call different failures."""

    # Before anything starts.
    UNKNOWN_OPTION = "unknown-option"
    WRONG_OPTION = "wrong-option"
    WRONG_ARGUMENTS = "wrong-arguments"
    CANNOT_BE_SENT = "cannot-be-sent"
    TOO_FEW_GPUS = "too-few-gpus"
    BACKEND = "backend"
    SCRIPT_NOT_FOUND = "script-not-found"
    NOT_INSTALLED = "not-installed"
    TORCH_VERSION = "torch-version"
    START_METHOD = "start-method"
    NOT_WRITABLE = "not-writable"
    INSIDE_A_RANK = "inside-a-rank"
    NOT_ON_A_RANK = "not-on-a-rank"

    # While it starts.
    NOT_STARTED = "not-started"
    PROCESS_LIMIT = "process-limit"
    OPEN_FILES = "open-files"
    WORKING_DIRECTORY = "working-directory"
    NO_ANSWER = "no-answer"
    PROCESS_GROUP = "process-group"
    RUNTIME_ENDED = "runtime-ended"
    OTHER_VERSION = "other-version"

    # While it runs.
    KILLED = "killed"
    CRASHED = "crashed"
    EXITED = "exited"
    OUT_OF_MEMORY = "out-of-memory"
    SHARED_MEMORY_FULL = "shared-memory-full"
    HANG = "hang"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    VALUE_NOT_SENT = "value-not-sent"
    NAN = "nan"
    DESYNC = "desync"
    CONNECTION_LOST = "connection-lost"

    # In a session.
    NO_SESSION = "no-session"
    SESSION_NAME = "session-name"
    SESSION_BUSY = "session-busy"
    SESSION_TAKEN = "session-taken"
    SESSION_ENDED = "session-ended"
    NO_SUCH_VARIABLE = "no-such-variable"

    # Over machines.
    ENGINE = "engine"
    PACKAGES = "packages"
    PORT = "port"
    RENDEZVOUS = "rendezvous"
    NODE_REFUSED = "node-refused"
    NODE_LOST = "node-lost"
    PREEMPTED = "preempted"

    @property
    def address(self) -> str:
        """The address of the page that explains it.

        >>> FailureKind.CANNOT_BE_SENT.address
        'https://nblaunch.github.io/e/cannot-be-sent'
        """
        return f"{DOCUMENTATION}{DIRECTORY}/{self.value}"

    @property
    def line(self) -> str:
        """The last line of an error of this kind."""
        return f"More: {self.address}"
