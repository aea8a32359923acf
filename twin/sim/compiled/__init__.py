"""The machine of twin.sim in C++ (native/simulator): the same events in the same order over flat
arrays. SimPy stays the reference.
"""

from twin.sim.compiled.library import load
from twin.sim.compiled.outcome import run

__all__ = ["load", "run"]
