"""The program of a serve stage: it starts the host's own SGLang with the capture hook, and watches over it.

It runs on the GPU host in the Python that has SGLang, as the run's process; the server is its child. It needs the
standard library alone, so that what is wrong with that Python can be said.
"""
