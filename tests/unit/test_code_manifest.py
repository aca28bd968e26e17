"""The notebook's own modules: which files a job may import, and what nodes make of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from nblaunch import CaptureError
from nblaunch.capture import own_modules
from nblaunch.capture.own_modules import FilePrints, digest_of, roots_of
from nblaunch.client import code_manifest as client_code
from nblaunch.client.code_manifest import KnownFiles
from nblaunch.host import code as node_code
from nblaunch.host.code import JobCode, NodeCode
from nblaunch.host.wire import CodeFiles, CodeLacking, HaveCode, Piece
from nblaunch.protocol.messages import CodeFile, CodeManifest, CodeTree
from nblaunch.rank.modules import OwnModules

NODE = b"hA"
GROUP = "3f2a91c0"


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def loaded(**files: Path) -> dict[str, ModuleType]:
    """Return modules as `sys.modules` has them."""
    found = {name: ModuleType(name) for name in files}
    for name, path in files.items():
        found[name].__file__ = str(path)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Give a directory with modules of a user's own, some of which import others."""
    root = tmp_path / "project"
    write(
        root,
        {
            "helpers.py": "import os, numpy\ndef f():\n    import later\n",
            "later.py": "from parts.inner import deep\n",
            "parts/inner/deep.py": "from . import beside\n",
            "parts/inner/beside.py": "",
            "parts/inner/unused.py": "",
            "package/__init__.py": "",
            "package/a.py": "from .sub import b",
            "package/plugin.py": "",
            "package/sub/__init__.py": "",
            "package/sub/b.py": "",
            "package/data/notes.py": "",
            "package/data.txt": "text",
            "other.py": "",
            "numpy.py": "",
        },
    )
    return root


def manifest(root: Path, source: str = "", **more: Any) -> CodeManifest | None:
    return KnownFiles().manifest([str(root)], str(root), more.pop("loaded", {}), [source], **more)


def paths(found: CodeManifest | None) -> list[str]:
    return [] if found is None else [each.path for each in found.files]


# --- which files


def test_a_cell_takes_what_it_imports_with_all_that_this_imports_wherever_that_stands(project):
    numpy = loaded(numpy=Path("/usr/lib/python3/dist-packages/numpy/__init__.py"))
    found = manifest(project, "import helpers", loaded=numpy)
    assert paths(found) == ["helpers.py", "later.py", "parts/inner/beside.py", "parts/inner/deep.py"]


def test_a_package_is_taken_whole_and_a_directory_that_is_none_only_as_far_as_it_is_imported(project):
    found = manifest(project, "from package import a")
    names = ["__init__.py", "a.py", "plugin.py", "sub/__init__.py", "sub/b.py"]
    assert paths(found) == [f"package/{name}" for name in names]
    assert paths(manifest(project, "import parts.inner.unused")) == ["parts/inner/unused.py"]


def test_what_the_notebook_has_loaded_is_taken_although_no_statement_names_it(project):
    own = loaded(other=project / "other.py", __main__=project / "later.py")
    assert paths(manifest(project, loaded=own)) == ["other.py"]


def test_a_module_of_the_standard_library_is_not_looked_for_unless_the_notebook_has_loaded_its_own(project):
    write(project, {"queue.py": ""})
    assert manifest(project, "import queue") is None
    assert paths(manifest(project, loaded=loaded(queue=project / "queue.py"))) == ["queue.py"]


@pytest.mark.parametrize(
    "source",
    [
        "%%time\nimport other",
        "!ls\nfiles = !ls\nimport other",
        "%time import other\nif x:\n    %matplotlib inline\n    import other",
        "import importlib\nimportlib.import_module('other')",
        "def f():\n    try:\n        from other import x\n    except ImportError: pass",
    ],
)
def test_import_statements_are_found_in_any_cell(project, source):
    assert paths(manifest(project, source)) == ["other.py"]


@pytest.mark.parametrize("source", ["import nblaunch", "import nosuch", "def broken(", "x = 1", "\0"])
def test_a_cell_that_imports_nothing_of_the_notebooks_own_has_no_manifest(project, source):
    assert manifest(project, source) is None


def test_a_script_and_the_file_of_a_function_that_travels_bring_what_they_import(project):
    write(project.parent, {"scripts/train.py": "import near, other", "scripts/near.py": ""})
    write(project, {"of_function.py": "import other"})
    script = str(project.parent / "scripts/train.py")
    assert paths(manifest(project, scripts=[script])) == ["near.py", "train.py", "other.py"]
    function = str(project / "of_function.py")
    assert paths(manifest(project, compiled=[function, "/no/such/cell"])) == ["other.py"]


