"""The XIDs of a reset or verification: gathered from two sources, put down to whom they belong, and weighed."""
