"""The words of plans and results, one plain line each: for --help, for pages, and for
docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WORDS = {
    "step": "all work for one more token of each sequence: every weight of the model is read once",
    "stage": "a part of a step that all blocks do together: a matrix, attention, the choice "
    "of a token",
    "block": "a group of threads that stays on one SM, CU or core for the whole generation and "
    "does its share of each stage",
    "rank": "a GPU's share of the model, or a lane's",
    "lane": "a part of a model with delayed tensor parallelism: it uses what other lanes made some "
    "layers ago",
    "ring": "the shared memory of a block into which its weights stream ahead of their use",
    "slot": "a piece of the ring that one copy from memory fills",
    "hand-off": "a block waits for what other blocks of its GPU made in the stage before",
    "collective": "a block waits for what another GPU or lane made",
    "streaming": "a block waits for weights that are on their way from memory",
    "consumer": "a block's threads compute with weights that have arrived: arithmetic is slower "
    "than the stream there",
    "attention": "a block reads the cache of earlier tokens and computes with it",
    "routing": "a block waits until it is known which experts a token uses",
    "launch": "the GPU starts a kernel, where a step has more than one",
    "sampling": "the next token is chosen",
    "other": "the rest: looking up the embedding, steps' ends",
    "critical path": "the chain of work and waits that decides how long a step takes; each piece "
    "of it has one of these causes",
    "ceiling": "the rate at which a device really reads its memory: measured, published or assumed",
    "floor": "the time of a step that only reads the bytes of its plan, at the ceiling",
    "floor of the model": "the same with each byte read once, whatever the plan: no engine is "
    "faster",
    "stream fraction": "floor divided by the step's time",
    "MBU": "model bandwidth utilisation: the same with the datasheet's bandwidth instead of the "
    "ceiling",
    "p10-p90": "eight of ten lie in this range: held-out engine runs most like it, or draws of "
    "the uncertain hardware numbers",
    "measured": "timed on the hardware that is named",
    "fitted": "chosen so that simulated probes take as long as measured ones; other values "
    "would not do",
    "unbound": "stands in a fit, but the probes hardly determine it: a report lists it with the "
    "assumed ones",
    "held out": "an engine run that no number was fitted to: predicted and then timed, it gives "
    "the twin's error",
    "predicted": "simulated, not timed",
    "assumed": "nobody measured this number: a prediction that rests on it is no better than it is",
}
OF_THE_CODE = {
    "thread": "one of a block's: 32 or 64 make a warp of a GPU; on a CPU one of the operating "
    "system's",
    "loader": "a warp that brings a block's stream, and on NVIDIA cached keys and values, "
    "into the ring",
    "scheduler warp": "the warp that makes a block's resets, sums late parts, hands out tokens and "
    "looks for the end; without one, stages do",
    "stream": "a block's weights on their way from memory, in plan order; `execution=stream` and "
    "`launch.stream_s` mean CUDA's",
    "residual": "the vector to which each layer adds what it makes; with hyper-connections there "
    "are several",
    "late part": "what another lane published some layers ago and is added now",
    "REDUCE": "a stage in which each block sums its own elements: late parts (`Stage.late`), or "
    "its slice of a sliced residual",
    "pass": "the weights of all layers, once, for the tokens of a chunk",
    "chunk": "the tokens of a prompt that one pass reads",
    "entry": "a token of a chunk and one of the experts that it chose; of compressed attention, "
    "a key and value of some positions together",
    "round": "a pass that verifies drafts; of tiles, a row group of each of a block's teams",
    "batch of rows": "rows of an expert that a block multiplies together in a pass",
    "vector load": "neighbouring elements that one thread loads or stores together",
    "slice": "of a matrix's columns: what a team of warps takes; with more slices than teams it "
    "takes several in turn",
    "unit": "what a number is counted in: seconds, bytes, 16 bytes of a stream, a machine's "
    "chips, a matrix's rows for one element",
    "run": "the engine, timed under recorded conditions and kept in calibration/runs; what is only "
    "simulated is no run",
    "prove": "to show, before anything runs it, that a plan computes its model and neither races "
    "nor hangs (`twin.proof`)",
    "validate": "to compare predictions with runs to which nothing was fitted (`twin validate`)",
}
OF_A_PLAN = ("block", "stage", "rank", "lane", "ring", "slot", "hand-off", "collective", "floor")
OF_A_RESULT = (
    "floor",
    "floor of the model",
    "stream fraction",
    "MBU",
    "streaming",
    "consumer",
    "hand-off",
    "collective",
    "attention",
    "launch",
    "block",
    "ring",
)
OF_A_PAGE = tuple(
    word for word in WORDS if word not in ("measured", "fitted", "unbound", "held out")
)


def lines(words: Sequence[str]) -> str:
    """For --help, below what a command does."""
    return "\n\nWords:\n\n" + "\n".join(f"- {word}: {WORDS[word]}" for word in words)


def glossary() -> str:
    """docs/glossary.md."""
    head = (
        "# Glossary\n\nGenerated by `make generated` from twin/report/words.py: `--help` and "
        "reports use the same lines.\n\n"
    )
    code = "## In the code and its documents\n\nA word has one of these meanings, and no other.\n\n"
    return f"{head}{_table(WORDS)}\n{code}{_table(OF_THE_CODE)}"


def _table(words: Mapping[str, str]) -> str:
    return "| word | meaning |\n|---|---|\n" + "".join(
        f"| {word} | {meaning} |\n" for word, meaning in words.items()
    )


if __name__ == "__main__":
    print(glossary(), end="")
