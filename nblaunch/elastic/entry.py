"""What the kernel has ranks call: it refers to these functions, and never imports `nblaunch.rank`."""

from __future__ import annotations

from nblaunch.protocol.messages import Orders


def run_rank(orders: Orders) -> None:
    """Be a rank: torchelastic's entry point, called in a fork of the server."""
    from nblaunch.rank import main

    main.run_rank(orders)


def ask_shell(question: str, *arguments: object) -> object:
    """Return what the rank's shell answers between two cells: `describe`, `complete` or `debug`."""
    from nblaunch.rank import shell

    return getattr(shell, question)(*arguments)
