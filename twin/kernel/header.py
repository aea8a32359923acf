"""The C++ that is generated from a plan: enums, table structs, sizes, and (for devices) the tables
themselves.

Only the types of weights and cache, the head size and tracing are compiled in for the host, so that
plans share binaries; a device build embeds everything as constants.
"""

from __future__ import annotations

import ctypes
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np

from twin.kernel import experts
from twin.kernel.draft_head import FIELDS as DRAFT_FIELDS
from twin.kernel.fields import CODED_FIELDS, FIELDS, FLOATS, STAGE_EXTRAS
from twin.kernel.prompt import OTHER_COLUMNS, ROUND_PARTS
from twin.kernel.runs import runs
from twin.kernel.sizes import OTHER
from twin.kernel.tables import Layout, layout
from twin.kernel.traits import (
    SHAPE_FIELDS,
    SHAPES,
    TRAITS,
    Constant,
    codes,
    shapes,
    traits,
)
from twin.models.spec import DType
from twin.models.variant import Activation
from twin.plan.catalogue import ALWAYS, INPUTS, StageKind
from twin.plan.options import HandOffKind, Options, Sampling
from twin.plan.types import Parts, Plan

MAX_RANKS = 16
# an exchanged word that is not yet written: a NaN that no arithmetic here produces
SENTINEL_WORD = 0xFFFFFFFF
PASS_BARRIER = -2  # Control.hung_value: blocks meet after every stage of a prompt pass
# Control.hung_value: GPUs meet before the first stage, hung_part is late; where that is the waiting
# one itself, its block hung_element
START_BARRIER = -3
LOGITS_TAKEN = -4  # Control.hung_value: the host takes logits before their row is written again
BIAS_GIVEN = -5  # Control.hung_value: the host gives what is added to a token's logits
CONSTANT_BYTES = 60 << 10  # of 64 KiB on NVIDIA's GPUs; the launch's arguments lie in another bank
# Rows of a table that is an array. Compilers look through an array, not through an object with one:
# of "does this reset concern the step before?" they make "is it the second one?". Larger tables
# would take them longer, and are objects.
MOST_LISTED = 4096
BY_ROW = {"Span", "SpanRow"}  # structs whose fields follow each other in a table's words
# What plans without the like have nothing to say of; constants of the kernel then.
ABSENT_FIELDS = dict.fromkeys(STAGE_EXTRAS, -1) | dict.fromkeys(
    ("heads", *CODED_FIELDS, *experts.FIELDS, *experts.CODED_FIELDS), 0
)
ABSENT_SIZES = (
    *("residuals", "choice", "kept", "channels", "scored", "held", "whole", "whole_units"),
    *(f"prompt_{name}" for name in OTHER_COLUMNS),
    *("drafts", "round_stages", "round_splits", "round_counter", "handed_on"),
    *(f"round_{name}" for name in ROUND_PARTS),
    *DRAFT_FIELDS,
    *(f"other_{name}" for name in (*OTHER, "kv_items", "scan_heads", "cache_tile", "tensor_scan")),
    *(
        f"{name}_{what}"
        for name in INPUTS
        if name not in ALWAYS
        for what in ("cols", "tile", "vector", "team", "ahead_chunks", "ahead_groups")
    ),
)


class Status(Enum):
    """How a run of the kernel stands, written by the device."""

    RUNNING = "running"
    LENGTH = "length"  # all steps done
    STOP = "stop"  # a stop token was generated
    HUNG = "hung"  # a wait outlived the watchdog
    NO_TOKEN = "no_token"  # the largest logit is not finite


ENUMS: dict[str, type[Enum]] = {  # by their names in C++
    "StageKind": StageKind,
    "Parts": Parts,
    "HandOff": HandOffKind,
    "Type": DType,
    "Status": Status,
    "Gate": Activation,
}

_C_TYPES = {
    "int": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}

