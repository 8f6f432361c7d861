"""The first words on the host: find or take the archive, check it, and become the agent.

This text is sent to the host and run there by Python 3.8 or newer; it imports nothing of ours.

argv: nonce, name, size of the archive, its sha256, the digest of its files, then the words for the agent. It
says one line, "NONCE word ...": HAVE, NEED (then it reads exactly `size` bytes), BAD or FAIL reason.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import stat
import sys
import tempfile
import zipfile

COMPLETE = ".complete"


def say(nonce: str, *words: str) -> None:
    """Write one line that starts with the nonce; the newline before it ends whatever a start-up file
    printed."""
    os.write(1, f"\n{nonce} {' '.join(words)}\n".encode("ascii", "replace"))


def tree(folder: str) -> str:
    """Return one digest over the names and bytes of every file, leaving out the mark and Python's own
    cache."""
    paths = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        paths += [os.path.relpath(os.path.join(root, name), folder) for name in names]
    total = hashlib.sha256()
    for path in sorted(paths):
        if path != COMPLETE:
            with open(os.path.join(folder, path), "rb") as file:
                data = file.read()
            total.update(f"{path}\n{len(data)}\n".encode() + data)
    return total.hexdigest()


def whole(folder: str, sha256: str, digest: str) -> bool:
    """Say whether a folder holds this archive, complete and undamaged."""
    try:
        with open(os.path.join(folder, COMPLETE)) as file:
            return file.read().strip() == sha256 and tree(folder) == digest
    except (OSError, UnicodeError):
        return False


def bases() -> list[str]:
    """List the folders that may hold archives, the best first: the cache, then what is lost at a reboot."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    own = f"eightzeros-{os.geteuid()}"
    return [os.path.join(cache, "eightzeros")] + [os.path.join(base, own) for base in ("/tmp", "/dev/shm")]


def private(base: str) -> None:
    """Make a folder that only we may write. Raises OSError where it is somebody else's or open to others."""
    os.makedirs(base, 0o700, exist_ok=True)
    found = os.lstat(base)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(f"{base} is not a folder that only this user may write")
    os.chmod(base, 0o700)


def receive(size: int) -> bytes:
    """Read exactly `size` bytes of standard input, leaving what follows for the agent."""
    data = b""
    while len(data) < size:
        piece = os.read(0, min(size - len(data), 1 << 16))
        if not piece:
            sys.exit(4)
        data += piece
    return data


def unpack(base: str, folder: str, data: bytes, sha256: str, digest: str) -> None:
    """Unpack beside and rename. Where another bootstrap was first, its folder is used; a damaged one makes
    way."""
    private(base)
    temporary = tempfile.mkdtemp(prefix=".unpacking-", dir=base)
    lock = os.open(base, os.O_RDONLY)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(temporary)
        with open(os.path.join(temporary, COMPLETE), "w") as file:
            file.write(sha256 + "\n")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a network filesystem without locks: the renames alone leave a window of microseconds
        if not whole(folder, sha256, digest):
            if os.path.lexists(folder):
                os.rename(folder, os.path.join(temporary, ".damaged"))
                os.rename(temporary, folder)
                damaged = os.path.join(folder, ".damaged")
                shutil.rmtree(damaged) if os.path.isdir(damaged) else os.unlink(damaged)
            else:
                os.rename(temporary, folder)
        if not whole(folder, sha256, digest):
            raise OSError(f"{folder} does not hold what was written to it")
    finally:
        os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)


def find(folders: list[tuple[str, str]], sha256: str, digest: str) -> str:
    """Return the first folder that holds this archive and that nobody else may write, or an empty text."""
    for base, folder in folders:
        try:
            if whole(folder, sha256, digest):
                private(base)
                return folder
        except OSError:
            continue
    return ""


def take(folders: list[tuple[str, str]], data: bytes, sha256: str, digest: str) -> tuple[str, list[str]]:
    """Unpack to the first place that can be written. Returns it, or an empty text and what was in the way."""
    problems = []
    for base, folder in folders:
        try:
            unpack(base, folder, data, sha256, digest)
            return folder, []
        except OSError as error:
            problems.append(str(error))
    return "", problems


def main(nonce: str, name: str, size: int, sha256: str, digest: str, words: list[str]) -> None:
    """Find or take the archive, and become the agent."""
    folders = [(base, os.path.join(base, f"{name}-{sha256[:16]}")) for base in bases()]
    found = find(folders, sha256, digest)
    if found:
        say(nonce, "HAVE")
    else:
        say(nonce, "NEED")
        data = receive(size)
        if hashlib.sha256(data).hexdigest() != sha256:
            say(nonce, "BAD")
            sys.exit(5)
        found, problems = take(folders, data, sha256, digest)
        if not found:
            say(nonce, "FAIL", "; ".join(problems))
            sys.exit(6)
    os.execv(sys.executable, [sys.executable, "-E", "-s", "-S", found, *words])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:])
