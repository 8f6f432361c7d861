"""Reading pickles without running them: opcodes, what names stand for, and the rows that come of it."""