def test_a_file_below_two_roots_is_found_from_either(project):
    roots = [str(project), str(project / "parts")]
    found = KnownFiles().manifest(roots, str(project), {}, ["import parts.inner.unused, inner.unused"])
    assert found is not None
    assert [(each.root, each.path) for each in found.files] == [
        (0, "parts/inner/unused.py"),
        (1, "inner/unused.py"),
    ]
    assert len({each.digest for each in found.files}) == 1


def test_a_module_that_is_loaded_again_from_another_place_is_taken_from_there(project, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    write(tmp_path / "first", {"twice.py": "", "after.py": ""})
    twice, _ = importlib.import_module("twice"), importlib.import_module("after")
    known = KnownFiles()

    def own() -> list[str]:
        return paths(known.manifest([str(project)], str(project), sys.modules, ["import twice"]))

    try:
        assert "twice.py" not in own()
        write(project, {"twice.py": ""})
        assert "twice.py" not in own()
        monkeypatch.syspath_prepend(str(project))
        importlib.reload(twice)
        assert "twice.py" in own()
        # Again: now it is the last module that was loaded.
        sys.path.remove(str(project))
        importlib.reload(twice)
        assert "twice.py" not in own()
    finally:
        del sys.modules["twice"], sys.modules["after"]


def test_roots_are_neither_pythons_nor_those_of_packages(project, monkeypatch, tmp_path):
    site, inside, outside = tmp_path / "env/site-packages", project / "src", tmp_path / "elsewhere"
    for each in (site / "deeper", inside, outside, project / ".git"):
        each.mkdir(parents=True)
    (site / "links.pth").write_text(f"import something\n{inside}\n{outside}\n")
    own_modules._linked.cache_clear()
    stdlib = own_modules._installed()
    monkeypatch.setattr(own_modules, "_installed", lambda: (*stdlib, str(site)))
    path = ["", *sys.path, str(site), str(site / "deeper"), "src", str(outside), "/no/such", str(inside)]
    try:
        found = roots_of(path, str(project))
    finally:
        own_modules._linked.cache_clear()
    assert [each for each in found if str(each).startswith(str(tmp_path))] == [project, inside]
    assert not any(own_modules.is_below(str(each), stdlib) for each in found)


def test_an_environment_below_the_notebooks_directory_is_not_its_own(project, monkeypatch):
    site = project / ".venv/site-packages"
    write(site, {"installed.py": ""})
    monkeypatch.setattr(own_modules, "_installed", lambda: (str(site),))
    assert manifest(project, loaded=loaded(installed=site / "installed.py")) is None


# --- their content


def test_the_same_content_has_the_same_tree_and_other_content_another(project):
    known = KnownFiles()

    def tree() -> str:
        found = known.manifest([str(project)], str(project), {}, ["import other"])
        assert found is not None
        return found.tree

    before = tree()
    assert tree() == before
    (project / "other.py").write_text("x = 1")
    after = tree()
    (project / "other.py").write_text("x = 2")  # of the same size, at almost the same time
    assert len({before, after, tree()}) == 3
    (project / "other.py").write_text("")
    assert tree() == before


def test_a_file_that_has_not_changed_is_not_read_again(project):
    prints, reads = FilePrints(), []
    path = str(project / "helpers.py")
    os.utime(path, (1, 1))
    for _ in range(3):
        prints.of(path, lambda digest, content: reads.append((digest, content)))
    assert reads == [(digest_of(content := Path(path).read_bytes()), content)]
    os.utime(path, (2, 2))
    prints.of(path, lambda digest, content: reads.append((digest, content)))
    assert len(reads) == 2


def test_too_much_is_refused_and_the_largest_are_named(project, monkeypatch):
    monkeypatch.setattr(client_code, "MOST_BYTES", 1000)
    write(project, {"large.py": f"x = '{'a' * 2000}'", "small.py": "import large"})
    with pytest.raises(CaptureError, match=r"Install what does not change.*large\.py \(0\.0 MB\)") as refused:
        manifest(project, "import small")
    assert refused.value.path == str(project / "large.py")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read any file")
def test_a_file_that_cannot_be_read_is_left_out(project):
    (project / "other.py").chmod(0)
    assert manifest(project, "import other") is None


def test_a_package_with_a_pipe_and_a_link_to_itself_ends(project):
    os.mkfifo(project / "package/pipe.py")
    (project / "package/again").symlink_to(project / "package")
    found = paths(manifest(project, "import package.again.a"))
    assert "package/pipe.py" not in found
    assert "package/a.py" in found


# --- from the runtime to a node, and there


class Wire:
    """A runtime and a node, and what they send: messages are delivered by `turn`."""

    def __init__(self, directory: Path, *, large: bool = False) -> None:
        self.away: Path | None = None
        """A directory that the node does not see."""
        self.sent: list[HaveCode | CodeFiles | CodeLacking] = []
        self.content = 0
        self._queue: deque[Callable[[], None]] = deque()
        self.node = NodeCode(directory, self._from_node)
        self.runtime = JobCode(self._to_node, self._in_pieces if large else None)

    def _from_node(self, message: CodeLacking) -> None:
        self.sent.append(message)
        self._queue.append(lambda: self.runtime.answer(NODE, message))

    def _to_node(self, node: bytes, message: HaveCode | CodeFiles, data: memoryview | None) -> None:
        assert node == NODE
        self.sent.append(message)
        self.content += 0 if data is None else data.nbytes
        self._queue.append(lambda: self.receive(message, data or memoryview(b"")))

    def _in_pieces(self, node: bytes, content: bytes) -> int:
        assert node == NODE
        self.content += len(content)
        step = len(content) // 3 + 1
        for offset in range(0, len(content), step):
            piece = Piece(number=7, offset=offset, total=len(content))
            data = memoryview(content)[offset : offset + step]
            # In front of the message that names them: they come on another connection.
            self._queue.append(functools.partial(self.receive, piece, data))
        return 7

    @contextlib.contextmanager
    def _at_node(self) -> Iterator[None]:
        hidden = None if self.away is None else self.away.rename(self.away.with_name("away"))
        try:
            yield
        finally:
            if hidden is not None and self.away is not None:
                hidden.rename(self.away)

    def receive(self, message: HaveCode | CodeFiles | Piece, data: memoryview) -> None:
        with self._at_node():
            self.node.receive(message, data)

    def turn(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def submit(self, manifest: CodeManifest, group: str = GROUP) -> CodeTree:
        """Give a job as the runtime does; return what its ranks get."""
        code, got = CodeTree(manifest.tree, manifest.roots), []
        self.runtime.learn(manifest)
        self.runtime.ask(NODE, code)
        self._queue.append(lambda: self.node.when_settled(code.tree, lambda: got.append(code)))
        self.turn()
        assert got == [code]
        with self._at_node():
            return self.node.point_view(code, group)


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path / "node")


@pytest.fixture
def elsewhere(project: Path, wire: Wire) -> Path:
    """Give the project, which the node does not see."""
    wire.away = project
    return project


def content_of(code: CodeTree) -> dict[str, str]:
    """Return the files of the first root of a tree."""
    root = Path(os.fsdecode(code.directory), "0")
    return {str(each.relative_to(root)): each.read_text() for each in sorted(root.rglob("*.py"))}


def need(project: Path, source: str = "import helpers, package.a") -> CodeManifest:
    found = manifest(project, source)
    assert found is not None
    return found


@pytest.mark.parametrize("large", [False, True])
def test_a_node_gets_each_file_once_and_then_what_was_edited(elsewhere, tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr(node_code, "_SMALL", 0)
    wire, first = Wire(tmp_path / "node", large=large), need(elsewhere)
    wire.away = elsewhere
    code = wire.submit(first)
    names = {each.path for each in first.files}
    assert content_of(code) == {name: (elsewhere / name).read_text() for name in names}
    before = len(wire.sent)
    assert wire.submit(first) == code
    assert len(wire.sent) == before
    (elsewhere / "later.py").write_text("x = 2")
    edited = need(elsewhere)
    again = wire.submit(edited)
    assert content_of(again)["later.py"] == "x = 2"
    (lacked,) = [each.digests for each in wire.sent[before:] if isinstance(each, CodeLacking)]
    assert lacked == (digest_of(b"x = 2"),)


def test_a_groups_modules_stay_where_they_are_and_another_groups_keep_their_content(elsewhere, wire):
    write(elsewhere, {"other.py": "old"})
    running = wire.submit(need(elsewhere, "import other"), "running")
    session = wire.submit(need(elsewhere, "import other"))
    write(elsewhere, {"other.py": "new"})
    later = wire.submit(need(elsewhere, "import other"))
    assert later.directory == session.directory
    assert content_of(later) == {"other.py": "new"}
    assert content_of(running) == {"other.py": "old"}


def test_files_that_are_the_same_at_their_own_paths_are_used_as_they_are(project, wire, tmp_path):
    found = need(project)
    assert wire.submit(found) == CodeTree(found.tree, found.roots)
    assert [type(each) for each in wire.sent] == [HaveCode, CodeLacking]
    assert not (tmp_path / "node").exists()


def test_a_group_that_has_had_a_view_keeps_it_where_the_paths_come_to_agree(project, wire):
    """A shared file system may show another machine's change a while later."""
    wire.away = project
    view = wire.submit(need(project, "import other"))
    wire.away = None
    write(project, {"other.py": "newest"})
    content = wire.content
    newest = wire.submit(need(project, "import other"))
    assert (newest.directory, content_of(newest)) == (view.directory, {"other.py": "newest"})
    assert wire.content == content  # taken from its own path


def test_a_file_that_changes_while_it_is_sent_is_named_and_the_next_job_gets_it(elsewhere, wire):
    first = need(elsewhere)
    (elsewhere / "later.py").write_text("x = 2")
    with pytest.raises(OSError, match=r"later\.py changed.*Run the cell again"):
        wire.submit(first)
    assert content_of(wire.submit(need(elsewhere)))["later.py"] == "x = 2"


def test_a_node_that_could_not_write_is_asked_again_with_the_next_job(elsewhere, wire, monkeypatch):
    found = need(elsewhere)
    with monkeypatch.context() as patch:
        patch.setattr(NodeCode, "_keep", raising(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            wire.submit(found)
    assert "later.py" in content_of(wire.submit(found))


def test_a_node_that_has_come_in_place_of_another_is_asked_again(elsewhere, wire, tmp_path):
    found = need(elsewhere)
    wire.submit(found)
    wire.runtime.forget(NODE)
    wire.node = NodeCode(tmp_path / "replaced", wire._from_node)
    assert "later.py" in content_of(wire.submit(found))


def test_a_job_waits_while_a_node_looks_at_the_notebooks_own_paths(project, tmp_path):
    looks: list[Callable[[], None]] = []
    sent: list[CodeLacking] = []
    node = NodeCode(tmp_path / "node", sent.append, lambda work, then: looks.append(lambda: then(work())))
    found = need(project)
    for _ in range(2):  # the files may have changed since
        node.receive(HaveCode(manifest=found), memoryview(b""))
        assert not node.is_settled(found.tree)
        looks.pop()()
        assert node.is_settled(found.tree)
    assert [each.digests for each in sent] == [(), ()]


def test_content_that_is_not_what_its_digest_says_is_not_kept(elsewhere, tmp_path):
    sent: list[CodeLacking] = []
    node, found = NodeCode(tmp_path / "node", sent.append), need(elsewhere, "import other")
    elsewhere.rename(tmp_path / "away")
    node.receive(HaveCode(manifest=found), memoryview(b""))
    forged = msgspec.msgpack.encode({found.files[0].digest: b"forged"})
    node.receive(CodeFiles(tree=found.tree, number=0), memoryview(forged))
    with pytest.raises(OSError, match=r"other\.py"):
        node.point_view(CodeTree(found.tree, found.roots), GROUP)
    node.receive(CodeFiles(tree=found.tree, number=0), memoryview(b"\xc1"))
    with pytest.raises(OSError, match="MessagePack"):
        node.point_view(CodeTree(found.tree, found.roots), GROUP)


@pytest.mark.parametrize(
    ("tree", "root", "path"),
    [
        *[("a1", 0, "../b.py"), ("a1", 0, "/etc/b.py"), ("../a1", 0, "b.py")],
        *[("a1", 1, "b.py"), ("a1", -1, "b.py")],
    ],
)
def test_a_manifest_names_no_file_outside_its_tree(tmp_path, tree, root, path):
    content = b"x = 1"
    bad = CodeManifest(tree, (b"/no/such",), (CodeFile(root, path, digest_of(content), len(content)),))
    sent: list[CodeLacking] = []
    node = NodeCode(tmp_path / "node", sent.append)
    node.receive(HaveCode(manifest=bad), memoryview(b""))
    files = msgspec.msgpack.encode({digest_of(content): content})
    node.receive(CodeFiles(tree=tree, number=0), memoryview(files))
    with pytest.raises(OSError, match=r"outside its directories|did not receive"):
        node.point_view(CodeTree(tree, bad.roots), GROUP)
    written = [str(each) for each in tmp_path.rglob("*") if each.is_file()]
    assert written in ([], [str(tmp_path / "node/files" / digest_of(content).hex())])


def test_what_no_group_uses_is_removed_once_it_is_much(elsewhere, wire, tmp_path):
    trees, files = tmp_path / "node/trees", tmp_path / "node/files"
    write(elsewhere, {"other.py": "first"})
    used = wire.submit(need(elsewhere, "import other"), "running")
    for number in range(30):
        write(elsewhere, {"other.py": f"x = {number}"})
        wire.submit(need(elsewhere, "import other"))
    assert len(list(trees.iterdir())) == len(list(files.iterdir())) == 2 + node_code._KEPT_TREES
    assert content_of(used) == {"other.py": "first"}
    wire.node.release("running")
    wire.node.release(GROUP)
    assert len(list(trees.iterdir())) == len(list(files.iterdir())) == node_code._KEPT_TREES
    assert not any((tmp_path / "node/views").iterdir())


def test_a_file_system_without_links_gets_copies(elsewhere, wire, monkeypatch):
    monkeypatch.setattr(Path, "hardlink_to", raising(PermissionError(1, "no links")))
    assert "later.py" in content_of(wire.submit(need(elsewhere)))


# --- in a rank


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnModules]:
    """Give a rank's side; what it loads and where from is as before at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield OwnModules()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_rank_imports_from_the_tree_before_what_its_machine_has(elsewhere, wire, rank, tmp_path):
    write(elsewhere, {"chosen.py": "x = 'sent'"})
    write(tmp_path / "stale", {"chosen.py": "x = 'stale'"})
    sys.path.insert(0, str(tmp_path / "stale"))
    rank.take(wire.submit(need(elsewhere, "import chosen")))
    assert importlib.import_module("chosen").x == "sent"
    standard = str(Path(os.__file__).parent)
    assert sys.path.index(standard) < sys.path.index(str(tmp_path / "node/views" / GROUP / "0"))


def test_a_new_module_of_a_package_that_is_loaded_is_found(elsewhere, wire, rank):
    write(elsewhere, {"growing/__init__.py": "", "growing/a.py": "x = 1"})
    rank.take(wire.submit(need(elsewhere, "import growing.a")))
    importlib.import_module("growing.a")
    rank.note_loaded()
    write(elsewhere, {"growing/b.py": "x = 2"})
    rank.take(wire.submit(need(elsewhere, "import growing.b")))
    assert importlib.import_module("growing.b").x == 2
    assert rank.notice() == ""


def test_a_module_that_is_loaded_and_has_changed_is_named_once_and_can_be_loaded_again(elsewhere, wire, rank):
    write(elsewhere, {"edited.py": "x = 1", "same.py": ""})
    source = "import edited, same"
    rank.take(wire.submit(need(elsewhere, source)))
    edited = importlib.import_module("edited")
    importlib.import_module("same")
    rank.note_loaded()
    write(elsewhere, {"edited.py": "x = 2"})
    rank.take(wire.submit(need(elsewhere, source)))
    assert "edited." in (notice := rank.notice())
    assert "same" not in notice
    assert (edited.x, rank.notice()) == (1, "")
    assert importlib.reload(edited).x == 2
    rank.note_loaded()
    write(elsewhere, {"same.py": "x = 3"})
    rank.take(wire.submit(need(elsewhere, source)))
    assert "same." in rank.notice()


def test_an_error_of_a_missing_file_says_that_only_modules_travel(elsewhere, wire, rank):
    write(elsewhere, {"reading.py": "def read(name):\n    return open(name)"})
    rank.take(wire.submit(need(elsewhere, "import reading")))
    reading = importlib.import_module("reading")
    beside = str(Path(str(reading.__file__)).with_name("table.csv"))
    for name in (beside, str(elsewhere / "table.csv")):
        error = caught(functools.partial(reading.read, name))
        rank.explain(error)
        (note,) = error.__notes__
        assert str(elsewhere / "table.csv") in note
    error = caught(lambda: reading.read("/no/such"))
    rank.explain(error)
    assert not hasattr(error, "__notes__")


def test_tracebacks_name_the_notebooks_own_files(elsewhere, wire, rank):
    write(elsewhere, {"shown.py": ""})
    rank.take(wire.submit(need(elsewhere, "import shown")))
    file = str(importlib.import_module("shown").__file__)
    assert rank.titles() == {file: str(elsewhere / "shown.py")}
    assert rank.path_here(str(elsewhere / "shown.py")) == file


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - that is asked for
        return error
    pytest.fail("it raised nothing")
