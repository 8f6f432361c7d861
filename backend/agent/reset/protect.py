"""Programs that a reset never signals: what keeps the host, its GPUs, or the operator's way in alive.

Known by the executable's path, which a process cannot rewrite as it can its title. Protection is by name; a
victim never is. A protected program that holds a context is spared too, and then the verdict names it: it has
to be stopped by its own means (facts: reset, section 9).
"""

from __future__ import annotations

import os
from typing import Iterable

GPU_SERVICES = (
    "nvidia-persistenced", "nv-hostengine", "dcgmi", "dcgm-exporter", "nv-fabricmanager", "nvidia-imex", "nvlsm",
    "nvidia-powerd", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-smi", "nvidia-device-plugin",
    "gpu-feature-discovery", "gpu-operator", "nvidia-bug-report.sh",
)  # fmt: skip
MONITORS = ("nvtop", "btop", "gpud", "telegraf", "node_exporter", "zabbix_agentd", "zabbix_agent2", "datadog-agent")
HOSTING = (
    "init", "sshd", "sshd-session", "sshd-auth", "dbus-daemon", "dbus-broker", "tmux", "screen", "kubelet",
    "containerd", "containerd-shim", "containerd-shim-runc-v2", "dockerd", "docker-proxy", "podman", "conmon", "crio",
    "runc", "slurmd", "slurmstepd", "slurmctld", "raylet", "gcs_server", "libvirtd", "virtqemud",
)  # fmt: skip
DISPLAYS = (
    "Xorg", "Xwayland", "X", "gnome-shell", "kwin_x11", "kwin_wayland", "plasmashell", "sway", "mutter", "gdm",
    "gdm3", "sddm", "lightdm", "Xvnc", "Xtigervnc", "nxserver.bin", "nxnode.bin", "sunshine",
)  # fmt: skip
FAMILIES = ("systemd", "nvsm", "nvidia-container", "qemu-system", "(sd-")

_KINDS = {name: kind for kind, names in (
    ("a GPU service", GPU_SERVICES), ("a monitor", MONITORS), ("the host's own", HOSTING),
    ("a display server", DISPLAYS),
) for name in names}  # fmt: skip


def protected(exe: str) -> str:
    """Return why a program is protected, in words, or an empty string where it is not."""
    name = os.path.basename(exe[: -len(" (deleted)")] if exe.endswith(" (deleted)") else exe)
    if name in _KINDS:
        return "%s is %s" % (name, _KINDS[name])
    return "%s is the host's own" % name if _starts(name, FAMILIES) else ""


def _starts(name: str, families: Iterable[str]) -> bool:
    return any(name.startswith(family) for family in families)
