"""The nvidia-smi of a virtual host: it tells of a GPU, and resets one that nobody has open, as the real one does."""

from __future__ import annotations

import sys
import time
from typing import List

from backend.agent.holders import scan
from backend.virtual.driver import VirtualDevices

RESET_S = 0.5
REFUSED = 255
TOLD = """<?xml version="1.0" ?>
<nvidia_smi_log><gpu id="%s">
<product_architecture>Hopper</product_architecture><display_active>Disabled</display_active>
<gpu_virtualization_mode><virtualization_mode>None</virtualization_mode></gpu_virtualization_mode>
</gpu></nvidia_smi_log>
"""


def main(root: str, words: List[str]) -> int:
    """Do what the words ask for and return the exit status. Persistence mode is always on here, and in nobody's way."""
    addresses = words[words.index("-i") + 1].split(",") if "-i" in words[:-1] else []
    if not addresses:
        sys.stderr.write("the virtual nvidia-smi wants -i UUID\n")
        return 2
    if "-q" in words:
        sys.stdout.write(TOLD % addresses[0])
    elif "--gpu-reset" in words:
        return _reset(root, addresses)
    else:
        sys.stdout.write("All done.\n")
    return 0


def _reset(root: str, addresses: List[str]) -> int:
    wanted = {int(one.rpartition("-")[2]) for one in addresses}
    open_ = {minor for one in scan(VirtualDevices(root)).holdings.values() for minor in one.minors}
    if wanted & open_:
        sys.stdout.write("The following GPUs could not be reset:\n  %s: In use by another client\n" % addresses[0])
        return REFUSED
    time.sleep(RESET_S)
    for address in addresses:
        sys.stdout.write("GPU %s was successfully reset.\n" % address)
    sys.stdout.write("All done.\n")
    return 0
