"""What a run looks like: terminal table, self-contained page, JUnit, markdown.

Nothing is imported here, so that one kind of output does not pay for another.
"""
