"""The C++ that is generated from a plan: enums, table structs, sizes, and (for devices) the tables
themselves.

Only the types of weights and cache, the head size and tracing are compiled in for the host, so that
plans share binaries; a device build embeds everything as constants.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from twin.kernel import experts, recurrent
from twin.kernel.coded import codes_by_input, codes_of
from twin.kernel.fields import FIELDS, FLOATS
from twin.kernel.tables import Layout, layout
from twin.models.codes import CODES
from twin.models.spec import DType
from twin.models.variant import Activation
from twin.plan.catalogue import ALWAYS
from twin.plan.types import HandOffKind, Parts, Plan, Sampling, StageKind

MAX_RANKS = 16
# an exchanged word that is not yet written: a NaN that no arithmetic here produces
SENTINEL_WORD = 0xFFFFFFFF
PASS_BARRIER = -2  # Control.hung_value: blocks meet after every stage of a prompt pass
# Control.hung_value: GPUs meet before the first stage, hung_part is late; where that is the waiting
# one itself, its block hung_element
START_BARRIER = -3
LOGITS_TAKEN = -4  # Control.hung_value: the host takes logits before their row is written again
CONSTANT_BYTES = 60 << 10  # of 64 KiB on NVIDIA's GPUs; the launch's arguments lie in another bank


class Status(Enum):
    """How a run of the kernel stands, written by the device."""

    RUNNING = "running"
    LENGTH = "length"  # all steps done
    STOP = "stop"  # a stop token was generated
    HUNG = "hung"  # a wait outlived the watchdog
    NO_TOKEN = "no_token"  # the largest logit is not finite


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
    # [2][blocks][shelf_floats] what each block makes of its logits, the full sampler's
    ("float*", "shelves"),
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
    # GPUs; -4: the host, which has not taken logits
    ("int", "hung_value"),
    ("int", "hung_part"),
    ("int", "hung_element"),  # -1: a counter
    ("int", "hung_step"),
    ("int", "taken"),  # by the host: generated tokens whose logits it has taken
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


class Control(ctypes.Structure):
    """What changes while the kernel runs, as C++ sees it."""

    _fields_ = _mirror(CONTROL_FIELDS)


def header(plan: Plan, *, embedded: bool = True, trace: bool = False) -> str:
    """The header that the kernel is compiled with: the same text for the same plan.

    Without `embedded` the tables and sizes are read from `tables.image` at run time.
    """
    made = layout(plan)
    own = plan.attention
    structs = {struct: made.fields(table) for table, (struct, _) in FIELDS.items()}
    parts = [
        "// Generated by twin/kernel/header.py; do not edit.\n#pragma once\n\nnamespace twin {\n",
        _enum("StageKind", StageKind),
        _enum("Parts", Parts),
        _enum("HandOff", HandOffKind),
        _enum("Type", DType),
        _enum("Status", Status),
        f"constexpr int MAX_RANKS = {MAX_RANKS};",
        f"constexpr Type WEIGHT = Type::{plan.options.weight_dtype.name};",
        f"constexpr Type KV = Type::{plan.options.kv_dtype.name};",
        f"constexpr int HEAD_DIM = {own.head_dim if own else 1};",
        f"constexpr int GROUP = {own.group if own else 1};  // query heads that share a key head",
        f"constexpr bool TRACE = {str(trace).lower()};\n",
        *_family(plan),
        *_codes(plan, embedded),
        *_experts(plan),
        *_additions(plan),
        *_delta(plan),
        *(_shapes(plan, made) if embedded else []),
        *(_struct(name, fields) for name, fields in structs.items()),
        _memory("RankMemory", RANK_FIELDS, RankMemory),
        _request(request_type(plan) if embedded else Request),
        _memory("Control", CONTROL_FIELDS, Control),
        _embedded(made) if embedded else _loaded(made),
        "}  // namespace twin\n",
    ]
    return "\n".join(parts)


def _family(plan: Plan) -> list[str]:
    """What the kernel does otherwise than for Llama, whose constants are those of
    native/platform/family.h.
    """
    made = family(plan)
    if made == PLAIN:
        return []
    types = {bool: "bool", float: "float"}
    body = "\n".join(
        f"  static constexpr {types[type(value)]} {name} = {_literal(value)};"
        for name, value in made.items()
    )
    return [f"#define TWIN_FAMILY\nstruct Family {{\n{body}\n}};\n"]


def _codes(plan: Plan, embedded: bool) -> list[str]:
    """What the kernel decodes; native/platform/coded.h says that it decodes nothing.

    A host's kernel has all codes, so that formats cause no compile."""
    if not plan.coded:
        return []
    used, pack = codes_of(plan)
    if not embedded:  # where nothing depends on it
        used, pack = (2 << len(CODES)) - 1, 0
    return [
        f"#define TWIN_CODED\nconstexpr u32 CODES = {used}u;  // a bit for each code of the "
        "plan's matrices",
        f"constexpr int CODED_PACK = {pack};  // elements of a row that a GPU's thread holds\n",
        *(_codes_by_input(plan) if embedded else ()),
    ]


