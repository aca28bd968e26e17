"""The key that lets other machines join a run: where it is kept, and what is made of it.

Never on a command line, and in no environment that nblaunch makes: in a file of mode 0600, or in a variable
that the user has set. The same key makes both pairs of keys of the encrypted channel, so either side knows
that the other one has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from nblaunch._errors import OptionError

KEY = "NBLAUNCH_JOIN_KEY"
KEY_FILE = "NBLAUNCH_JOIN_KEY_FILE"
_LEAST_CHARACTERS = 32


def read(environ: Mapping[str, str]) -> bytes | None:
    """Return the key that the environment has, or names a file of; None if neither is set.

    Raises `OptionError` for a file that cannot be read, or that others can, and for a key too short.
    """
    said, file = environ.get(KEY), environ.get(KEY_FILE)
    if said:
        return _checked(said.strip(), KEY)
    if not file:
        return None
    try:
        with Path(file).open(encoding="ascii", errors="replace") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(4096).strip()
    except OSError as error:
        msg = (
            f"{KEY_FILE} names {file!r}, which cannot be read: {error.strerror}. Copy the notebook's "
            "file there."
        )
        raise OptionError(msg) from error
    if mode & 0o077:
        msg = f"{KEY_FILE} names {file!r}, which others may read (mode {mode:o}). Run chmod 600 on it."
        raise OptionError(msg)
    return _checked(text, file)


def read_or_make(environ: Mapping[str, str], directory: Callable[[], Path]) -> tuple[bytes, str]:
    """Return the notebook's key, and the file that was made for it ("" if the user has it already)."""
    file = environ.get(KEY_FILE, "")
    if environ.get(KEY) or (file and Path(file).exists()):
        key = read(environ)
        assert key is not None  # noqa: S101 - one of them is set
        return key, ""
    path = Path(file) if file else directory() / "join-key"
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as made:
                made.write(secrets.token_hex(32) + "\n")
    found = read({KEY_FILE: str(path)})
    assert found is not None  # noqa: S101 - it was named
    return found, str(path)


def _checked(text: str, source: str) -> bytes:
    if len(text) < _LEAST_CHARACTERS:
        msg = (
            f"{source} holds a key of {len(text)} characters, and {_LEAST_CHARACTERS} are the least. Take "
            "the notebook's, or make one: python -c 'import secrets; print(secrets.token_hex(32))'."
        )
        raise OptionError(msg)
    return text.encode()


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the key: ranks have no use for it."""
    return {name: value for name, value in environ.items() if name != KEY}


def secret(key: bytes, side: str) -> bytes:
    """Return the 32 bytes that are the CURVE secret key of one side: `notebook` or `node`."""
    return hashlib.blake2b(key, digest_size=32, person=f"nblaunch-{side[:4]}".encode()).digest()