RANK_FIELDS = (  # the memory of one rank; every rank's kernel sees all of them
    ("const u8*", "stream"),  # [blocks] weight streams, each from a page border
    ("const u8*", "embedding"),  # [vocab][hidden]
    ("const float*", "constants"),
    ("float*", "exchange"),  # [buffers][copies][parts][elements]
    ("u32*", "counters"),  # one per 128-byte line
    ("u8*", "kv"),  # [attention stages][items][k, v][item_positions][head_dim]
    # [2][blocks][logits_buffer_floats] what each block makes of its logits, the full sampler's
    ("float*", "logits_buffers"),
    # one kernel per stage, GPUs: [blocks][state_floats] kept between kernels, else null
    ("float*", "state"),
    # what the tokens of a chunk hand from stage to stage in a prompt pass, [prompt_floats]
    ("float*", "prompt"),
)

REQUEST_FIELDS = (  # what to generate, constant while the kernel runs
    ("int", "read"),  # positions before the first step: what is kept, and what passes read
    ("int", "kept"),  # of them, whose keys and values an earlier run left in the cache
    ("int", "forced"),  # tokens of the prompt that steps read
    ("int", "steps"),  # most steps of this run
    ("int", "every_position"),  # compute the LM head for every prompt position
    ("int", "stop_count"),
    ("u64", "watchdog_ns"),  # most that one wait may take
    ("u64", "seed"),
    ("double", "top_p"),
    ("float", "temperature"),  # 0: greedy
    ("int", "top_k"),  # 0: all
    # all blocks look here whether to leave; a GPU's lies in its own memory: a look across the bus
    # takes 1 us
    ("int*", "abort"),
    ("const int*", "chunks"),  # [read]
    ("u64*", "pass_stamps"),  # [passes] ns at the end of each prompt pass, rank 0 block 0
    ("const int*", "prompt"),  # [forced]
    ("const int*", "stop"),  # [stop_count]
    ("int*", "tokens"),  # [steps] generated
    ("u64*", "stamps"),  # [steps] ns at the end of each step, rank 0 block 0
    ("u64*", "block_stamps"),  # probes: [steps][ranks][blocks]
    ("float*", "checksums"),  # probes: [ranks][blocks]
    # [steps][vocab], or [logit_rows][vocab], of the steps that compute them, or null
    ("float*", "logits"),
    ("u64*", "trace"),  # [steps][ranks][blocks][stages][inputs ready, finished] in ns, or null
)

# The same for kernels that draw; in those of greedy GPU plans they are constants of zero, so that
# there is no code for them.
DRAWING_FIELDS = (
    ("double", "margin"),  # logits further below the best one are not drawn; infinity: all may be
    ("int", "logit_rows"),  # used in turn, each once the host has taken it; 0: each step has one
    ("int", "bias_rows"),  # 0: none; 1: the same for each token; 2: in turn
    # [bias_rows][vocab] added to the logits of a generated token; under a repetition penalty the
    # lowest bit of a word says that its token was there before
    ("const float*", "bias"),
    ("float", "repetition"),  # such logits are divided by it, or multiplied if not above 0; 1: none
)

# The same for kernels that draft; in all others a constant of zero. A number of eight bytes comes
# first: C++ puts a shorter one where the fields before are filled up, ctypes behind.
DRAFTING_FIELDS = (
    # for timing: so many tokens a pass count on average, whatever the model says; 0: what it says
    ("double", "accepted"),
    ("int", "drafts"),  # tokens drafted at most before each pass; 0: tokens come from steps
)

CONTROL_FIELDS = (  # what changes while it runs
    ("u64", "started"),  # ns
    ("int", "abort"),  # by the host: cancelled; by the device: failed. All blocks leave.
    ("int", "emitted"),  # generated tokens that the host may read
    ("int", "status"),
    ("int", "hung_rank"),  # the first wait that outlived the watchdog
    ("int", "hung_block"),
    ("int", "hung_stage"),
    # -1: the grid barrier; -2: the barrier of prompt pass hung_part; -3: the start of several
    # GPUs; -4: the host, which has not taken logits; -5: the host, which has not given a bias
    ("int", "hung_value"),
    ("int", "hung_part"),
    ("int", "hung_element"),  # -1: a counter
    ("int", "hung_step"),
    ("int", "taken"),  # by the host: generated tokens whose logits it has taken
    ("int", "biased"),  # by the host: rows of the bias that it has given, without the first one
)


