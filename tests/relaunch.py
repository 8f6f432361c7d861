"""The smallest program that plays the agent's `supervise` role, for tests that start runs."""

from __future__ import annotations

import sys

from backend.agent.supervisor import supervise

if __name__ == "__main__":
    assert sys.argv[1] == "supervise"
    sys.exit(supervise(sys.argv[2]))
