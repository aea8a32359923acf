"""The page of predictions.json and of what was measured: `python studies/server/page.py`. Run.py's
file is set next to the predictions when it is there as `measured-h200-sxm.json`, and next to that
what an H100 did, which nobody predicted.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from served import (
    RATE_GOAL,
    RUN,
    SAMPLER,
    SERVED,
    SHARE_GOAL,
    SHARE_RATE,
)

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent

FILE, MEASURED = HERE / "predictions.json", HERE / "measured-h200-sxm.json"
OTHER = HERE / "measured-h100-sxm.json"
KEPT, READ = "second turn, kept", "second turn, read"
Found = dict[str, Any]
Row = tuple[str, str, str, str, str]


def stamp() -> Stamp:
    files = [FILE, *(file for file in (MEASURED, OTHER) if file.is_file())]
    return Stamp(read(FILE)["fit"], files_digest(files))


def main() -> None:
    made, measured = read(FILE), read(MEASURED).get("models", {})
    other = read(OTHER).get("models", {})
    bodies = {
        "rows": rows_table(made, measured, other),
        "checks": checks_table({"H200": measured, "H100": other}),
    }
    write_page(HERE, stamp(), bodies, chart(made["models"], measured))


def read(file: Path) -> Found:
    found: Found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def middle(values: Sequence[float] | None) -> float | None:
    return statistics.median(values) if values else None


def sample(cell: Found, name: str) -> float | None:
    """The median of a cell's samples; None where it was not measured."""
    return middle(cell.get("samples", {}).get(name))


# ---- tables --------------------------------------------------------------------------------------


def rows_table(made: Found, measured: Found, other: Found) -> str:
    """`other`: of a GPU without predictions."""
    head = ("model", "what", "predicted", "H200", "H100", "goal")
    rows = [
        (*row[:4], next_to[3], row[4])
        for row, next_to in zip(all_rows(made, measured), all_rows(made, other), strict=True)
    ]
    return markdown_table(head, rows)


def all_rows(made: Found, measured: Found) -> list[Row]:
    share = shares(made, measured)
    return [
        row
        for name, guess in made["models"].items()
        for row in model_rows(name, guess, measured.get(name, {}), share)
    ]


def shares(made: Found, measured: Found) -> tuple[str, str]:
    """Of a core at the goal's rate: as judged, and on the line through what was measured at two
    rates. Pieces of a stream come so often a second, whatever the rate.
    """
    cells = [found.get("stream", {}).get("cpu") for found in measured.values()]
    points = [(cpu["tokens"] / cpu["wall_s"], cpu["share"]) for cpu in cells if cpu]
    judged = f"{made['judged']['share']:.0%}"
    if len(points) != 2:
        return judged, ""
    (low, least), (high, most) = sorted(points)
    return judged, f"{most + (most - least) / (high - low) * (SHARE_RATE - high):.0%}"


def model_rows(name: str, guess: Found, found: Found, share: tuple[str, str]) -> list[Row]:
    stream, engine, drawn = (found.get(cell, {}) for cell in ("stream", "engine", "sampler"))
    whole = {
        SERVED: sample(engine.get(SERVED, {}), "whole"),
        RUN: sample(engine.get(RUN, {}), "whole"),
        "server": sample(stream, "whole"),
        SAMPLER: sample(drawn.get("temperature 1", {}), "whole"),
        "still": sample(drawn.get("temperature 0", {}), "whole"),
    }
    goal = f"at least {RATE_GOAL}"
    answers = guess["answers"]
    rows = [
        (name, "engine alone, plan of `twin run`", rate(answers[RUN]), rate(whole[RUN]), ""),
        (name, "engine alone, plan of the server", rate(answers[SERVED]), rate(whole[SERVED]), ""),
        (name, "through the server", rate(answers["server"]), rate(whole["server"]), ""),
        (
            name,
            "the server, of the engine with its plan",
            f"{guess['of_engine']:.3f}",
            ratio(whole["server"], whole[SERVED]),
            goal,
        ),
        (
            name,
            "the server, of `twin run`",
            f"{guess['of_run']:.3f}",
            ratio(whole["server"], whole[RUN]),
            goal,
        ),
        *share_rows(name, guess, share),
        (
            name,
            "without --greedy, temperature 1",
            rate(guess["sampler"]),
            rate(whole[SAMPLER]),
            "",
        ),
        (name, "without --greedy, temperature 0", "", rate(whole["still"]), ""),
    ]
    return [*rows, *first_rows(name, guess, found), *turn_rows(name, guess, found)]


