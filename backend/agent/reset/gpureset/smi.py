"""nvidia-smi: the one program that can reset a GPU, and what it says of one.

It is never killed: ending a client inside the driver has hung GPUs (facts: monitors, dcgm#84). One that does not end
in its time is left, and said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple
from xml.etree import ElementTree

from backend.wire import printable

QUERY_S = 30.0
SETTING_S = 60.0
"""Without persistence mode the driver initialises each GPU first."""

RESET_S = 120.0
"""Facts: reset, section 7."""

OUTPUT_MOST = 4000
_left: List["subprocess.Popen[bytes]"] = []
"""Those that have not ended in their time: kept, so that Python reaps them in peace."""


class Said(NamedTuple):
    """How it ended and what it printed; `rc` None where it has not ended in its time."""

    rc: Optional[int]
    text: str


def find(words: Sequence[str]) -> List[str]:
    """Return the words with the program's whole path; nothing where there is none."""
    path = shutil.which(words[0]) if words else None
    return [path, *words[1:]] if path else []


def call(argv: Sequence[str], limit_s: float, output: str, inherited: Tuple[int, ...] = ()) -> Said:
    """Run it in a session of its own, its output in a file, so that it ends well even where its caller is killed.

    `inherited` are open locks, which then last as long as it does. Raises OSError where it cannot be started.
    """
    with open(output, "ab") as file:
        began = file.tell()
        child = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, pass_fds=inherited
        )
    try:
        rc: Optional[int] = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        rc = None
        _left.append(child)
    with open(output, "rb") as file:
        file.seek(began)
        text = file.read(OUTPUT_MOST).decode("utf-8", "replace")
    return Said(rc, printable(" ".join(text.split()), OUTPUT_MOST))


def query(words: Sequence[str], address: str) -> Tuple[Dict[str, str], str]:
    """Ask what one GPU is: {architecture, virtualization, display}, each empty where it does not say, and why it could
    not be asked."""
    argv = find(words)
    if not argv:
        return {}, "there is no nvidia-smi on this host"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "out")
        try:
            said = call([*argv, "-q", "-x", "-i", address], QUERY_S, path)
            with open(path, "rb") as file:
                text = file.read()
        except OSError as error:
            return {}, "nvidia-smi could not be started: %s" % (error.strerror or error)
    if said.rc is None:
        return {}, "nvidia-smi -q has not ended within %.0f s" % QUERY_S
    if said.rc:
        return {}, "nvidia-smi -q ended with %d: %s" % (said.rc, said.text[:200])
    try:
        gpu = ElementTree.fromstring(text).find("gpu")
    except ElementTree.ParseError as error:
        return {}, "nvidia-smi -q -x said no XML: %s" % error
    if gpu is None:
        return {}, "nvidia-smi -q -x named no GPU"
    paths = {"architecture": "product_architecture", "display": "display_active",
             "virtualization": "gpu_virtualization_mode/virtualization_mode"}  # fmt: skip
    return {name: (gpu.findtext(path) or "").strip() for name, path in paths.items()}, ""
