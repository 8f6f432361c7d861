"""The health checklist, rule by rule (facts: reset, section 7). Each rule yields findings about one GPU's readings."""
