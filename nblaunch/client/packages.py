"""Describes this process's Python environment for other machines: packages and their exact versions.

nblaunch itself is sent as a wheel of its own files, because nodes need exactly this version. An editable
install (`pip install -e`) is left out if its sources travel with each job (`code`).
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import io
import itertools
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch._version import __version__
from nblaunch.capture.own_modules import is_below, is_installed, roots_of
from nblaunch.protocol.client import NodeEnvironment

_OURS = "nblaunch"
_NAMED = 5
# The local version of torch's own builds, which is also the name of the index that has them.
_TORCHS_BUILD = re.compile(r"torch==[^+]+\+(cpu|cu\d+|rocm[\d.]+|xpu)")
_TORCHS_INDEX = "https://download.pytorch.org/whl"
# A fixed time for all files in the wheel: the same content gives the same bytes.
_WHEEL_TIME = (1980, 1, 1, 0, 0, 0)


class InstalledPackage(NamedTuple):
    """An installed package; `origin` is the text of its `direct_url.json`, "" if it came from an index."""

    name: str
    version: str
    origin: str = ""


def environment_of(path: Sequence[str], directory: str, environ: Mapping[str, str]) -> NodeEnvironment:
    """Return a description of this environment; `path` is `sys.path`, `directory` the working directory.

    Raises `OptionError` for packages that another machine cannot install.
    """
    requirements = requirements_of(_installed(path), tuple(map(str, roots_of(path, directory))))
    beside = Path(sysconfig.get_path("scripts"), "uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv", path=environ.get("PATH"))
    return NodeEnvironment(
        python=platform.python_version(),
        platform=f"{sys.platform}-{platform.machine()}",
        requirements=requirements,
        sources=tuple(_sources(requirements, environ, directory)),
        files=(_own_wheel(),),
        uv=os.fsencode(uv) if uv else b"",
    )


def requirements_of(packages: Iterable[InstalledPackage], roots: Sequence[str]) -> tuple[str, ...]:
    """Return a requirement for each package; `roots` are directories whose modules travel with jobs.

    Of two packages with the same name the first one counts, as for Python's import. Raises `OptionError` for
    packages that were installed from files of this machine.

    >>> requirements_of([InstalledPackage("Some_Name", "1.0"), InstalledPackage("some-name", "2.0")], ())
    ('some-name==1.0',)
    """
    found: dict[str, str] = {}
    for each in packages:
        name = re.sub(r"[-_.]+", "-", each.name).lower()
        if name not in found and name != _OURS:
            found[name] = _requirement(name, each, roots)
    refused = {name: text for name, text in found.items() if text.startswith("/")}
    if refused:
        named = ", ".join(f"{name} ({place})" for name, place in itertools.islice(refused.items(), _NAMED))
        more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        msg = (
            f"--sync-env was given, but these packages were installed from files of this machine: {named}"
            f"{more}. Install each from an index, a wheel's URL or a repository, or as editable (pip install "
            "-e) in the notebook's project, whose code is sent with jobs."
        )
        raise OptionError(msg, kind=FailureKind.PACKAGES)
    return tuple(sorted(filter(None, found.values())))


def _requirement(name: str, package: InstalledPackage, roots: Sequence[str]) -> str:
    """Return a requirement; "" for a package that travels with jobs, a path for one that must be refused."""
    exact = f"{name}=={package.version}"
    origin = json.loads(package.origin) if package.origin else {}
    url = origin.get("url", "")
    if not url:
        return exact
    place = urlsplit(url)
    if place.scheme == "file":
        there = os.path.realpath(unquote(place.path))
        if not Path(there).exists():
            return exact  # the path is that of a build machine, as in conda's packages
        linked = origin.get("dir_info", {}).get("editable", False)
        travels = linked and any(is_below(os.path.realpath(root), (there,)) for root in roots)
        return "" if travels else there
    within = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
    if "vcs_info" in origin:
        return f"{name} @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}{within}"
    return f"{name} @ {url}{within}"


def _installed(path: Sequence[str]) -> Iterator[InstalledPackage]:
    for each in metadata.distributions(path=list(path)):
        # An `.egg-info` beside a project's sources is on the path, but is not an installed package.
        if is_installed(os.path.realpath(str(each.locate_file("")))):
            name, version = each.metadata["Name"], each.metadata["Version"]
            if name and version:  # broken metadata has neither
                yield InstalledPackage(name, version, each.read_text("direct_url.json") or "")


# --- where packages come from -----------------------------------------------------------------------


def _sources(requirements: Iterable[str], environ: Mapping[str, str], directory: str) -> Iterator[str]:
    """Yield lines of a requirements file: the indexes and directories that this user's uv and pip use."""
    settings = (*_uv_settings(environ, directory), _pip_settings(environ))
    index = next((each["index-url"] for each in settings if each.get("index-url")), None)
    more = {
        option: dict.fromkeys(text for each in settings for text in _words(each.get(option)))
        for option in ("extra-index-url", "find-links")
    }
    if index is not None:
        yield f"--index-url {index[0] if isinstance(index, list) else index}"
    for option, places in more.items():
        for place in places:
            yield f"--{option} {place if '://' in place else os.path.join(directory, place)}"  # noqa: PTH118
    if any(each.get("no-index") in (True, "true", "1", "yes") for each in settings):
        yield "--no-index"
    build = next(filter(None, map(_TORCHS_BUILD.fullmatch, requirements)), None)
    if build is not None and index is None and not any(more.values()):
        yield f"--extra-index-url {_TORCHS_INDEX}/{build[1]}"


