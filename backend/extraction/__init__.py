"""Hidden states out of a corpus into shards, on the GPU host, in the stage's Python (3.9 or newer, numpy)."""

import os

# A tiny model is slower on two BLAS threads than on one (7.0 s against 4.6 s for 256 samples), and the
# threads would spin beside what the host is really for. It must be said before numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
