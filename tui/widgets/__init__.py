"""What screens are made of: painted widgets, and the pure functions that make their rows."""
