"""A chain of stages, driven on the host by a detached run of its own, so that it goes on when the console is gone."""
