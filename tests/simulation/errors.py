"""What a simulation ends with when something that must hold does not."""


class Violation(AssertionError):
    """The message says what was broken, and whose page, request or node it was."""