def _mirror(fields: tuple[tuple[str, str], ...]) -> list[tuple[str, Any]]:
    return [
        (field, ctypes.c_void_p if kind.endswith("*") else _C_TYPES[kind]) for kind, field in fields
    ]


class RankMemory(ctypes.Structure):
    """The memory of one rank, as C++ sees it."""

    _fields_ = _mirror(RANK_FIELDS)


class GreedyRequest(ctypes.Structure):
    """What to generate, as kernels see it that were compiled for a greedy plan."""

    _fields_ = _mirror(REQUEST_FIELDS)


class Request(GreedyRequest):
    """What to generate, as all others see it."""

    _fields_ = _mirror(DRAWING_FIELDS)


class DraftingRequest(Request):
    """What to generate, as kernels see it that verify drafts."""

    _fields_ = _mirror(DRAFTING_FIELDS)


def request_of(options: Options) -> type[GreedyRequest]:
    """What a GPU's kernel of such a plan takes."""
    if options.lookup:
        return DraftingRequest
    return Request if options.draws else GreedyRequest


class Control(ctypes.Structure):
    """What changes while the kernel runs, as C++ sees it."""

    _fields_ = _mirror(CONTROL_FIELDS)


def header(plan: Plan, *, embedded: bool = True, trace: bool = False) -> str:
    """The header that the kernel is compiled with: the same text for the same plan, and the same
    names for every plan.

    Without `embedded` the tables and sizes are read from `tables.image` at run time.
    """
    made = layout(plan)
    own = plan.attention
    structs = {struct: table for table, (struct, _) in FIELDS.items()}  # one table of several alike
    constants = {
        "MAX_RANKS": MAX_RANKS,
        "HEAD_DIM": own.head_dim if own else 1,
        "GROUP": own.group if own else 1,
        "TRACE": trace,
        "CODED": plan.coded,
        # elements of a row that a GPU's thread has at once
        "CODED_PACK": max(m.pack for stage in plan.stages for m in stage.matrices)
        if embedded and plan.coded
        else 0,
    }
    parts = [
        "// Generated by twin/kernel/header.py; do not edit.\n#pragma once\n\nnamespace twin {\n",
        *(_enum(name, kind) for name, kind in ENUMS.items()),
        f"constexpr Type WEIGHT = Type::{plan.options.weight_dtype.name};",
        f"constexpr Type KV = Type::{plan.options.kv_dtype.name};",
        *(f"constexpr {_kind(v)} {name} = {_literal(v)};" for name, v in constants.items()),
        *(f"constexpr u32 {name} = {value}u;" for name, value in codes(plan, embedded).items()),
        "",
        *(_trait(name, members) for name, members in traits(plan).items()),
        *(_shape(*shape) for shape in _shapes(plan, made, embedded).items()),
        *(_struct(made, name, table) for name, table in structs.items()),
        _memory("RankMemory", RANK_FIELDS, RankMemory),
        _request(plan.options, embedded),
        _memory("Control", CONTROL_FIELDS, Control),
        _embedded(made) if embedded else _loaded(made),
        "}  // namespace twin\n",
    ]
    return "\n".join(parts)


def _trait(struct: str, members: Mapping[str, Constant]) -> str:
    body = "\n".join(
        f"  static constexpr {_kind(value)} {name} = {_literal(value)};  // {why}"
        for (name, value), (_, why) in zip(members.items(), TRAITS[struct].values(), strict=True)
    )
    return f"struct {struct} {{\n{body}\n}};\n"


