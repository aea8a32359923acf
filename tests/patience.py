"""How long tests wait for what takes a moment: only what hangs is ended by it, no busy machine."""

from __future__ import annotations

PATIENCE_S = 300.0
