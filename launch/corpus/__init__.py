"""Every scenario at once: which can run, side by side, and what two such runs have in common."""
