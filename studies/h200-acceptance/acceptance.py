"""What an H200 has to show next to its speed; see README.md. Needs no simulator.

python studies/h200-acceptance/acceptance.py --out out/acceptance [--seconds 60] [part ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.common.acceptance import formats
from studies.common.acceptance.refusals import broken, refusal_plans, wrong_requests
from studies.common.acceptance.runs import (
    Failed,
    cancel,
    cancel_plans,
    repeat_plans,
    repeats,
    soak,
    soak_plans,
)
from studies.common.acceptance.sanitizer import NotRun, sanitize, sanitizer_plans, with_lines
from studies.common.shapes import Bench, conditions
from twin.plan.types import Plan


@dataclass(frozen=True)
class Part:
    shows: str
    plans: Callable[[], list[Plan]]  # compiled before anything runs
    run: Callable[[], dict[str, Any]]


def parts(bench: Bench, args: argparse.Namespace) -> dict[str, Part]:
    """In this order: what could leave the GPU unusable comes late."""
    return {
        "repeats": Part(
            f"five runs of {args.tokens} tokens, bitwise equal, with few slots in flight and with "
            "all",
            lambda: repeat_plans(bench, args.tokens),
            lambda: repeats(bench, args.tokens),
        ),
        "soak": Part(
            f"{args.soak_tokens} tokens without a hang",
            lambda: soak_plans(bench),
            lambda: soak(bench, args.soak_tokens, args.seconds),
        ),
        "cancel": Part(
            "another thread ends a run, which keeps its tokens",
            lambda: cancel_plans(bench),
            lambda: cancel(bench),
        ),
        "requests": Part(
            "wrong requests are refused",
            lambda: refusal_plans(bench)[:1],
            lambda: wrong_requests(bench),
        ),
        "broken": Part(
            "broken plans: named by the proof, ended by the watchdog",
            lambda: refusal_plans(bench),
            lambda: broken(bench),
        ),
        "sanitizer": Part(
            "compute-sanitizer finds nothing",
            lambda: sanitizer_plans(bench),
            lambda: sanitize(bench, args.out),
        ),
        "few-bits-repeats": Part(
            f"quantised models: five runs of {args.tokens} tokens, bitwise equal",
            lambda: list(formats.public_plans(bench, args.tokens).values()),
            lambda: formats.repeats(bench, args.tokens),
        ),
        "few-bits-fidelity": Part(
            "timed outputs as near to FP32 as weights rounded to 16 bits, or nearer",
            lambda: formats.small_plans(bench, formats.TIMED),
            lambda: formats.fidelities(bench, args.out),
        ),
        "few-bits-soak": Part(
            f"{args.soak_tokens} tokens of small models of every format and mixture",
            lambda: formats.small_plans(bench, formats.CONTEXT),
            lambda: formats.soak(bench, args.soak_tokens),
        ),
        "few-bits-sanitizer": Part(
            "compute-sanitizer finds nothing with any format or mixture",
            lambda: formats.watched_plans(bench),
            lambda: sanitize(bench, args.out / "few-bits", "formats"),
        ),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        help="repeats, soak, cancel, requests, broken, sanitizer, and of quantised models "
        "few-bits-repeats, -fidelity, -soak, -sanitizer; all unless given",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for summary.json and logs")
    parser.add_argument(
        "--device",
        choices=("cuda", "host"),
        default="cuda",
        help="host: small stand-ins, to try this script",
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="soak of the 1B shape (default %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=1000, help="of each repeated run (default %(default)s)"
    )
    parser.add_argument(
        "--soak-tokens", type=int, default=200_000, help="of the small model (default %(default)s)"
    )
    return parser.parse_intermixed_args()


def attempt(part: Part) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        outcome: dict[str, Any] = {"result": "passed", "facts": part.run()}
    except NotRun as reason:
        outcome = {"result": "not run", "why": str(reason)}
    except Failed as reason:
        outcome = {"result": "FAILED", "why": str(reason)}
    except Exception as error:  # one part must not cost the others their turn
        outcome = {
            "result": "FAILED",
            "why": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }
    return {"shows": part.shows, **outcome, "seconds": round(time.monotonic() - begun, 2)}


def main() -> int:
    args = arguments()
    bench = Bench(args.device)
    every = parts(bench, args)
    unknown = [name for name in args.parts if name not in every]
    if unknown:
        print(
            f"acceptance: no part {unknown[0]!r}; choose from {', '.join(every)}", file=sys.stderr
        )
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: part for name, part in every.items() if not args.parts or name in args.parts}
    if any(name.endswith("sanitizer") for name in chosen) and args.device == "cuda":
        os.environ |= with_lines(args.out / "cache")
    summary: dict[str, Any] = {"device": args.device, "conditions": conditions(), "parts": {}}
    bench.compile(plan for part in chosen.values() for plan in part.plans())
    for name, part in chosen.items():
        outcome = summary["parts"][name] = attempt(part)
        print(
            f"{outcome['result']:8} {name:18} {part.shows} ({outcome['seconds']:.1f} s) "
            f"{outcome.get('why', '')}".rstrip(),
            flush=True,
        )
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    results = [outcome["result"] for outcome in summary["parts"].values()]
    print(
        ", ".join(f"{results.count(result)} {result}" for result in ("passed", "FAILED", "not run"))
    )
    return int(any(result != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
