"""Every path through the compiled kernels waits for what it uses; of the waits in there, each is
needed on some path, or redundant on all.
"""

from __future__ import annotations

import pytest

from tests.gfx942.code import Code, Instruction, code_of
from tests.gfx942.test_code import PLANS, SOME
from tests.gfx942.waits import CACHE, LOCAL, RESET, uncovered, without

SAMPLE = 100  # of so many waits one may be taken away in the gate


@pytest.mark.parametrize("name", SOME)
def test_every_path_waits_for_what_it_uses(name: str) -> None:
    assert uncovered(code_of(PLANS[name])) == []


def missing(code: Code, wait: Instruction) -> set[str]:
    """What lacks a wait once it is gone: registers by their kind."""
    found = {one.what for one in uncovered(without(code, wait))}
    return {what if " " in what else what[0] for what in found}


def test_a_missing_wait_is_found() -> None:
    code = code_of(PLANS["sentinel"])
    assert any(missing(code, wait) for wait in code.matching("^s_waitcnt ")[::SAMPLE])


@pytest.mark.slow
def test_most_waits_are_needed_and_their_lack_is_found() -> None:
    code = code_of(PLANS["sentinel"])
    found = [missing(code, wait) for wait in code.matching("^s_waitcnt ")]
    needed = [what for what in found if what]
    assert len(needed) > 0.85 * len(found)
    assert {kind for what in needed for kind in what} == {"v", "s", LOCAL, CACHE, RESET}


def test_a_wait_is_needed_on_one_of_two_paths() -> None:
    """A loop that loads and a way past it: at the end only one of them has something under way."""

    def path(*names: str) -> list[str]:
        made = [
            Instruction(4 * at, *line.partition(" ")[::2], 4)  # type: ignore[arg-type]
            for at, line in enumerate(names)
        ]
        code = Code(tuple(made), (), 0, 0, 0, (0, 0, 0), 0)
        return [f"{one.one.at // 4} {one.what}" for one in uncovered(code)]

    load, use = "global_load_dword v1, v[2:3], off", "v_mov_b32 v4, v1"
    assert path(load, "s_waitcnt vmcnt(0)", use, "s_endpgm") == []
    assert path(load, use, "s_endpgm") == ["1 v1"]
    # the branch jumps past the wait
    assert path(load, "s_cbranch_scc0 1", "s_waitcnt vmcnt(0)", use, "s_endpgm") == ["3 v1"]
    # another load came later: at most one may be under way
    later = "global_load_dword v5, v[2:3], off"
    assert path(load, later, "s_waitcnt vmcnt(1)", use, "s_endpgm") == []
    assert path(load, later, "s_waitcnt vmcnt(2)", use, "s_endpgm") == ["3 v1"]
    # scalar loads end in any order
    both = ("s_load_dword s4, s[0:1], 0x0", "s_load_dword s5, s[0:1], 0x4")
    assert path(*both, "s_waitcnt lgkmcnt(1)", "s_mov_b32 s6, s4", "s_endpgm") == ["3 s4"]
    # a barrier wants local memory, what is published resets
    assert path("ds_write_b32 v1, v2", "s_barrier ", "s_endpgm") == [f"1 {LOCAL}"]
    reset = ("v_mov_b32_e32 v9, -1", "global_store_dword v[2:3], v9, off sc1")
    publish = "global_store_dword v[4:5], v8, off sc1"
    assert path(*reset, publish, "s_endpgm") == [f"2 {RESET}"]
    assert path(*reset, "s_waitcnt vmcnt(0)", publish, "s_endpgm") == []
    publish_to_all = "global_store_dword v0, v1, s[4:5] sc0 sc1"
    assert path("buffer_wbl2 sc0 sc1", publish_to_all, "s_endpgm") == [f"1 {CACHE}"]


@pytest.mark.slow
def test_what_the_interpreter_catches_is_found_as_well() -> None:
    """Of waits that a run reaches, some lack only on paths that it does not take."""
    from tests.gfx942.test_interpreter import SENTINEL, caught, nothing, reached

    code = code_of(SENTINEL)
    for wait in reached(SENTINEL, "^s_waitcnt ")[::12]:
        if caught(SENTINEL, wait, nothing):
            assert uncovered(without(code, wait)), wait