def _shapes(plan: Plan, made: Layout, embedded: bool) -> dict[str, dict[str, int]]:
    """What all stages of chosen experts have in common, for a device's loaders."""
    if not embedded:
        return dict.fromkeys(SHAPES, dict.fromkeys(SHAPE_FIELDS, 0))
    return shapes(plan, made.stages, made.stage_fields)


def _shape(struct: str, fields: Mapping[str, int]) -> str:
    return f"struct {struct} {{\n{_members(fields)}\n}};\n"


def _members(constants: Mapping[str, int | float]) -> str:
    """Members that are known when the kernel is compiled."""
    return "\n".join(
        f"  static constexpr {_type(name)} {name} = {_number(name, value)};"
        for name, value in constants.items()
    )


def _kind(value: Constant) -> str:
    """Its type in C++."""
    return next((n for n, its in ENUMS.items() if isinstance(value, its)), type(value).__name__)


def _literal(value: Constant) -> str:
    if isinstance(value, Enum):
        return f"{_kind(value)}::{value.name}"
    if isinstance(value, float):
        return f"{float(np.float32(value))!r}f"
    return str(value).lower()


def _enum(name: str, kinds: type[Enum]) -> str:
    members = ", ".join(f"{kind.name} = {at}" for at, kind in enumerate(kinds))
    return f"enum class {name} : int {{ {members} }};"


def _type(field: str) -> str:
    return "float" if field in FLOATS else "int"


def _struct(made: Layout, name: str, table: str) -> str:
    """A table's row. What the plan has nothing to say of is a constant of all rows; the columns of
    the others follow each other in a table's words.
    """
    fields = made.fields(table)
    body = "\n".join(f"  {_type(field)} {field};" for field in fields)
    absent = {field: value for field, value in ABSENT_FIELDS.items() if field not in fields}
    if table == "stages" and absent:
        body += f"\n{_members(absent)}"
    values = ", ".join(f"{_type(field)}(at[{i} * pitch])" for i, field in enumerate(fields))
    return (
        f"struct {name} {{\n{body}\n\n  template <class Word>\n"
        f"  static constexpr {name} of(const Word* at, int pitch) {{\n    return {{{values}}};\n"
        "  }\n};\n"
        f'static_assert(sizeof({name}) == {4 * len(fields)}, "tables hold 4-byte fields");\n'
    )


def _request(options: Options, embedded: bool) -> str:
    """A host's kernel, which many plans share, draws."""
    mirror = request_of(options if embedded else replace(options, sampling=Sampling.FULL))
    said = ("static constexpr bool", f"DRAWS = {str(options.draws or not embedded).lower()}")
    fields = (
        *REQUEST_FIELDS,
        *(f if issubclass(mirror, Request) else _zero(*f) for f in DRAWING_FIELDS),
        *(f if mirror is DraftingRequest else _zero(*f) for f in DRAFTING_FIELDS),
        said,
    )
    return _memory("Request", fields, mirror)


def _zero(kind: str, name: str) -> tuple[str, str]:
    return f"static constexpr {kind}", f"{name} = 0"


def _memory(name: str, fields: tuple[tuple[str, str], ...], mirror: type[ctypes.Structure]) -> str:
    body = "\n".join(f"  {kind} {field};" for kind, field in fields)
    return (
        f"struct {name} {{\n{body}\n}};\n"
        f'static_assert(sizeof({name}) == {ctypes.sizeof(mirror)}, "{name} is shared with '
        'Python");\n'
    )


# A block's own elements of a set of spans, in the order of Layout.owned.
OWNED_OF = (
    "  __device__ const Span& owned_of(int set, int block) const { return owned_at(block * "
    "owned_sets + set); }"
)


def _sizes(made: Layout) -> tuple[dict[str, int | float], dict[str, int]]:
    """What the plan says, and what it has nothing to say of."""
    return made.sizes, {name: 0 for name in ABSENT_SIZES if name not in made.sizes}


