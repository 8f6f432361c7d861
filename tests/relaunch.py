"""The smallest program that plays the agent's `supervise` role, under any Python."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.agent.supervisor import supervise

if __name__ == "__main__":
    assert sys.argv[1] == "supervise"
    sys.exit(supervise(sys.argv[2]))
