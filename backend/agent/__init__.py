"""The program that runs on the GPU host: standard library and pynvml only, Python 3.8 or newer."""
