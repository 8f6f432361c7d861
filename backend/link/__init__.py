"""One host's connection: SSH or this machine; bootstrap, reconnect, request, stream."""

from backend.link.status import HostKey, LinkState, LinkStatus

__all__ = ["HostKey", "LinkState", "LinkStatus"]
