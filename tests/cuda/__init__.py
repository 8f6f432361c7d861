"""A double of the driver's CUDA library, for tests without a GPU."""
