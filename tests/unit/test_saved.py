"""A save is whole or absent, loaded only if it is the user's own, and says what other ranks cannot have."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from nblaunch._errors import NblaunchError
from nblaunch.capture import saved
from nblaunch.capture.saved import SavedSession, SavedVariable


def made(path: str, number: int = 0, **fields: Any) -> SavedSession:
    variables = (
        SavedVariable("model", "sharded", "torch.nn.Linear", 8, (0, 1, 2, 3), ((2, 2),)),
        SavedVariable("mine", "own", "int", 3, (0, 1, 2, 3)),
        SavedVariable("random state of torch", "own", "torch.Tensor", 3, (0, 1, 2, 3)),
    )
    return SavedSession(path, str(number), 4, time.time(), {"torch": "2.13"}, variables, **fields)


def save(path: str, number: int = 0, **fields: Any) -> SavedSession:
    saved.begin(path, str(number))
    found = made(path, number, **fields)
    saved.commit(found)
    return found


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    written = save(
        f"{tmp_path}/s", left_out={"g": "a generator"}, environment=("A",), jobs=({"title": "cell"},)
    )
    assert saved.open_saved(f"{tmp_path}/s") == written
    assert written.whole
    assert "not saved: g: a generator" in str(written)


def test_a_save_that_was_not_ended_leaves_the_one_before(tmp_path):
    path = f"{tmp_path}/s"
    first = save(path)
    saved.begin(path, "9")
    assert saved.open_saved(path) == first
    # Killed between the two renames.
    os.rename(path, f"{path}{saved.BEFORE}-9")  # noqa: PTH104 - texts
    assert saved.open_saved(path).token == first.token
    second = save(path, 1)
    assert saved.open_saved(path) == second
    assert not first.whole
    assert os.listdir(tmp_path) == ["s"]  # noqa: PTH208 - see above


def test_what_is_no_save_is_neither_loaded_nor_replaced(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").touch()
    with pytest.raises(NblaunchError, match="is no saved session"):
        saved.open_saved(f"{tmp_path}/s")
    with pytest.raises(NblaunchError, match="is there already"):
        saved.begin(f"{tmp_path}/s", "0")
    saved.begin(f"{tmp_path}/t", "0")
    with pytest.raises(NblaunchError, match=r"t.partial-0 was begun, and is not whole"):
        saved.open_saved(f"{tmp_path}/t")


def test_a_save_of_the_same_name_that_is_being_written_elsewhere_fails_and_is_not_mixed_with_this_one(
    tmp_path,
):
    path = f"{tmp_path}/s"
    other = saved.begin(path, "0")
    (other / "rank-0.pkl").touch()
    second = save(path, 1)
    with pytest.raises(FileNotFoundError):
        saved.create(other / "rank-1.pkl")
    with pytest.raises(FileNotFoundError):
        saved.commit(made(path, 0))
    assert saved.open_saved(path) == second


def test_directories_that_are_no_saves_are_neither_replaced_nor_removed(tmp_path):
    for name in ("site", "s.before", f"s{saved.BEFORE}-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / saved.MANIFEST).write_text('{"name": "an extension"}')
    with pytest.raises(NblaunchError, match="site is there already, and is no saved session"):
        saved.begin(f"{tmp_path}/site", "0")
    save(f"{tmp_path}/s", 0)
    save(f"{tmp_path}/s", 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["s", "s.before", "s.before-mine", "site"]


def test_a_session_replaces_by_itself_only_saves_of_its_own(tmp_path):
    path = f"{tmp_path}/s"
    saved.begin(path, "0", ())
    saved.commit(made(path, 0))
    saved.begin(path, "1", {"0"})
    saved.commit(made(path, 1))
    with pytest.raises(NblaunchError, match="is another session's save by now"):
        saved.begin(path, "2", {"0"})


def test_a_link_stays_a_link_and_leads_to_the_save(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch" / "run")
    for number in range(2):
        save(f"{tmp_path}/run", number)
    assert (tmp_path / "run").is_symlink()
    assert saved.open_saved(f"{tmp_path}/run").token == "1"  # noqa: S105 - of a save
    assert [each.name for each in (tmp_path / "scratch").iterdir()] == ["run"]


def test_what_cannot_be_opened_is_said_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NblaunchError, match="cannot be read: Not a directory"):
        saved.open_saved(f"{tmp_path}/file")


def test_another_format_and_a_broken_manifest_are_refused(tmp_path):
    save(f"{tmp_path}/s")
    manifest = tmp_path / "s" / saved.MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(NblaunchError, match="format 7, and this nblaunch reads format 1"):
        saved.open_saved(f"{tmp_path}/s")
    manifest.write_text(text[:-9])
    with pytest.raises(NblaunchError, match="cannot be read: JSONDecodeError"):
        saved.open_saved(f"{tmp_path}/s")


def test_only_this_user_can_read_a_save_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        partial = saved.begin(f"{tmp_path}/s", "0")
        (partial / "sharded").mkdir()
        (partial / "sharded" / "file").touch()
        saved.commit(made(f"{tmp_path}/s"))
    finally:
        os.umask(before)
    modes = {each.stat().st_mode & 0o777 for each in (tmp_path / "s").rglob("*") if each.is_file()}
    assert ((tmp_path / "s").stat().st_mode & 0o777, modes) == (0o700, {0o600})


def test_what_others_can_write_to_or_own_or_replace_is_not_loaded(tmp_path, monkeypatch):
    path = f"{tmp_path}/s"
    save(path)
    (tmp_path / "s" / "equal.pkl").touch()
    (tmp_path / "s" / "equal.pkl").chmod(0o620)
    with pytest.raises(NblaunchError, match=r"other users can write to .*equal.pkl"):
        saved.open_saved(path)
    (tmp_path / "s" / "equal.pkl").chmod(0o600)
    tmp_path.chmod(0o777)
    for act in (saved.open_saved, lambda path: saved.begin(path, "1")):
        with pytest.raises(NblaunchError, match=f"chmod go-w {tmp_path}"):
            act(path)
    tmp_path.chmod(0o1777)
    saved.open_saved(path)
    (tmp_path / "s" / "link").symlink_to(tmp_path)
    with pytest.raises(NblaunchError, match="is a link"):
        saved.open_saved(path)
    (tmp_path / "s" / "link").unlink()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(NblaunchError, match="only your own saves are loaded"):
        saved.open_saved(path)


def test_what_another_number_of_ranks_cannot_have_is_named():
    found = made("s")
    assert saved.fit(found, 4, ()) == frozenset()
    assert saved.fit(found, 4, ["mine"]) == {"mine"}
    with pytest.raises(NblaunchError, match="--drop mine, or --drop all"):
        saved.fit(found, 6, ())
    assert saved.fit(found, 6, ["mine"]) == {"mine", "random state of torch"}
    with pytest.raises(NblaunchError, match=r"model needs a mesh like \(2, 2\)"):
        saved.fit(found, 3, ["mine"])
    assert saved.fit(found, 3, ["all"]) >= {"mine", "model"}