def _codes_by_input(plan: Plan) -> list[str]:
    beside, found = experts.beside(plan), codes_by_input(plan)
    said = "// of matrices that multiply this input\n"
    always = [f"constexpr u32 {name.upper()}_CODES = {found[name]}u;  {said}" for name in ALWAYS]
    others = [name.upper() for name in found if name not in ALWAYS and beside[name.upper()]]
    return always + [
        f"#define TWIN_{name}_CODES\nconstexpr u32 {name}_CODES = {found[name.lower()]}u;  {said}"
        for name in others
    ]


def _experts(plan: Plan) -> list[str]:
    """What a router does; native/platform/experts.h stands in for models without one."""
    beside = experts.beside(plan)
    return [
        *_constants("Experts", experts.constants(plan)),
        *([] if beside == experts.NO_BESIDE else _constants("Beside", beside)),
    ]


def _delta(plan: Plan) -> list[str]:
    """Recurrent states and gates of attention's outputs; native/platform/delta.h says that there
    are none.
    """
    gated = plan.spec is not None and plan.kernel_routed and plan.spec.output_gate
    return [
        *_constants("Delta", recurrent.constants(plan)),
        *(_constants("Outgoing", {"GATED": True}) if gated else []),
    ]


def _additions(plan: Plan) -> list[str]:
    """Biases, sinks and clamped gates; native/platform/additions.h says that there are none."""
    made = experts.additions(plan)
    return [] if made == experts.NO_ADDITIONS else _constants("Additions", made)


def _shapes(plan: Plan, made: Layout) -> list[str]:
    """What all stages of chosen experts have in common; native/platform/experts.h says nothing."""
    found = experts.shapes(plan, made.stages, made.stage_fields)
    if not found:
        return []
    structs = [
        f"struct {name} {{\n"
        + "\n".join(f"  static constexpr int {field} = {value};" for field, value in shape.items())
        + "\n};"
        for name, shape in found.items()
    ]
    return ["#define TWIN_ROUTED_SHAPES", *structs, ""]


def _constants(name: str, made: Mapping[str, bool | int | float]) -> list[str]:
    """A struct of the kernel's; nothing where it has no members."""
    if not made:
        return []
    types = {bool: "bool", int: "int", float: "float"}
    body = "\n".join(
        f"  static constexpr {types[type(value)]} {member} = {_constant(value)};"
        for member, value in made.items()
    )
    return [f"#define TWIN_{name.upper()}\nstruct {name} {{\n{body}\n}};\n"]


def _constant(value: bool | int | float) -> str:
    return str(value) if type(value) is int else _literal(value)


