"""What an attack raises where a law is broken."""


class Defect(AssertionError):
    """A law that one case broke; the message says the case so that it can be repeated."""
