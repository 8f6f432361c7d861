"""The agent's program on a virtual host: the same roles, with the virtual driver and its device files."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import List

from backend.agent.main import relaunch, serve
from backend.agent.seam import Machine
from backend.virtual.claims import site_path
from backend.virtual.driver import VirtualDevices, VirtualDriver
from backend.virtual.smi import main as smi


def main(argv: List[str]) -> int:
    """Play a role on the virtual host whose folder is the first word; the role is the rest."""
    if not argv:
        sys.stderr.write("eightzeros virtual agent: name the folder of the virtual host\n")
        return 2
    root = os.path.abspath(argv[0])
    words = relaunch(root, module="backend.virtual.agent")
    if argv[1:2] == ["smi"]:
        return smi(root, argv[2:])
    machine = Machine(
        partial(VirtualDriver, root), partial(VirtualDevices, root), words, virtual=True, smi=[*words, "smi"],
        host_root=site_path(root),
    )  # fmt: skip
    return serve(machine, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
