"""A training as a run: somebody else's trainer, started as it is, its metrics read from what it prints."""
