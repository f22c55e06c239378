"""When flash-attn-4 is told to keep compiled kernels on disk, and where."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from prefixtree.kernels.attention.flash import disk_cache
from prefixtree.kernels.attention.flash.disk_cache import ENABLED, FOLDER, keep_on_disk, own_folder


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is set, flash-attn-4 is not imported, temporary files are the test's."""
    for name in (ENABLED, FOLDER):
        # so that both are put back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, disk_cache._READS_THEM, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_is_on_in_a_folder_of_the_user(tmp_path: Path) -> None:
    keep_on_disk()
    assert os.environ[ENABLED] == "1"
    folder = Path(os.environ[FOLDER])
    assert tmp_path in folder.parents and folder.is_dir()
    assert folder.stat().st_mode & 0o077 == folder.parent.stat().st_mode & 0o077 == 0
    assert own_folder() == folder


def test_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, "/elsewhere")
    keep_on_disk()
    assert os.environ[ENABLED] == "1" and os.environ[FOLDER] == "/elsewhere"
    monkeypatch.setenv(ENABLED, "0")
    monkeypatch.delenv(FOLDER)
    keep_on_disk()
    assert os.environ[ENABLED] == "0" and FOLDER not in os.environ
    # it read them, whatever they were
    monkeypatch.delenv(ENABLED)
    monkeypatch.setitem(sys.modules, disk_cache._READS_THEM, ModuleType("imported"))
    keep_on_disk()
    assert ENABLED not in os.environ


@pytest.mark.parametrize("which", ["prefixtree", "flash-attn-4"])
def test_no_code_is_loaded_from_where_others_write(tmp_path: Path, which: str) -> None:
    folder = tmp_path / f"prefixtree-{os.getuid()}" / "flash-attn-4"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    folder.parent.chmod(0o700)
    (folder.parent if which == "prefixtree" else folder).chmod(0o777)
    keep_on_disk()
    assert ENABLED not in os.environ and FOLDER not in os.environ


def test_nor_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "flash-attn-4").mkdir(parents=True)
    (tmp_path / f"prefixtree-{os.getuid()}").symlink_to(tmp_path / "real")
    assert own_folder() is None


def test_without_a_folder_kernels_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    keep_on_disk()
    assert ENABLED not in os.environ
