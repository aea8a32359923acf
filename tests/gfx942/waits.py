"""Does every path through a code object wait for what it has loaded? The waits of a wave, followed
over all its paths, also those that no run takes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.gfx942.code import Code, Instruction

REGISTER = re.compile(r"\b([vs])(?:(\d+)|\[(\d+):(\d+)\])")
MOST = 64  # operations under way that a counter can count
VM, LGKM = 0, 1  # the two counters
LOCAL = "local memory"  # what a barrier wants to be over: other waves look next
CACHE = "a write-back"  # what a word that tells of it wants to be over
# of a word to the sentinel, by this wave: what it publishes wants it to be over, and a barrier
# behind which another wave publishes
RESET = "a reset"

# (counter, register or LOCAL, CACHE, RESET) -> operations issued since on that counter, at least;
# None: of those that end in any order, so only a wait for all of them tells
State = dict[tuple[int, str], int | None]


@dataclass(frozen=True)
class Uncovered:
    """An instruction that some path reaches too early."""

    one: Instruction
    what: str


def without(code: Code, wait: Instruction) -> Code:
    """The code with nothing in a wait's place."""
    nothing = replace(wait, name="s_nop", operands="0")
    return replace(
        code, instructions=tuple(nothing if one is wait else one for one in code.instructions)
    )


def uncovered(code: Code) -> list[Uncovered]:
    """What no wait covers on some path from the kernel's entry; the first instruction of each."""
    blocks, following = _blocks(code)
    resets = _resets(blocks)
    entry = next(n for n, block in enumerate(blocks) if block[0].at == code.entry)
    states: dict[int, State] = {entry: {}}
    found: dict[tuple[int, str], Uncovered] = {}
    left = [entry]
    while left:
        number = left.pop()
        state = dict(states[number])
        for one in blocks[number]:
            for what in _touched(one, resets):
                if (VM, what) in state or (LGKM, what) in state:
                    found.setdefault((one.at, what), Uncovered(one, what))
            for what in _filled(one):
                # loads from global memory end in order: the later one wins
                if (LGKM, what) in state:
                    found.setdefault((one.at, what), Uncovered(one, what))
            _follow(state, one, resets)
        for after in following[number]:
            # a branch over nothing but such a wait: no thread had anything to reset
            skips = after == number + 2 and _waits_alone(blocks[number + 1])
            seen = {key: since for key, since in state.items() if not (skips and key[1] == RESET)}
            known = states.get(after)
            merged = seen if known is None else _merged(known, seen)
            if known is None or merged != known:
                states[after] = merged
                left.append(after)
    return list(found.values())


def registers(text: str) -> list[str]:
    found = REGISTER.findall(text)
    return [
        f"{kind}{n}"
        for kind, one, lo, hi in found
        for n in range(int(one or lo), int(one or hi) + 1)
    ]


def _waits_alone(block: list[Instruction]) -> bool:
    return [(one.name, one.operands) for one in block] == [("s_waitcnt", "vmcnt(0)")]


def _resets(blocks: list[list[Instruction]]) -> set[int]:
    """Where words are set to the sentinel, which is all ones: made right before it is stored."""
    found = set()
    for block in blocks:
        for at, one in enumerate(block):
            if not _exchanges(one):
                continue
            value = one.operands.split(", ")[1]
            makers = [b for b in block[:at] if b.operands.split(", ")[0] == value]
            if makers and (makers[-1].name, makers[-1].operands) == (
                "v_mov_b32_e32",
                f"{value}, -1",
            ):
                found.add(one.at)
    return found


def _exchanges(one: Instruction) -> bool:
    """Does it store an exchanged word? The host's words have a scalar base."""
    return one.name == "global_store_dword" and bool(re.search(r", off .*sc1$", one.operands))