def share_rows(name: str, guess: Found, share: tuple[str, str]) -> list[Row]:
    """Next to the model whose rate is near the goal's."""
    if guess["answers"]["server"] < SHARE_RATE / 2:
        return []
    what = f"share of a core at {SHARE_RATE:,} tokens/s"
    return [(name, what, *share, f"at most {SHARE_GOAL:.0%}")]


def first_rows(name: str, guess: Found, found: Found) -> list[Row]:
    prompts = found.get("first token", {}).get("prompts", {})
    rows = []
    for tokens, seconds in guess["first_token_s"].items():
        cell = prompts.get(tokens, {})
        said = first_token(middle(cell.get("first_token_s")), middle(cell.get("prompt_s")))
        rows.append((name, f"first token after {int(tokens):,} tokens", ms(seconds), said, ""))
    return rows


def turn_rows(name: str, guess: Found, found: Found) -> list[Row]:
    turn, rows = guess["second_turn"], []
    for cell, seconds, kept in ((KEPT, "kept_s", turn["kept"]), (READ, "read_s", 0)):
        chats = found.get(cell, {}).get("chats", [])
        said = first_token(
            middle([one["first_token_s"] for one in chats]),
            middle([one["prompt_s"] for one in chats]),
        )
        if chats:
            said += "; kept " + ", ".join(f"{one['kept']:,}" for one in chats)
        how = "with" if cell == KEPT else "without"
        what = f"second turn, {turn['prompt']:,} tokens, {how} reuse"
        rows.append((name, what, f"{ms(turn[seconds])}; kept {kept:,}", said, ""))
    return rows


def checks_table(measured: Found) -> str:
    """What the runs checked, by GPU and model."""
    rows = [
        (
            gpu,
            name,
            word(found.get("engine", {}).get("same_text")),
            word(found.get("stream", {}).get("same_each_time")),
            steps(found),
            share_now(found.get("stream", {})),
            failures(found),
        )
        for gpu, models in measured.items()
        for name, found in models.items()
    ]
    head = (
        "GPU",
        "model",
        "the engine's text",
        "each time the same",
        "steps, server of engine",
        "share of a core",
        "failed",
    )
    return markdown_table(head, rows or [("", "no run yet", "", "", "", "", "")])


def steps(found: Found) -> str:
    """Rates by the kernel's clock: two processes' kernels need not run alike."""
    engine = found.get("engine", {}).get(SERVED, {})
    return ratio(sample(found.get("stream", {}), "kernel"), sample(engine, "kernel"))


def failures(found: Found) -> str:
    return ", ".join(cell for cell, one in found.items() if "failed" in one) or "nothing"


def word(said: bool | None) -> str:
    return "" if said is None else "yes" if said else "NO"


def rate(value: float | None) -> str:
    return f"{value:,.0f} tokens/s" if value else ""


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.3f}" if one and other else ""


def first_token(seconds: float | None, kernel_s: float | None) -> str:
    if seconds is None or kernel_s is None:
        return ""
    return f"{ms(seconds)}, {ms(kernel_s)} of them in the kernel"


def share_now(stream: Found) -> str:
    cpu = stream.get("cpu")
    if not cpu:
        return ""
    return f"{cpu['share']:.1%} at {cpu['tokens'] / cpu['wall_s']:,.0f} tokens/s ({cpu['source']})"


# ---- figure --------------------------------------------------------------------------------------


def chart(models: Found, measured: Found) -> Bars:
    """Tokens/s of whole answers, predicted and measured."""
    names: list[str] = []
    guesses: list[float] = []
    seen: list[float | None] = []
    for name, guess in models.items():
        found = measured.get(name, {})
        engine = found.get("engine", {})
        cells = (
            ("twin run", guess["answers"][RUN], engine.get(RUN, {})),
            ("engine, server's plan", guess["answers"][SERVED], engine.get(SERVED, {})),
            ("server", guess["answers"]["server"], found.get("stream", {})),
            ("server that draws", guess["sampler"], found.get("sampler", {}).get("temperature 1")),
        )
        for what, value, cell in cells:
            names.append(f"{name}, {what}")
            guesses.append(value)
            seen.append(sample(cell or {}, "whole"))
    series = (Series("predicted", tuple(guesses)), Series("measured", tuple(seen), marks=True))
    return Bars(tuple(names), series, "tokens/s of an answer of 400 tokens")


if __name__ == "__main__":
    main()
