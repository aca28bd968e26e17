"""What `--sync-env` asks for: exact versions from metadata, their indexes from pip's and uv's settings."""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nblaunch._errors import OptionError
from nblaunch.client import packages
from nblaunch.client.packages import InstalledPackage, environment_of, requirements_of
from nblaunch.nodes import bootstrap
from nblaunch.nodes.engine import NodeProgram
from nblaunch.nodes.sync_env import made_before, name_of
from nblaunch.protocol.client import NodeEnvironment


def package(name: str, version: str = "1.0", **origin: Any) -> InstalledPackage:
    return InstalledPackage(name, version, json.dumps(origin) if origin else "")


GIT = {"vcs": "git", "commit_id": "abc123", "requested_revision": "main"}


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        (package("torch", "2.9.0+cpu"), "torch==2.9.0+cpu"),
        (package("Typing_Extensions.x"), "typing-extensions-x==1.0"),
        (
            package("a", url="https://h/a-1.0-py3-none-any.whl", archive_info={}),
            "a @ https://h/a-1.0-py3-none-any.whl",
        ),
        (package("a", url="https://h/a.git", vcs_info=GIT), "a @ git+https://h/a.git@abc123"),
        (
            package("a", url="ssh://git@h/a", vcs_info=GIT, subdirectory="py"),
            "a @ git+ssh://git@h/a@abc123#subdirectory=py",
        ),
        (package("a", url="file:///where/it/was/built", dir_info={}), "a==1.0"),
        (package("nblaunch", url="file:///", dir_info={"editable": True}), None),
    ],
)
def test_what_is_installed_becomes_a_requirement_that_is_exact(installed, line):
    assert requirements_of([installed], ()) == (() if line is None else (line,))


def test_the_first_of_a_name_counts_and_the_order_is_that_of_names():
    found = requirements_of([package("b"), package("a", "2"), package("A", "1"), package("nblaunch")], ())
    assert found == ("a==2", "b==1.0")


def test_what_was_installed_from_files_of_this_machine_is_refused_by_name(tmp_path):
    wheel = tmp_path / "c d.whl"
    wheel.touch()
    here = [
        package("a", url=tmp_path.as_uri(), dir_info={}),
        package("b", url=tmp_path.as_uri(), dir_info={"editable": True}),
        package("c", url=wheel.as_uri(), archive_info={}),
        package("d"),
    ]
    with pytest.raises(OptionError) as raised:
        requirements_of(here, ("/elsewhere", f"{tmp_path}x"))
    assert f"files of this machine: a ({tmp_path}), b ({tmp_path}), c ({wheel}). Install" in str(raised.value)


def test_a_package_whose_sources_travel_with_each_job_is_left_out(tmp_path):
    linked = package("mine", url=tmp_path.as_uri(), dir_info={"editable": True})
    assert requirements_of([linked], (str(tmp_path / "src"),)) == ()


@pytest.fixture
def no_settings(monkeypatch, tmp_path):
    """Have pip and uv without settings of this machine."""
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    return tmp_path


def sources(directory: Path, *requirements: str, **environ: str) -> list[str]:
    environ["XDG_CONFIG_HOME"] = str(directory / "home")
    return list(packages._sources(requirements, environ, str(directory)))


def test_the_indexes_of_pips_settings_are_looked_into(no_settings):
    config = no_settings / "home" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text(
        "[global]\nindex-url = https://a/simple\n[install]\nfind-links = wheels\n   file:///w\n"
    )
    found = sources(no_settings, PIP_EXTRA_INDEX_URL="https://b https://c", PIP_CERT="x")
    assert found == [
        "--index-url https://a/simple",
        "--extra-index-url https://b",
        "--extra-index-url https://c",
        f"--find-links {no_settings}/wheels",
        "--find-links file:///w",
    ]
    assert sources(no_settings, PIP_INDEX_URL="https://x")[0] == "--index-url https://x", "a variable is more"


