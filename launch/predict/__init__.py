"""Predict before it runs: questions on code that nobody has run yet, answers scored properly."""
