"""A stand-in for SGLang: its sources are read like the real one's, its server is a tiny HTTP server.

The environment says how it is to be: FAKE_MODE (ready, or a failure's name).
"""
