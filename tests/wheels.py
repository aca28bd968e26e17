"""A directory of wheels, which is an index: packages that are made in a moment."""

from __future__ import annotations

import zipfile
from pathlib import Path


def add_wheel(directory: Path, name: str, version: str) -> None:
    """Write the wheel of a package that has its version as `VERSION`."""
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in {**files, f"{about}/RECORD": record}.items():
            wheel.writestr(path, content)