def _words(value: object) -> list[str]:
    return value.split() if isinstance(value, str) else [str(each) for each in value or ()]  # type: ignore[attr-defined]


def _uv_settings(environ: Mapping[str, str], directory: str) -> Iterator[dict[str, Any]]:
    """Yield uv's settings, highest priority first: environment variables, project, user, system."""
    yield {
        "index-url": environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL"),
        "extra-index-url": [
            re.sub(r"^\w[\w-]*=", "", each)  # an index may have a name
            for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL")
            for each in environ.get(name, "").split()
        ],
        "find-links": environ.get("UV_FIND_LINKS", "").replace(",", " "),
        "no-index": environ.get("UV_NO_INDEX", "").lower(),
    }
    for file in _uv_files(environ, Path(directory)):
        try:
            read: dict[str, Any] = tomllib.loads(file.read_text())
        except (OSError, ValueError):
            continue  # the file is missing, or broken, which uv itself reports
        if file.name == "pyproject.toml":
            read = read.get("tool", {}).get("uv", {})
        yield _of_toml({**read, **read.get("pip", {})})


def _uv_files(environ: Mapping[str, str], directory: Path) -> Iterator[Path]:
    """Yield the paths of uv's settings, which need not exist."""
    if own := environ.get("UV_CONFIG_FILE"):
        yield Path(own)
        return
    above = (
        each / name for each in (directory, *directory.parents) for name in ("uv.toml", "pyproject.toml")
    )
    yield from itertools.islice(filter(Path.is_file, above), 1)
    yield Path(_config(environ), "uv", "uv.toml")
    yield Path("/etc/uv/uv.toml")


def _config(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 - never raises


def _of_toml(read: dict[str, Any]) -> dict[str, Any]:
    named = [each for each in read.get("index", ()) if "url" in each]
    default = [each["url"] for each in named if each.get("default")]
    others = [each["url"] for each in named if not each.get("default")]
    index = default[0] if default else read.get("index-url")
    return {**read, "index-url": index, "extra-index-url": [*others, *read.get("extra-index-url", ())]}


def _pip_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return pip's settings; later ones win: system, user, virtual environment, environment variables."""
    old = os.path.expanduser("~/.pip/pip.conf")  # noqa: PTH111 - never raises
    files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", old, f"{_config(environ)}/pip/pip.conf"]
    files += [f"{sys.prefix}/pip.conf", *filter(None, [environ.get("PIP_CONFIG_FILE")])]
    read = configparser.RawConfigParser(strict=False)
    found: dict[str, Any] = {}
    for file in files:
        try:
            read.read(file)
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself reports it
    for section in ("global", "install"):
        if read.has_section(section):
            found |= {name.replace("_", "-"): value for name, value in read.items(section)}
    for name in ("index-url", "extra-index-url", "find-links", "no-index"):
        given = environ.get(f"PIP_{name.upper().replace('-', '_')}")
        found |= {name: given} if given else {}
    return found


# --- what is sent ------------------------------------------------------------------------------------


def _own_wheel() -> tuple[str, bytes]:
    """Return the name and content of a wheel of this package's files."""
    package = Path(__file__).parents[1]
    files = {
        f"{_OURS}/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = f"{_OURS}-{__version__}.dist-info"
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {_OURS}\nVersion: {__version__}\n".encode()
    tag = "py3-none-any"
    files[f"{about}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    record = "".join(f"{name},sha256={_sha256(content)},{len(content)}\n" for name, content in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n".encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _WHEEL_TIME), content, zipfile.ZIP_DEFLATED)
    return f"{_OURS}-{__version__}-{tag}.whl", written.getvalue()


def _sha256(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
