"""Whether the server that an extraction needs is ours and ready: asked over loopback HTTP, with a deadline."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any, Dict, List, Tuple

from backend.wire import Gate, printable

ANSWER_S = 25.0
"""A busy SGLang answers /health within a second of its next sign of life, and gives up itself after 20 s."""

PATIENCE_S = ANSWER_S + 5.0
LARGEST_BYTES = 4 << 20
HOOK = "eightzeros_capture"
"""The package of the capture hook, as it stands in a server's --forward-hooks (backend.extraction.staging)."""


def check(url: str) -> Gate:
    """Look at the server of this address and return the gate `server`."""
    name, fix = "server %s" % printable(url, 100), "launch the serve stage and wait until its run is ready"
    parts = urllib.parse.urlsplit(url)
    try:
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if parts.scheme != "http" or not host:
        return Gate(name, False, "this is no address of a server", "write http://127.0.0.1:PORT")
    try:
        status, _ = _get(host, port, "/health")
        if status != 200:
            return Gate(name, False, "it is not ready: /health answers %d" % status, fix)
        found = info(host, port)
    except (OSError, http.client.HTTPException) as error:
        why = printable(str(error), 200) or type(error).__name__
        return Gate(name, False, "no server answers there: %s" % why, fix)
    points = points_of(found)
    if points is None:
        return Gate(name, False, "it answers, but runs without our capture hook",
                    "stop it, and launch the serve stage instead")  # fmt: skip
    model = printable(str(found.get("model_path")), 200)
    return Gate(name, True, "ready: %s, capture points %s" % (model, " ".join(str(point) for point in points)))


def info(host: str, port: int) -> Dict[str, Any]:
    """Return what a server says of itself; empty where it says nothing. Raises OSError or HTTPException."""
    status, body = _get(host, port, "/server_info")
    return _parsed(body) if status == 200 else {}


def _get(host: str, port: int, path: str) -> Tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(LARGEST_BYTES)
    finally:
        connection.close()


def _parsed(body: bytes) -> Dict[str, Any]:
    try:
        info = json.loads(body)
    except ValueError:
        return {}
    return info if isinstance(info, dict) else {}


def points_of(info: Dict[str, Any]) -> Any:
    """Return the points that the server's hook of ours captures, or None where it has no such hook."""
    hooks: Any = info.get("forward_hooks")
    if isinstance(hooks, str):
        try:
            hooks = json.loads(hooks)
        except ValueError:
            return None
    for hook in hooks if isinstance(hooks, list) else []:
        if isinstance(hook, dict) and str(hook.get("hook_factory")).startswith(HOOK + "."):
            config = hook.get("config")
            found: List[Any] = list(config.get("points") or []) if isinstance(config, dict) else []
            return found
    return None