def family(plan: Plan) -> dict[str, bool | float]:
    """The constants that a family chooses."""
    if plan.spec is None:
        return PLAIN
    variant = plan.spec.variant
    return {
        "GELU": variant.activation is Activation.GELU,
        "NORMS_BEFORE": variant.norms.before,
        "NORMS_AFTER": variant.norms.after,
        "QK_NORMED_TOGETHER": variant.whole_qk_norm,
        "ROPE_BY_LAYER": len(plan.spec.rotations) > 1,
        "EMBEDDING": variant.embedding,
        "SCORE": variant.score or 0.0,
        "SCORE_CAP": variant.score_cap or 0.0,
        "LOGIT_CAP": variant.logit_cap or 0.0,
    }


PLAIN: dict[str, bool | float] = {
    "GELU": False,
    "NORMS_BEFORE": True,
    "NORMS_AFTER": False,
    "QK_NORMED_TOGETHER": False,
    "ROPE_BY_LAYER": False,
    "EMBEDDING": 1.0,
    "SCORE": 0.0,
    "SCORE_CAP": 0.0,
    "LOGIT_CAP": 0.0,
}


def _literal(value: bool | float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{float(np.float32(value))!r}f"


def _enum(name: str, kinds: type[Enum]) -> str:
    members = ", ".join(f"{kind.name} = {at}" for at, kind in enumerate(kinds))
    return f"enum class {name} : int {{ {members} }};"


def _type(field: str) -> str:
    return "float" if field in FLOATS else "int"


def _struct(name: str, fields: tuple[str, ...]) -> str:
    body = "\n".join(f"  {_type(field)} {field};" for field in fields)
    return (
        f"struct {name} {{\n{body}\n}};\n"
        f'static_assert(sizeof({name}) == {4 * len(fields)}, "tables hold 4-byte fields");\n'
    )


def request_type(plan: Plan) -> type[GreedyRequest]:
    """What a kernel with the plan compiled in is told."""
    return GreedyRequest if plan.options.sampling is Sampling.GREEDY else Request


def _request(mirror: type[GreedyRequest]) -> str:
    draws = mirror is Request
    more = DRAWING_FIELDS if draws else tuple(_zero(*field) for field in DRAWING_FIELDS)
    said = ("static constexpr bool", f"DRAWS = {str(draws).lower()}")
    return _memory("Request", (*REQUEST_FIELDS, *more, said), mirror)


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
    sizes = "\n".join(
        f"  static constexpr {_type(name)} {name} = {_number(name, value)};"
        for name, value in made.sizes.items()
    )
    access = "\n".join(
        f"  __device__ static const {FIELDS[name][0]}& {name}_at(int i) {{ return "
        f"{name.upper()}[i]; }}"
        for name in made.tables
    )
    return f"{tables}\nstruct Plan {{\n{sizes}\n{access}\n{OWNED_OF}\n}};\n"


def _loaded(made: Layout) -> str:
    """Sizes and tables as they stand in the image."""
    sizes = "\n".join(f"  {_type(name)} {name};" for name in made.sizes)
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
        f"struct Sizes {{\n{sizes}\n}};\n\nstruct Plan : Sizes {{\n{pointers}\n{access}\n"
        f"{OWNED_OF}\n}};\n\ninline Plan load_plan(const int* image) {{\n  Plan plan;\n"
        "  static_cast<Sizes&>(plan) = *reinterpret_cast<const Sizes*>(image + image[0]);\n"
        f"{load}\n  return plan;\n}}\n"
    )


def _table(made: Layout, name: str, where: str) -> str:
    struct, fields = FIELDS[name][0], made.fields(name)
    lines = (
        "  {" + ", ".join(_number(f, v) for f, v in zip(fields, row, strict=True)) + "}"
        for row in made.tables[name]
    )
    rows = ",\n".join(lines) or "  {}"
    return f"{where} {struct} {name.upper()}[] = {{\n{rows}\n}};"


def _number(field: str, value: int | float) -> str:
    return f"{float(np.float32(value))!r}f" if field in FLOATS else str(value)
