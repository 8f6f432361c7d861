"""The layouts in which shards are written for trainers."""
