"""A host without a GPU that behaves like one, for the demo and the tests: everything below the driver is real."""
