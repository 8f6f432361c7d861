"""Files that are either whole or absent: written beside, synced, renamed."""

from __future__ import annotations

import json
import os
from typing import Any


def write_atomic(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one. Syncs file and folder."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, ".%s.%d.tmp" % (name, os.getpid()))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
    sync_folder(folder)


def write_json(path: str, record: Any) -> None:
    """Write a record as indented JSON, atomically."""
    write_atomic(path, json.dumps(record, default=vars, indent=1).encode("ascii") + b"\n")


def read_json(path: str) -> Any:
    """Read a JSON file; None where it is absent. Raises ValueError naming the file where it is no JSON."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError("%s: not JSON: %s" % (path, error)) from None


def sync_folder(folder: str) -> None:
    """Make a rename in a folder durable; a filesystem that cannot sync a folder is left alone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
