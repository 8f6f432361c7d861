"""One host's connection: SSH or this machine; bootstrap, reconnect, request, stream."""

from backend.link.bootstrap import Archive, pack_agent, pack_extractor, pack_files
from backend.link.handshakes import Handshakes
from backend.link.link import Link
from backend.link.status import HostKey, LinkState, LinkStatus
from backend.link.trouble import LinkLost, Trouble

__all__ = [
    "Archive", "Handshakes", "HostKey", "Link", "LinkLost", "LinkState", "LinkStatus", "Trouble",
    "pack_agent", "pack_extractor", "pack_files",
]  # fmt: skip
