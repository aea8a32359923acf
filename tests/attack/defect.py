"""What an attack reports."""


class Defect(AssertionError):
    """A broken law, with the case that shows it."""
