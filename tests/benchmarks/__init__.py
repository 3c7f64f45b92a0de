"""Ratios measured in one run, printed; nothing here is a timed test."""
