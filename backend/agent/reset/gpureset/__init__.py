"""Resetting a GPU by its driver: an explicit step with preconditions, never automatic, never twice for one fault."""
