"""Archives, and the host's cache of them: damaged, half written, read-only, raced for."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from backend.link import LinkState, pack_agent, pack_extractor, pack_files, stub
from backend.link.bootstrap import stub_source
from backend.link.start import LOADER, command_line, remote_command
from tests.fakeagent import Operator, fake_archive, here


def names(data: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(data)).namelist()


def test_archives_are_the_same_each_time_and_hold_what_the_host_needs() -> None:
    agent = pack_agent()
    assert agent == pack_agent()
    inside = names(agent.data)
    assert {"__main__.py", "pynvml.py", "backend/__init__.py", "backend/wire/lines.py"} <= set(inside)
    assert inside == sorted(inside)
    assert not [name for name in inside if "__pycache__" in name or name.startswith(("backend/link", "tui"))]
    program = zipfile.ZipFile(io.BytesIO(agent.data)).read("__main__.py")
    assert b"from backend.agent.main import main" in program
    extractor = names(pack_extractor().data)
    assert not [name for name in extractor if "agent" in name or "pynvml" in name]


def test_another_entry_brings_its_own_module() -> None:
    other = pack_agent("backend.virtual.agent", ["backend.virtual.driver"], ["--state", "/x y"])
    assert {"backend/virtual/agent.py", "backend/virtual/driver.py", "backend/virtual/__init__.py"} <= set(
        names(other.data)
    )
    assert other.argv == ["--state", "/x y"]
    assert other.sha256 != pack_agent().sha256
    with pytest.raises(FileNotFoundError, match=r"backend\.nowhere"):
        pack_agent("backend.nowhere")


def test_the_digest_here_is_the_digest_there(tmp_path: Path) -> None:
    archive = pack_files("x", {"b/a.py": b"1", "b.py": b"22", "__main__.py": b"", "b/é.py": b"3"})
    zipfile.ZipFile(io.BytesIO(archive.data)).extractall(tmp_path)
    assert stub.tree(str(tmp_path)) == archive.tree
    (tmp_path / "b" / "__pycache__").mkdir()
    (tmp_path / "b" / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert stub.tree(str(tmp_path)) == archive.tree
    (tmp_path / "json.py").write_bytes(b"a stray module that would be imported first")
    assert stub.tree(str(tmp_path)) != archive.tree


def cached(home: Path) -> Path:
    (found,) = (home / ".cache" / "eightzeros").glob("fake-*")
    return found


async def started(archive_name: str = "fake") -> str:
    """Start the tiny agent and return the folder that it runs from."""
    operator = Operator(here(), fake_archive(archive_name))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
        return str(operator.messages[0]["hello"]["at"])


def damage_file(folder: Path) -> None:
    (folder / "__main__.py").write_bytes(b"raise SystemExit('damaged')")


def stray_module(folder: Path) -> None:
    (folder / "json.py").write_bytes(b"raise SystemExit('stray')")


def half_written(folder: Path) -> None:
    (folder / ".complete").unlink()
    (folder / "__main__.py").write_bytes(b"")


def wrong_mark(folder: Path) -> None:
    (folder / ".complete").write_bytes(b"\xff\xfe")


def a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"not a folder")


@pytest.mark.parametrize("harm", [damage_file, stray_module, half_written, wrong_mark, a_file_in_its_place])
async def test_a_damaged_cache_is_mended(home: Path, harm: object) -> None:
    assert callable(harm)
    folder = Path(await started())
    assert folder == cached(home)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    harm(folder)
    assert Path(await started()) == folder
    assert sorted(os.listdir(folder.parent)) == [folder.name], "nothing is left beside it"
    assert not (folder / "json.py").exists()


async def test_a_whole_cache_is_used_and_python_keeps_its_compiled_files_there(home: Path) -> None:
    folder = Path(await started())
    before = (folder / "__main__.py").stat().st_ino
    assert Path(await started()) == folder
    assert (folder / "__main__.py").stat().st_ino == before


async def test_a_cache_that_cannot_be_written_is_done_without(home: Path) -> None:
    (home / ".cache").write_text("in the way")
    folder = Path(await started())
    try:
        assert folder.parent.name == f"eightzeros-{os.geteuid()}"
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        before = folder.stat().st_ino
        assert Path(await started()) == folder, "a reconnect finds it again and leaves no second one"
        assert folder.stat().st_ino == before
    finally:
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # it stays where another console uses it


async def test_a_host_without_room_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (Path(stub.__file__)).read_text().replace('("/tmp", "/dev/shm")', "('/proc', '/sys')")
    monkeypatch.setattr("backend.link.start.stub_source", lambda: source)
    (home / ".cache").write_text("in the way")
    operator = Operator(here())
    async with operator.watching():
        status = await operator.reaches(LinkState.REFUSED)
        assert status.code == "no-room"
        assert "/proc/eightzeros-" in status.reason


def test_a_folder_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(OSError, match="only this user may write"):
        stub.private(str(shared))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir()
    with pytest.raises(OSError, match="only this user may write"):
        stub.private(str(link))


@pytest.mark.parametrize("start", ["empty", "damaged"])
async def test_many_bootstraps_at_once_all_work(home: Path, start: str) -> None:
    if start == "damaged":
        damage_file(Path(await started()))
    folders = await asyncio.gather(*(started() for _ in range(5)))
    assert set(folders) == {str(cached(home))}
    assert os.listdir(home / ".cache" / "eightzeros") == [cached(home).name]


def test_the_stub_is_read_by_the_oldest_python_that_the_agent_runs_on() -> None:
    ast.parse(stub_source(), feature_version=(3, 8))


def test_the_loader_survives_every_login_shell_and_the_oldest_python() -> None:
    assert not set("'\"$`\\!\n") & set(LOADER)
    script = command_line(fake_archive(), "python3", "ez0")
    assert "\n" not in remote_command(script), "csh knows no newline inside quotes"
    assert len(remote_command(script)) < 16_000


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "csh", "tcsh", "ksh"])
def test_the_command_line_works_in_a_login_shell(shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    program = {"__main__.py": b"import sys; print(sys.argv[1:])"}
    archive = pack_files("it's", program, ["a b", "$HOME", "it's"])
    words = [path, "-c", remote_command(command_line(archive, sys.executable, "ez1"))]
    done = subprocess.run(words, input=archive.data, capture_output=True, timeout=30, check=True)
    assert done.stdout.split(b"\n")[:2] == [b"", b"ez1 NEED"]
    assert done.stdout.endswith(b"""['a b', '$HOME', "it's", 'agent', 'ez1']\n""")


async def test_a_python_under_the_home_is_found(home: Path) -> None:
    folder = home / "my venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").symlink_to(sys.executable)
    operator = Operator(here(python="~/my venv/bin/python3"))
    async with operator.watching():
        await operator.reaches(LinkState.LIVE)
