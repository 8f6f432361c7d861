"""The prepare stage: datasets in, one shuffled corpus of token ids out, with an account of every record."""
