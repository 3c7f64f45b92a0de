"""The answer at the end of a run: what was found, in text, JSON, JUnit and on a page."""
