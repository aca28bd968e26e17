"""The notebook's Python environment for nodes (`--sync-env`): the standard input of a node program.

Any Python on the node runs `bootstrap`. Its source and all that it needs follow the key on the standard
input, so no command line holds the key or the password of an index.

    key, a line
    the size of bootstrap's source, a line; the source
    the environment, a line of JSON; the files that it names
    the program uv, which only a host without uv reads
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from nblaunch.nodes import bootstrap
from nblaunch.nodes.engine import NodeProgram
from nblaunch.protocol.client import NodeEnvironment

_DIGEST_BYTES = 16
_LOADER = (
    "import sys; sys.version_info < (3, 8) and sys.exit('--sync-env needs Python 3.8 or newer on the node: "
    "name one with --node-python'); s = sys.stdin.buffer; k = s.readline(); "
    "i = int(s.readline() or 0); c = s.read(i); "
    f"len(c) == i > 0 or sys.stderr.write('{bootstrap.ABANDONED}\\n') and sys.exit({bootstrap.FAILED}); "
    f"n = {{'__name__': 'bootstrap'}}; exec(c, n); n['{bootstrap.MAIN}'](k, s, sys.argv[1:])"
)


def name_of(environment: NodeEnvironment) -> str:
    """Return an environment's name, a hash of its content; where packages come from does not matter."""
    digests = tuple((name, _digest(content)) for name, content in environment.files)
    packages = (environment.platform, environment.python, environment.requirements, digests)
    return _digest(msgspec.msgpack.encode(packages))


def made_before(program: NodeProgram, environment: NodeEnvironment) -> NodeProgram:
    """Return a program that makes an environment and then runs a node program in it."""
    source = Path(bootstrap.__file__).read_bytes()
    uv = Path(os.fsdecode(environment.uv)).read_bytes() if environment.uv else b""
    order = {
        "name": name_of(environment),
        "platform": environment.platform,
        "python": environment.python,
        "requirements": environment.requirements,
        "sources": environment.sources,
        "files": [(name, len(content)) for name, content in environment.files],
        "uv": {"name": _digest(uv), "size": len(uv)} if uv else None,
    }
    parts = [program.stdin, f"{len(source)}\n".encode(), source, msgspec.json.encode(order), b"\n"]
    stdin = b"".join([*parts, *(content for _, content in environment.files), uv])
    return NodeProgram(("-c", _LOADER, *program.arguments), stdin)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
