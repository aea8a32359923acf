"""Quantities as text in YAML, parsed once into SI base units."""

from __future__ import annotations
