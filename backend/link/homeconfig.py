"""~/.ssh/config of $HOME for an ssh that knows only the home of the password file.

OpenSSH never looks at HOME. Where the two differ (sudo, containers, tests) the configuration is copied with
its relative Includes made absolute, and passed with -F; the system's file is included at its end, as ssh
would read it.
"""

from __future__ import annotations

import glob
import os
import pwd
import re
import shlex
from pathlib import Path

DEEPEST = 16
"""OpenSSH's own limit for nested Includes (READCONF_MAX_DEPTH)."""


def passwd_home() -> str:
    """Return the home that ssh uses."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return str(Path.home())


def config_for(folder: str, system: str) -> list[str]:
    """Return the words that make ssh read $HOME's configuration; copies go to `folder`. Empty where it does
    anyway."""
    home = Path.home()
    if os.path.realpath(home) == os.path.realpath(passwd_home()):
        return []
    copy = Path(folder) / "config"
    text = _copied(home / ".ssh" / "config", home, Path(folder), 0)
    copy.write_text(f"{text}\nMatch all\nInclude {system}\n", "utf-8")
    return ["-F", str(copy)]


def _copied(path: Path, home: Path, folder: Path, depth: int) -> str:
    """Return a file's text with each Include naming copies of the files that it means."""
    try:
        text = path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    return "".join(_line(line, home, folder, depth) for line in text.splitlines(keepends=True))


def _line(line: str, home: Path, folder: Path, depth: int) -> str:
    found = re.match(r"\s*include(?:\s*=\s*|\s+)(.*)", line, re.IGNORECASE)
    if not found or depth >= DEEPEST:
        return line
    try:
        patterns = shlex.split(found.group(1), comments=True)
    except ValueError:
        return line  # ssh will say what is wrong with it
    copies = []
    for pattern in patterns:
        wanted = home / pattern[2:] if pattern.startswith("~/") else home / ".ssh" / pattern
        for source in sorted(glob.glob(str(wanted))):
            copy = folder / f"included-{len(os.listdir(folder))}"
            copy.touch()
            copy.write_text(_copied(Path(source), home, folder, depth + 1), "utf-8", "surrogateescape")
            copies.append(f'"{copy}"')
    return f"Include {' '.join(copies)}\n" if copies else "\n"
