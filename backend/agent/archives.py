"""Programs that the console sends to the host beside the agent: whole, checked, unpacked once."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from typing import Dict, Optional

from backend.agent.paths import cache_dir
from backend.wire import Refused

COMPLETE = ".complete"
"""Written last into an unpacked folder; it holds the archive's digest."""

LARGEST_BYTES = 16 << 20


def folder(name: str, sha256: str) -> str:
    """Return where an archive lies, or would lie, unpacked. Raises Refused on a name or digest that is none."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise Refused("bad-request", "no archive is called `%s` with the digest `%s`" % (name, sha256))
    return os.path.join(cache_dir(), "%s-%s" % (name, sha256[:16]))


def have(name: str, sha256: str) -> Optional[Dict[str, str]]:
    """Return where an archive lies unpacked, or None where it must be sent."""
    place = folder(name, sha256)
    try:
        with open(os.path.join(place, COMPLETE), encoding="ascii") as file:
            return {"path": place} if file.read().strip() == sha256 else None
    except (OSError, UnicodeDecodeError):
        return None


def put(name: str, sha256: str, size: int, offset: int, data: str) -> Optional[Dict[str, str]]:
    """Take one piece (base64, in order). Returns the folder once the last piece made it whole, else None.

    A piece at offset 0 starts anew. Raises Refused where pieces are out of order or the digest is wrong.
    """
    place = folder(name, sha256)
    if not 0 < size <= LARGEST_BYTES:
        raise Refused("bad-request", "an archive of %d bytes is not taken" % size)
    partial = place + ".part"
    try:
        piece = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise Refused("bad-request", "the piece is no base64: %s" % error) from None
    with open(partial, "ab" if offset else "wb") as file:
        if file.tell() != offset:
            raise Refused("out-of-order", "expected the piece at %d, got %d" % (file.tell(), offset))
        file.write(piece)
        held = file.tell()
    if held < size:
        return None
    with open(partial, "rb") as file:
        if held != size or hashlib.sha256(file.read()).hexdigest() != sha256:
            os.unlink(partial)
            raise Refused("bad-digest", "the archive `%s` arrived damaged" % name, "try again")
    _unpack(partial, place, sha256)
    os.unlink(partial)
    return {"path": place}


def _unpack(archive: str, place: str, sha256: str) -> None:
    """Unpack beside and rename, so that a folder is whole or absent; a damaged older one makes way."""
    temporary = tempfile.mkdtemp(prefix=".unpacking-", dir=os.path.dirname(place))
    try:
        with zipfile.ZipFile(archive) as file:
            file.extractall(temporary)
        with open(os.path.join(temporary, COMPLETE), "w", encoding="ascii") as mark:
            mark.write(sha256 + "\n")
        if os.path.isdir(place):
            shutil.rmtree(place)
        os.rename(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
