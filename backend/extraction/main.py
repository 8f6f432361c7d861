"""The extractor's program: its first word is what to do. Without one it extracts, as it always did."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Do what the first word says, and return the exit code."""
    word = argv[0] if argv else ""
    if word == "prepare":
        from backend.extraction.prepare.main import main as prepare

        return prepare(argv[1:])
    if word == "export":
        from backend.extraction.export import main as export

        return export(argv[1:])
    if word == "serve":
        from backend.extraction.serving.serve import main as serve

        return serve(argv[1:])
    from backend.extraction.extract import main as extract

    return extract(argv[1:] if word == "extract" else argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
