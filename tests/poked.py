"""A runtime in which tests run code: the real process in its real place, with one socket more."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "poked:live"


class Poke:
    """`poke(code)`: what an expression is worth in the runtime of this process; statements are run there.

    `local` is the runtime's `LocalRuntime`; other names stay from one call to the next.
    """

    def __call__(self, code: str) -> Any:
        from nblaunch.client.local import local

        runtime = local().runtime
        _ = runtime.welcome
        return run_in(runtime.root, code)


def run_in(root: Path, code: str) -> Any:
    """Run code in the runtime whose directory is `root`, as `Poke` does."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(root / "poke"))
        asked.sendall(code.encode())
        asked.shutdown(socket.SHUT_WR)
        # Nothing, where the code ends the runtime.
        answer = json.loads(asked.makefile().read() or '{"value": null}')
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def begin() -> None:
    """Have this process's next runtime, and all after it, be such a one."""
    from nblaunch.client import local

    local.local().close()
    local.LIVE = NAME


def of_kernel(kernel: Any) -> Callable[[str], Any]:
    """Have a kernel use such a runtime; return what runs code there."""
    here = str(Path(__file__).parent)
    kernel.ok(f"import sys; sys.path.append({here!r}); import poked; poked.begin()")
    return lambda code: kernel.value(f"poked.Poke()({code!r})")


def live(*arguments: Any) -> None:
    """Be the runtime."""
    from nblaunch.group import local_runtime
    from nblaunch.runtime import runtime_main

    class Noted(local_runtime.LocalRuntime):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(Path(root, "poke")))
            listening.listen()
            threading.Thread(target=_serve, args=(listening, {"local": self}), daemon=True).start()

    *_, root, _ = arguments
    local_runtime.LocalRuntime = Noted  # type: ignore[assignment, misc]
    runtime_main.live(*arguments)


def _serve(listening: socket.socket, names: dict[str, Any]) -> None:
    while True:
        asking, _ = listening.accept()
        with asking:
            code = asking.makefile().read()
            try:
                answer = {"value": _run(code, names)}
            except Exception as error:  # noqa: BLE001 - for the test to look at
                answer = {"error": f"{type(error).__name__}: {error}"}
            asking.sendall(json.dumps(answer, default=repr).encode())


def _run(code: str, names: dict[str, Any]) -> Any:
    try:
        expression = compile(code, "<poke>", "eval")
    except SyntaxError:
        exec(code, names)  # noqa: S102 - the test's own
        return None
    return eval(expression, names)  # noqa: S307 - the test's own
