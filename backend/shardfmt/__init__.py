"""The layouts of shard files as facts, shared by whoever reads them and whoever writes them.

Standard library only and Python 3.8, since the agent carries it. Nothing here opens a file.
"""
