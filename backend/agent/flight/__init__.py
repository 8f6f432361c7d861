"""The flight record of a host: telemetry, progress and events, kept while runs live and bounded on disk."""