def _embedded(made: Layout) -> str:
    """Sizes as constants; tables in the device's constant memory, the smallest first, and what
    exceeds it in its memory.
    """
    sizes_of = {
        name: 4 * len(table) * len(made.fields(name)) for name, table in made.tables.items()
    }
    order = sorted(sizes_of, key=lambda name: sizes_of[name])
    near = {
        name
        for at, name in enumerate(order)
        if sum(sizes_of[n] for n in order[: at + 1]) <= CONSTANT_BYTES
    }
    tables = "\n".join(
        _table(made, name, "TWIN_TABLE" if name in near else "TWIN_LARGE_TABLE")
        for name in made.tables
    )
    own, absent = _sizes(made)
    access = "\n".join(
        f"  __device__ static const {FIELDS[name][0]}& {name}_at(int i) {{ return "
        f"{name.upper()}[i]; }}"
        for name in made.tables
    )
    return f"{tables}\nstruct Plan {{\n{_members(own | absent)}\n{access}\n{OWNED_OF}\n}};\n"


def _loaded(made: Layout) -> str:
    """Sizes and tables as they stand in the image."""
    own, absent = _sizes(made)
    sizes = "\n".join(f"  {_type(name)} {name};" for name in own)
    pointers = "\n".join(f"  const {FIELDS[name][0]}* {name};" for name in made.tables)
    access = "\n".join(
        f"  const {FIELDS[name][0]}& {name}_at(int i) const {{ return {name}[i]; }}"
        for name in made.tables
    )
    load = "\n".join(
        f"  plan.{name} = reinterpret_cast<const {FIELDS[name][0]}*>(image + image[{at}]);"
        for at, name in enumerate(made.tables, start=1)
    )
    return (
        f"struct Sizes {{\n{sizes}\n{_members(absent)}\n}};\n\n"
        f"struct Plan : Sizes {{\n{pointers}\n{access}\n"
        f"{OWNED_OF}\n}};\n\ninline Plan load_plan(const int* image) {{\n  Plan plan;\n"
        "  static_cast<Sizes&>(plan) = *reinterpret_cast<const Sizes*>(image + image[0]);\n"
        f"{load}\n  return plan;\n}}\n"
    )


def _table(made: Layout, name: str, where: str) -> str:
    """A table that the compiler makes of runs (native/platform/tables.h). Its words are those of
    one column after the other, of spans row by row; a set's spans of all blocks lie together.
    """
    struct, fields = FIELDS[name][0], made.fields(name)
    rows = made.tables[name] or [(0,) * len(fields)]  # C++ has no empty arrays
    sets = int(made.sizes["owned_sets"]) if name == "owned" else 1
    by_set = np.array(rows, np.float64).reshape(-1, sets, len(fields)).swapaxes(0, 1)
    words = by_set.reshape(len(rows), len(fields))
    by_row = struct in BY_ROW
    numbers = ", ".join(map(_word, runs((words if by_row else words.T).reshape(-1))))
    lines = textwrap.fill(numbers, 98, initial_indent="  ", subsequent_indent="  ")
    table = name.upper()
    made_of = (
        f"constexpr {'double' if FLOATS & set(fields) else 'int'} {table}_RUNS[] = {{\n{lines}}};\n"
        f"constexpr auto {table}_MADE = table<{struct}, {len(rows)}, {len(fields)}, "
        f"{_literal(by_row)}, {sets}>({table}_RUNS);\n"
    )
    if len(rows) > MOST_LISTED:
        return f"{made_of}{where} auto {table} = {table}_MADE;"
    every = [
        f"TWIN_ROWS_{1 << bit}({table}_MADE, {len(rows) >> bit + 1 << bit + 1})"
        for bit in reversed(range(len(rows).bit_length()))
        if len(rows) >> bit & 1
    ]
    listed = textwrap.fill(" ".join(every), 98, initial_indent="    ", subsequent_indent="    ")
    return f"{made_of}{where} {struct} {table}[] = {{\n{listed}}};"


def _word(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _number(field: str, value: int | float) -> str:
    return f"{float(np.float32(value))!r}f" if field in FLOATS else str(value)
