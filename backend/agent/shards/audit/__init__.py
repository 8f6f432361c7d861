"""Looking at every shard of a folder before it goes to training: each file, and all of them together."""
