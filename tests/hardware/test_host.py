from __future__ import annotations

from pathlib import Path

import pytest

from twin.hardware.host import detect_host
from twin.hardware.number import Kind
from twin.hardware.override import numbers
from twin.hardware.schema import check_number


def _machine(root: Path, *, cores: int = 4, l2: str = "1024K", l3: str | None = "32768K") -> Path:
    cpuinfo = "".join(
        f"processor\t: {i}\nmodel name\t: Test CPU\ncpu MHz\t\t: 3000.0\n\n" for i in range(cores)
    )
    _write(root / "proc/cpuinfo", cpuinfo)
    _write(root / "proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\n")
    for core in range(cores):
        levels = [("1", "Data", "48K", f"{core}"), ("2", "Unified", l2, f"{core}")] + (
            [("3", "Unified", l3, f"0-{cores - 1}")] if l3 else []
        )
        for index, (level, kind, size, shared) in enumerate(levels):
            folder = root / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            for name, text in (
                ("level", level),
                ("type", kind),
                ("size", size),
                ("shared_cpu_list", shared),
            ):
                _write(folder / name, text + "\n")
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_computer_is_a_device() -> None:
    host = detect_host()
    assert host.blocks >= 1
    assert host.isa == "host"
    assert host.sharing is not None
    for path, number in numbers(host).items():
        check_number(path, number)


def test_what_the_system_says_is_used(tmp_path: Path) -> None:
    host = detect_host(_machine(tmp_path), cpus=range(4))
    assert host.blocks == 4
    assert host.block.on_chip_bytes.value == 2**20
    assert host.l2.capacity_bytes.value == 4 * 2**20
    assert host.llc is not None
    assert host.llc.capacity_bytes.value == 32 * 2**20
    assert host.memory.capacity_bytes.value == 16384 * 1024
    assert host.block.clock_hz.value == 3e9
    assert host.title == "This computer (Test CPU)"


def test_an_empty_root_is_all_assumed(tmp_path: Path) -> None:
    host = detect_host(tmp_path, cpus=[0, 1])
    assert host.blocks == 2
    assert host.llc is not None
    for part in (
        host.llc.capacity_bytes,
        host.block.on_chip_bytes,
        host.block.clock_hz,
        host.memory.capacity_bytes,
        host.l2.capacity_bytes,
    ):
        assert part.kind is Kind.ASSUMED
        assert "not visible" in part.source
    for path, number in numbers(host).items():
        check_number(path, number)


def test_affinity_limits_the_blocks(tmp_path: Path) -> None:
    host = detect_host(_machine(tmp_path), cpus=[1, 3])
    assert host.blocks == 2
    assert host.l2.capacity_bytes.value == 2 * 2**20


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("10000 100000", 1),
        ("max 100000", 4),
        ("junk", 4),
        ("", 4),
    ],
)
def test_a_quota_limits_the_blocks(tmp_path: Path, text: str, blocks: int) -> None:
    root = _machine(tmp_path)
    _write(root / "sys/fs/cgroup/cpu.max", text)
    assert detect_host(root, cpus=range(4)).blocks == blocks


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    root = _machine(tmp_path)
    _write(root / "proc/self/cgroup", "0::/outer/inner\n")
    _write(root / "sys/fs/cgroup/outer/cpu.max", "100000 100000")
    _write(root / "sys/fs/cgroup/outer/inner/cpu.max", "300000 100000")
    _write(root / "sys/fs/cgroup/outer/memory.max", "1000000")
    host = detect_host(root, cpus=range(4))
    assert host.blocks == 1
    assert host.memory.capacity_bytes.value == 1_000_000


def test_the_old_control_groups_count(tmp_path: Path) -> None:
    root = _machine(tmp_path)
    _write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000")
    assert detect_host(root, cpus=range(4)).blocks == 2
    _write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert detect_host(root, cpus=range(4)).blocks == 4


def test_an_arm_machine_without_cache_files(tmp_path: Path) -> None:
    _write(tmp_path / "proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd40\n")
    _write(tmp_path / "proc/meminfo", "garbage\nMemTotal: much\n")
    host = detect_host(tmp_path, cpus=[0])
    assert host.title == "This computer (0xd40)"
    assert host.memory.capacity_bytes.kind is Kind.ASSUMED


@pytest.mark.parametrize("size", ["", "abc", "K", "-1K", "0K"])
def test_an_unreadable_cache_size_is_assumed(tmp_path: Path, size: str) -> None:
    host = detect_host(_machine(tmp_path, l2=size, l3=None), cpus=[0])
    assert host.block.on_chip_bytes.kind is Kind.ASSUMED
    assert host.llc is not None
    assert host.llc.capacity_bytes.kind is Kind.ASSUMED
