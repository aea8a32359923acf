"""Attack plans, engines, machines, files and command lines for as long as you like:
`python -m tests.attack --seconds 3600`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.attack.runner import Case, Tally, attacks, run, run_case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"some of {', '.join(attacks())}; all without it"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help="how long (default: 60, unless --cases says how many)",
    )
    parser.add_argument("--cases", type=int, default=None, help="of each attack")
    parser.add_argument(
        "--seed", type=int, default=None, help="default: the time, so that every run tries others"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="processes side by side (default: one a core)",
    )
    parser.add_argument(
        "--case", metavar="NAME:SEED:NUMBER", help="repeat one case, in this process"
    )
    chosen = parser.parse_args()
    if chosen.case:
        return repeat(chosen.case)
    names = chosen.only.split(",") if chosen.only else attacks()
    if unknown := set(names) - set(attacks()):
        parser.error(f"no attack {', '.join(sorted(unknown))}; there are {', '.join(attacks())}")
    seed = chosen.seed if chosen.seed is not None else int(time.time())
    seconds = chosen.seconds if chosen.seconds is not None or chosen.cases else 60.0
    tallies = run(
        names,
        seed=seed,
        jobs=chosen.jobs,
        seconds=seconds,
        cases=chosen.cases,
        first=chosen.first,
        tell=progress,
    )
    for name, tally in tallies.items():
        outcomes = ", ".join(
            f"{count} {outcome}" for outcome, count in tally.outcomes.most_common()
        )
        print(
            f"{name} (seed {seed}): {outcomes}; slowest {tally.slowest_s:.1f} s, largest "
            f"{tally.largest_bytes / 1e6:.0f} MB"
        )
        for case, what in tally.defects:
            print(f"  {case}: {what}")
    return int(any(tally.defects for tally in tallies.values()))


def repeat(text: str) -> int:
    attack, seed, number = text.split(":")
    with tempfile.TemporaryDirectory() as folder:
        report = run_case(Case(attack, int(seed), int(number)), Path(folder) / "case")
    print(report.defect or report.outcome)
    return int(report.defect is not None)


def progress(tallies: dict[str, Tally]) -> None:
    words = ", ".join(
        f"{name} {sum(t.outcomes.values())} ({len(t.defects)} defects)"
        for name, t in tallies.items()
    )
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