def _touched(one: Instruction, resets: set[int]) -> Iterable[str]:
    """What an instruction reads or writes, or wants to be over."""
    if one.name in ("s_waitcnt", "s_nop"):
        return []
    if one.name == "s_barrier":
        return [LOCAL, RESET]
    tells = re.match("(global|flat)_(store|atomic)", one.name)
    seen = one.operands.partition(",")[2] if _loads(one) else one.operands
    publishes = _exchanges(one) and one.at not in resets
    return [*registers(seen), *([CACHE] if tells else []), *([RESET] if publishes else [])]


def _loads(one: Instruction) -> bool:
    """A load of the kind whose results come in order; other operations count as loads as well."""
    return one.name.startswith("global_load_")


def _filled(one: Instruction) -> list[str]:
    return registers(one.operands.split(", ")[0]) if _loads(one) else []


def _follow(state: State, one: Instruction, resets: set[int]) -> None:
    """What is under way behind an instruction."""
    if one.name == "s_waitcnt":
        for counter, name in ((VM, "vmcnt"), (LGKM, "lgkmcnt")):
            said = re.search(rf"{name}\((\d+)\)", one.operands)
            if said:
                _wait(state, counter, int(said[1]))
        return
    target = one.operands.split(", ")[0]
    loads = "_load_" in one.name or one.name.startswith("ds_read") or one.name == "s_memrealtime"
    returns = one.name.startswith("global_atomic") and "sc0" in one.operands
    filled = registers(target) if loads or returns or one.name == "ds_bpermute_b32" else []
    if one.name.startswith(("global_", "buffer_wbl2")):
        made = [CACHE] if one.name == "buffer_wbl2" else [RESET] if one.at in resets else []
        _issue(state, VM, [*filled, *made], True)
    elif one.name.startswith("flat_"):
        for counter in (VM, LGKM):
            _issue(state, counter, [*filled, *([LOCAL] if counter == LGKM else [])], False)
    elif one.name.startswith("ds_"):
        _issue(state, LGKM, [*filled, LOCAL], True)
    elif one.name.startswith("s_load_") or one.name == "s_memrealtime":
        _issue(state, LGKM, filled, False)


def _issue(state: State, counter: int, filled: list[str], ordered: bool) -> None:
    for key, since in list(state.items()):
        if key[0] == counter and since is not None:
            state[key] = min(since + 1, MOST)
    for what in filled:
        state[counter, what] = 0 if ordered else None


def _wait(state: State, counter: int, left: int) -> None:
    for (of, what), since in list(state.items()):
        if of == counter and (left == 0 or (since is not None and since >= left)):
            del state[of, what]


def _merged(a: State, b: State) -> State:
    """On one path or the other."""
    made = dict(a)
    for key, since in b.items():
        if key not in made:
            made[key] = since
        else:
            known = made[key]
            made[key] = None if known is None or since is None else min(known, since)
    return made


def _blocks(code: Code) -> tuple[list[list[Instruction]], dict[int, list[int]]]:
    """Instructions between jumps, and which of them follow each."""
    instructions = sorted(code.instructions, key=lambda one: one.at)
    starts = {code.entry}
    for one in instructions:
        if _jumps(one) or one.name == "s_endpgm":
            starts.add(one.at + one.size)
        if _jumps(one):
            starts.add(_target(one))
    blocks: list[list[Instruction]] = []
    for one in instructions:
        if one.at in starts or not blocks:
            blocks.append([])
        blocks[-1].append(one)
    number = {block[0].at: n for n, block in enumerate(blocks)}
    following: dict[int, list[int]] = defaultdict(list)
    for n, block in enumerate(blocks):
        last = block[-1]
        if _jumps(last):
            following[n].append(number[_target(last)])
        if last.name not in ("s_branch", "s_endpgm") and n + 1 < len(blocks):
            following[n].append(n + 1)
    return blocks, following


def _jumps(one: Instruction) -> bool:
    assert not one.name.startswith(("s_setpc", "s_swappc", "s_call")), "a function is called"
    return one.name == "s_branch" or one.name.startswith("s_cbranch")


def _target(one: Instruction) -> int:
    jump = int(one.operands.split(", ")[0].split()[0])
    return one.at + 4 + 4 * (jump - 65536 if jump >= 32768 else jump)
