"""The GPU driver's error numbers (XIDs): what each means, the kernel log that has them, and how its lines are read."""
