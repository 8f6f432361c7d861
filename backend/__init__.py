"""Everything of eightzeros without a screen."""
