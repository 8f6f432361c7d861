"""Watching a run that eightzeros did not start, by its folder, its log and its process."""
