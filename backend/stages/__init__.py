"""What each stage runs, needs, shows and leaves behind."""

from backend.stages.stages import EXTRACTOR, build_spec, requirements

__all__ = ["EXTRACTOR", "build_spec", "requirements"]
