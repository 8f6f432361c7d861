"""A double of nvidia-smi on a bench: python -m tests.smi ROOT ARGUMENTS. It resets a GPU that nobody has open.

The bench's settings say how it behaves, under `smi`: {pm_rc, rc, text, silent, hold, after, virtualization,
architecture, display}. `after` are readings that a reset leaves; `silent` reports a success that changed nothing; with
`hold` it waits in the middle of a reset until the file `smi.go` is there. Each call is a line of `smi.log`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>580.1</driver_version><gpu id="00000000:1A:00.0">
<product_architecture>{architecture}</product_architecture><display_active>{display}</display_active>
<gpu_virtualization_mode><virtualization_mode>{virtualization}</virtualization_mode></gpu_virtualization_mode>
</gpu></nvidia_smi_log>
"""
IN_USE = """The following GPUs could not be reset:
  GPU 00000000:1A:00.0: In use by another client

1 device is currently being used by one or more other processes"""


class Smi:
    """One call."""

    def __init__(self, root: str, words: list[str]) -> None:
        self.root, self.words = root, words
        with open(os.path.join(root, "settings.json"), encoding="utf-8") as file:
            self.settings: dict[str, Any] = json.load(file)
        self.how: dict[str, Any] = self.settings.get("smi", {})
        with open(os.path.join(root, "smi.log"), "a", encoding="ascii") as file:
            file.write(json.dumps({"pid": os.getpid(), "words": words}) + "\n")

    def run(self) -> int:
        """Do what is asked and return the exit status."""
        addresses = self.words[self.words.index("-i") + 1].split(",")
        gpus = [int(one.removeprefix("GPU-")) for one in addresses]
        if "-q" in self.words:
            known = {"architecture": "Hopper", "display": "Disabled", "virtualization": "None"}
            print(XML.format(**{name: self.how.get(name, value) for name, value in known.items()}))
            return 0
        if "-pm" in self.words:
            return self._persistence(gpus[0], int(self.words[self.words.index("-pm") + 1]))
        return self._reset(gpus)

    def _persistence(self, gpu: int, mode: int) -> int:
        rc = int(self.how.get("pm_rc", {}).get(str(mode), 0))
        if rc == 0:
            self._set(gpu, persistence=mode)
        print("Unable to set it" if rc else "All done.")
        return rc

    def _reset(self, gpus: list[int]) -> int:
        from backend.agent.holders import scan  # the other calls do without, and there are many
        from tests.resetting import FileDevices

        held = {minor for one in scan(FileDevices(self.root)).holdings.values() for minor in one.minors}
        on = [gpu for gpu in gpus if self.settings.get("readings", {}).get(str(gpu), {}).get("persistence")]
        if held & set(gpus) or on:
            print(IN_USE)
            return 255
        while self.how.get("hold") and not os.path.exists(os.path.join(self.root, "smi.go")):
            time.sleep(0.02)
        for gpu in () if self.how.get("silent") or self.how.get("rc") else gpus:
            self._set(gpu, recovery_action=0, remapped_pending=0, **self.how.get("after", {}))
        print(self.how.get("text", "GPU 00000000:1A:00.0 was successfully reset.\nAll done."))
        return int(self.how.get("rc", 0))

    def _set(self, gpu: int, **readings: int) -> None:
        self.settings.setdefault("readings", {}).setdefault(str(gpu), {}).update(readings)
        path = os.path.join(self.root, "settings.json")
        with open(path + ".smi", "w", encoding="utf-8") as file:
            json.dump(self.settings, file)
        os.rename(path + ".smi", path)


def lay_out(root: str) -> str:
    """Make the /proc of a host on bare metal without a display, and return where it is."""
    site = os.path.join(root, "site")
    os.makedirs(os.path.join(site, "proc/self/ns"))
    os.symlink("pid:[4026531836]", os.path.join(site, "proc/self/ns/pid"))
    with open(os.path.join(site, "proc/modules"), "w", encoding="ascii") as file:
        file.write("nvidia 11460608 30 nvidia_uvm, Live 0x0 (POE)\n")
    return site


if __name__ == "__main__":
    sys.exit(Smi(sys.argv[1], sys.argv[2:]).run())
