"""What an attack raises when a law is broken."""


class Defect(AssertionError):
    """A law that one case broke; the message repeats the case."""
