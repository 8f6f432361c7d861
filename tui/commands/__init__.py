"""The headless twins of what the console does, one file a subject."""
