"""Which answers of `schemas.py` are valid: judge.py SCHEMAS ANSWERS.jsonl. Needs the package
jsonschema, which is none of this project's.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path


def main(folder: Path, answers: Path) -> int:
    import jsonschema

    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    ended = [row for row in rows if row.get("ended")]
    wrong = []
    for row in ended:
        schema = json.loads((folder / row["schema"]).read_bytes())
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            errors = [
                error.message for error in validator(schema).iter_errors(json.loads(row["answer"]))
            ]
        except ValueError as error:
            errors = [f"no JSON: {error}"]
        if errors:
            wrong.append((row["schema"], errors[0][:200]))
    refused = Counter(row["refused"][:60] for row in rows if "refused" in row)
    tokens = sum(row["tokens"] for row in ended)
    print(
        f"{len(rows)} schemas: {sum(refused.values())} refused, {len(ended)} answers that ended, "
        f"{tokens} tokens, {len(wrong)} not valid; a mask: median of medians "
        f"{statistics.median(row['mask_us'] for row in ended):.0f} us, of p99 "
        f"{statistics.median(row['mask_p99_us'] for row in ended):.0f} us; compiled in "
        f"{statistics.median(row['compile_ms'] for row in ended):.1f} ms, at most "
        f"{max(row['compile_ms'] for row in ended):.0f}"
    )
    for name, why in wrong:
        print(f"  {name}: {why}")
    for why, number in refused.most_common(12):
        print(f"  refused {number}: {why}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