def test_the_indexes_of_uvs_settings_are_looked_into_before_pips(no_settings):
    (no_settings / "pyproject.toml").write_text(
        '[[tool.uv.index]]\nname = "torch"\nurl = "https://t"\n[tool.uv.pip]\nno-index = true\n'
    )
    config = no_settings / "home" / "uv" / "uv.toml"
    config.parent.mkdir(parents=True)
    config.write_text('index-url = "https://a"\nextra-index-url = ["https://b"]\n')
    work = no_settings / "notebooks"
    work.mkdir()
    found = sources(no_settings, UV_INDEX="corp=https://c", PIP_INDEX_URL="https://never")
    assert found == [
        "--index-url https://a",
        "--extra-index-url https://c",
        "--extra-index-url https://t",
        "--extra-index-url https://b",
        "--no-index",
    ]
    environ = {"XDG_CONFIG_HOME": str(no_settings / "home"), "UV_DEFAULT_INDEX": "https://d"}
    assert next(packages._sources((), environ, str(work))) == "--index-url https://d"


def test_torchs_own_index_has_torchs_builds_unless_the_user_has_another(no_settings):
    own = "--extra-index-url https://download.pytorch.org/whl/cu126"
    assert sources(no_settings, "numpy==2", "torch==2.9.0+cu126") == [own]
    assert sources(no_settings, "torch==2.9.0+local") == sources(no_settings, "torch==2.9.0") == []
    assert own not in sources(no_settings, "torch==2.9.0+cu126", PIP_FIND_LINKS="/wheels")


def test_the_wheel_of_this_package_is_whole_and_the_same_each_time():
    name, content = packages._own_wheel()
    assert (name, content) == packages._own_wheel()
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        names = set(wheel.namelist())
        record = wheel.read(next(each for each in names if each.endswith("/RECORD"))).decode()
        for line in record.splitlines():
            path, digest, size = line.split(",")
            if digest:
                data = wheel.read(path)
                there = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={there}", len(data))
    folder = Path(packages.__file__).parents[1]
    sent = {f"nblaunch/{each.relative_to(folder)}" for each in folder.rglob("*.py")}
    assert sent <= names
    assert {line.partition(",")[0] for line in record.splitlines()} == names
    assert not any("__pycache__" in each for each in names)


def test_this_environment_has_what_this_python_has(tmp_path):
    (tmp_path / "beside.egg-info").mkdir()
    (tmp_path / "beside.egg-info" / "PKG-INFO").write_text("Name: beside\nVersion: 3\n")
    found = environment_of([str(tmp_path), *sys.path], str(tmp_path), {})
    version = sys.modules["msgspec"].__version__
    assert f"msgspec=={version}" in found.requirements
    assert not [each for each in found.requirements if each.startswith(("nblaunch", "beside"))]
    assert [name.partition("-")[0] for name, _ in found.files] == ["nblaunch"]
    assert found.python == ".".join(map(str, sys.version_info[:3]))


A = NodeEnvironment(python="3.11.7", platform="linux-x86_64", requirements=("a==1",), files=(("w", b"1"),))


@pytest.mark.parametrize(
    "other", [{"python": "3.11.8"}, {"platform": "x"}, {"requirements": ("a==2",)}, {"files": (("w", b"2"),)}]
)
def test_an_environment_is_named_by_what_is_in_it(other):
    assert name_of(A) == name_of(msgspec.structs.replace(A, sources=("--no-index",), uv=b"/uv"))
    assert name_of(A) != name_of(msgspec.structs.replace(A, **other))


def test_no_password_and_no_key_is_on_the_command_line():
    environment = msgspec.structs.replace(A, sources=("--index-url https://ann:secret@h",))
    program = made_before(NodeProgram(("-m", "nblaunch", "join"), b"the key\n"), environment)
    assert program.arguments[2:] == ("-m", "nblaunch", "join")
    assert not any("secret" in each or "the key" in each for each in program.arguments)
    assert program.stdin.startswith(b"the key\n")


def test_any_python_from_3_8_on_can_read_what_makes_an_environment():
    source = Path(bootstrap.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert {str(name).partition(".")[0] for name in imported} <= sys.stdlib_module_names
