"""A folder that may be deleted, held open: found below a configured root one name at a time, never through a link.

From the root on everything is done relative to open descriptors (openat, O_NOFOLLOW), so that a name which is swapped
for a link meanwhile leads nowhere.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, List, Sequence, Tuple

from backend.wire import Refused

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ENDING = ".retired"
"""A folder that is being deleted is called `.NAME.retired`, beside where it was: no reader takes half of it."""


class Place:
    """Where a folder lies: `root` (real path), `parent_fd` and `name` in it, `fd` of the folder itself.

    `path` is where it was or is, `target` where it lies now: the same, or `.NAME.retired` where `resumes` says that a
    deletion has begun.
    """

    def __init__(self, path: str, roots: Sequence[str], other_users: bool = False) -> None:
        """Open it. Raises Refused: no-roots, bad-path, outside-roots, is-root, link, mount, not-found, not-yours."""
        self.root, names = _below(path, roots)
        self.path = self.target = os.path.join(self.root, *names)
        self.resumes = self.unfinished = False
        self._fds: List[int] = []
        self.fd = self.parent_fd = -1
        try:
            self._open(names)
            self._check_owner(other_users)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of every descriptor."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _open(self, names: List[str]) -> None:
        try:
            self._fds.append(os.open(self.root, FOLDER))
        except OSError as error:
            raise Refused("bad-root", "%s: %s" % (self.root, error.strerror), "see `retire_roots`") from None
        self.mount = mount_of(self._fds[0])
        for name in names[:-1]:
            self._fds.append(self.enter(self._fds[-1], name))
        self.parent_fd, self.name = self._fds[-1], names[-1]
        aside = aside_of(self.name)
        self.unfinished = aside != self.name and _there(self.parent_fd, aside)
        if self.unfinished and not _there(self.parent_fd, self.name):
            self.name, self.unfinished = aside, False
            self.target = os.path.join(os.path.dirname(self.path), aside)
        self.resumes = self.name == aside
        self.fd = self.enter(self.parent_fd, self.name)
        self._fds.append(self.fd)

    def enter(self, parent_fd: int, name: str) -> int:
        """Open a folder in an open folder. Raises Refused where it is a link, no folder, or another mount."""
        try:
            fd = os.open(name, FOLDER, dir_fd=parent_fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Refused(
                    "link", "`%s` in %s is a link or no folder" % (name, self.path), "name the real folder"
                ) from None
            code = "not-found" if error.errno == errno.ENOENT else "forbidden"
            raise Refused(code, "%s: `%s`: %s" % (self.path, name, error.strerror)) from None
        try:
            if mount_of(fd) != self.mount:
                raise Refused(
                    "mount",
                    "`%s` in %s is a mount of its own" % (name, self.path),
                    "unmount it first: nothing is deleted through a mount",
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_owner(self, other_users: bool) -> None:
        """Refuse a root that somebody else may change at any moment, unless the host's `other_users` allows it."""
        for fd, words in ((self._fds[0], self.root), (self.parent_fd, "the folder around it")):
            owner = os.fstat(fd).st_uid
            if owner not in (os.geteuid(), 0) and not other_users:
                text = "%s belongs to uid %d, not to uid %d or root" % (words, owner, os.geteuid())
                raise Refused("not-yours", text, "let its owner delete it, or set other_users for this host")


def aside_of(name: str) -> str:
    """Return what a folder is called while it is deleted."""
    return name if name.startswith(".") and name.endswith(ENDING) else "." + name + ENDING


def mount_of(fd: int) -> Tuple[int, str]:
    """Return (device, mount id) of an open file: a bind mount has the device of what is around it, but not the id."""
    with open("/proc/self/fdinfo/%d" % fd, encoding="ascii") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return os.fstat(fd).st_dev, line.split()[1]
    raise Refused("mount", "this kernel does not tell mounts apart", "delete the folder by hand")


def same(one: Any, other: Any) -> bool:
    """Say whether two os.stat_result are of the same thing."""
    return (one.st_dev, one.st_ino, stat.S_IFMT(one.st_mode)) == (
        other.st_dev,
        other.st_ino,
        stat.S_IFMT(other.st_mode),
    )


def _there(parent_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def _below(path: str, roots: Sequence[str]) -> Tuple[str, List[str]]:
    """Return the real path of the innermost root that a path is below, and the names from there on."""
    if not roots:
        raise Refused("no-roots", "no folder of this host may be deleted from",
                      'name the folders around old caches: retire_roots = ["/data"] in [hosts.NAME]')  # fmt: skip
    whole = os.path.expanduser(path)
    if not os.path.isabs(whole) or os.path.normpath(whole) != (whole.rstrip("/") or "/"):
        raise Refused("bad-path", "`%s` is no plain absolute path" % path, "leave out `..`, `.` and doubled slashes")
    whole = os.path.normpath(whole)
    found: List[Tuple[int, str, List[str]]] = []
    for root in roots:
        said = os.path.normpath(os.path.expanduser(root))
        real = os.path.realpath(said)
        for form in {said, real}:
            if os.path.commonpath([whole, form]) == form:
                names = [name for name in whole[len(form) :].split("/") if name]
                found.append((len(real), real, names))
    if not found:
        raise Refused("outside-roots", "%s is below no root of this host" % path, "roots: " + ", ".join(roots))
    _, real, names = max(found)
    if not names or any(not rest for _, _, rest in found):
        raise Refused("is-root", "%s is a root itself" % path, "name a folder below it")
    if real == "/":
        raise Refused("bad-root", "`/` is no root to delete from", "name the folders around old caches")
    return real, names
