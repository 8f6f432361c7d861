"""Other trainers' formats, written from our own shards."""
