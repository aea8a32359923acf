"""Runs every row on this computer's GPU: `studies/few-bits/run.sh 1xh200 --out FILE`."""

from __future__ import annotations

from twin.report.few_bits import main

if __name__ == "__main__":
    main()
