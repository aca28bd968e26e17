"""Who may join a run: who has its key; the command by which they do.

The key is on no command line, and in no environment that nblaunch makes. It is in a file of mode 0600, or in
a variable that the user has set. Both key pairs of the encrypted channel are derived from it, so each side
knows that the other one has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch._inherited import JOIN_KEY

if TYPE_CHECKING:
    from nblaunch.host.settings import AgentSettings, RendezvousConfig

KEY_FILE = "NBLAUNCH_JOIN_KEY_FILE"
_LEAST_CHARACTERS, _LONGEST = 32, 4096


def read_key(environ: Mapping[str, str]) -> bytes | None:
    """Return the key that the environment has, or names a file of; None if neither is set.

    Raises `OptionError` for a file that cannot be read, or that others can, and for a key too short.
    """
    text, file = environ.get(JOIN_KEY), environ.get(KEY_FILE)
    if text:
        return _valid(text.strip(), JOIN_KEY)
    if not file:
        return None
    try:
        with Path(file).open(encoding="ascii", errors="replace") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(_LONGEST).strip()
    except OSError as error:
        msg = (
            f"{KEY_FILE} names {file!r}, which cannot be read: {error.strerror}. Copy the notebook's "
            "file there."
        )
        raise OptionError(msg, kind=FailureKind.NODE_REFUSED) from error
    if mode & 0o077:
        msg = f"{KEY_FILE} names {file!r}, which others may read (mode {mode:o}). Run chmod 600 on it."
        raise OptionError(msg, kind=FailureKind.NODE_REFUSED)
    return _valid(text, file)


def key_from_stdin(stdin: BinaryIO) -> bytes:
    """Return the key in the first line of this input; read nothing after it.

    Raises `OptionError` if the key is too short.
    """
    return _valid(stdin.readline(_LONGEST).decode("ascii", "replace").strip(), "the standard input")


def read_or_make_key(environ: Mapping[str, str], root: Callable[[], Path]) -> tuple[bytes, str]:
    """Return the notebook's key, and the file that was made for it ("" if the user has it already)."""
    file = environ.get(KEY_FILE, "")
    made = ""
    if not (environ.get(JOIN_KEY) or (file and Path(file).exists())):
        made = str(Path(file) if file else root() / "join-key")
        with contextlib.suppress(FileExistsError):
            fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as opened:
                opened.write(secrets.token_hex(32) + "\n")
        environ = {KEY_FILE: made}
    key = read_key(environ)
    assert key is not None  # noqa: S101 - one of them is set
    return key, made


def _valid(text: str, source: str) -> bytes:
    if len(text) < _LEAST_CHARACTERS:
        msg = (
            f"{source} holds a key of {len(text)} characters, and {_LEAST_CHARACTERS} are the least. Take "
            "the notebook's, or make one: python -c 'import secrets; print(secrets.token_hex(32))'."
        )
        raise OptionError(msg, kind=FailureKind.NODE_REFUSED)
    return text.encode()


def curve_secret(key: bytes, side: str) -> bytes:
    """Return the 32 bytes that are the CURVE secret key of one side: `notebook` or `node`."""
    return hashlib.blake2b(key, digest_size=32, person=f"nblaunch-{side[:4]}".encode()).digest()


def join_command(settings: AgentSettings, rdzv: RendezvousConfig, file: str) -> str:
    backend = "" if rdzv.backend == "c10d" else f" --rdzv-backend {rdzv.backend}"
    number = " --node-rank 1" if rdzv.backend == "static" else ""
    return (
        f"To join from another terminal, or from a machine to which you copy the key file:\n"
        f"{KEY_FILE}={file} python -m nblaunch join --rdzv-endpoint {rdzv.host}:{rdzv.port} "
        f"--rdzv-id {settings.run_id}{backend}{number} -n {settings.nproc}"
    )
