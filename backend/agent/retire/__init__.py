"""Deleting an old cache: by a plan that was confirmed, only below configured roots, never through a link or a mount."""
