"""Runs that are stuck or have lost a rank: which call has no partner, and where."""
