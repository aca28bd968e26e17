"""A Jupyter server with nothing of the user's own: its configuration, kernels and files in one directory."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import NATIVE_KERNEL_NAME

_CLOSED_AFTER_SECONDS = 10


class Server:
    """Serves one directory to JupyterLab and to Notebook 7, on the loopback interface."""

    def __init__(self, home: Path, kernel_environment: dict[str, str]) -> None:
        """Start it; all that it writes is below `home`."""
        self.token = secrets.token_hex(16)
        self.files = home / "notebooks"
        self.log = home / "server.log"
        self._runtime = home / "runtime"
        own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython"}
        environment = {**os.environ, **{name: str(home / folder) for name, folder in own.items()}}
        environment["JUPYTER_RUNTIME_DIR"] = str(self._runtime)
        environment.pop("PYTEST_CURRENT_TEST", None)  # the panel is not for a kernel that pytest has started
        for folder in ("notebooks", "runtime", *own.values()):
            (home / folder).mkdir(parents=True)
        _write_kernel(home / "data", kernel_environment)
        _write_settings(home / "config")
        arguments = [
            "--ip=127.0.0.1",
            "--allow-root",
            "--ServerApp.port=0",  # any that is free
            "--ServerApp.open_browser=False",
            f"--ServerApp.root_dir={self.files}",
            "--ServerApp.jpserver_extensions=jupyterlab=True",
            "--ServerApp.jpserver_extensions=notebook=True",
            "--LabApp.expose_app_in_browser=True",  # the tests run cells by the page's own commands
            "--JupyterNotebookApp.expose_app_in_browser=True",
        ]
        environment["JUPYTER_TOKEN"] = self.token
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyter_server", *arguments],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def url(self) -> str:
        """Where it serves; an empty string before it does."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not yet, or half of it
            return str(json.loads((self._runtime / f"jpserver-{self._process.pid}.json").read_text())["url"])
        return ""

    def is_up(self) -> bool:
        """Return whether it answers; raises `RuntimeError` if it has ended."""
        if self._process.poll() is not None:
            msg = f"the Jupyter server ended:\n{self.log.read_text()}"
            raise RuntimeError(msg)
        try:
            return bool(self.url) and "started" in self.ask("api/status")
        except OSError:
            return False

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return what its API answers."""
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{self.url}{path}", headers={"Authorization": f"token {self.token}"}, method=method
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - see above
            content = answer.read()
        return json.loads(content) if content else None

    def end_kernels(self, notebook: str = "") -> None:
        """Shut every kernel down, or that of one `notebook`."""
        for session in self.ask("api/sessions"):
            if notebook in ("", session["path"]):
                self.ask(f"api/sessions/{session['id']}", method="DELETE")

    def close(self) -> None:
        """End it, and its kernels with it."""
        self._process.terminate()
        try:
            self._process.wait(_CLOSED_AFTER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _write_kernel(data: Path, environment: dict[str, str]) -> None:
    folder = data / "kernels" / NATIVE_KERNEL_NAME
    folder.mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": launch, "display_name": "Python 3", "language": "python", "env": environment}
    (folder / "kernel.json").write_text(json.dumps(kernel))


def _write_settings(config: Path) -> None:
    """Keep JupyterLab's own messages, about news and updates, out of the pictures."""
    folder = config / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    folder.mkdir(parents=True)
    settings = {"fetchNews": "false", "checkForUpdates": False}
    (folder / "notification.jupyterlab-settings").write_text(json.dumps(settings))
