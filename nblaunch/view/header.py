"""What a view says about a run as a whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Header:
    """What runs, and where: `cell` on `gloo`.

    `node`, `log_dir`, `magic` (the magic's own line) and `note` (why it runs on these devices) are shown only
    while the run is live: they differ from machine to machine, and what is saved must not.
    """

    title: str
    backend: str = ""
    node: str = ""
    log_dir: str | None = None
    magic: str = ""
    note: str = ""
