"""Boxes: one contract at every level, and nothing left of them."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.llm.boxes import CONFINED, Held, config_for, hold, processes, python_for
from unirl.errors import UniRLError
from unirl.llm.sandbox import cgroups, levels, seccomp
from unirl.llm.sandbox.box import BoxSpec, FileRefused, SandboxFailed, boxed
from unirl.llm.sandbox.config import LevelName, SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.llm.sandbox.pool import LocalSandboxes
from unirl.llm.sandbox.tool import PythonTool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=[*CONFINED, "none", "container"])
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    yield from hold(request.param, slots=1)


@pytest.fixture(scope="module", params=[*CONFINED, "none"])
def local(request: pytest.FixtureRequest) -> Iterator[Held]:
    yield from hold(request.param, slots=1)


def test_a_program_says_how_it_ended(held: Held) -> None:
    async def check() -> None:
        run = held.sandboxes.run
        ran = await run("print(input()); import sys; print('e', file=sys.stderr)", input=b"hi\n")
        assert (ran.rc, ran.output, ran.killed) == (0, b"hi\ne\n", "")
        ran = await run("def f():\n    raise ValueError('no')\nf()")
        assert ran.rc == 1 and "raise ValueError('no')" in ran.text and "zygote" not in ran.text
        assert (await run("raise SystemExit(3)")).rc == 3
        ran = await run("import os; print(os.environ['A'], os.getcwd())", env={"A": "b"})
        assert ran.text.startswith("b /")
        assert held.sandboxes.level.as_info()["level"] == held.name

    held.run(check())


def test_a_program_is_killed_at_its_limits(held: Held) -> None:
    async def check() -> None:
        run = held.sandboxes.run
        ran = await run("print('before')\nwhile True: pass", seconds=0.3)
        assert (ran.rc, ran.output, ran.killed) == (-9, b"before\n", "time")
        assert 300_000 <= ran.us < 1_300_000
        ran = await run(
            "import signal, time\n[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]\n"
            "time.sleep(60)",
            seconds=0.3,
        )
        assert ran.killed == "time"
        ran = await run("while True: print('x' * 1000)", max_output=5000)
        assert ran.killed == "output" and len(ran.output) == 5000
        assert (await run("print(1)")).output == b"1\n"  # and the next is none the worse

    held.run(check())


def test_an_episodes_box_keeps_its_files_and_the_next_has_none(held: Held) -> None:
    async def check() -> None:
        spec = BoxSpec(files={"in/a.txt": b"1"}, env={"V": "w"})
        async with boxed(held.sandboxes, spec) as box:
            ran = await box.exec(["sh", "-c", "cat in/a.txt; echo $V > out"])
            assert ran.output == b"1" and ran.rc == 0
            assert await box.get("out") == b"w\n"
            await box.put("in/a.txt", b"2" * 100_000)
            assert await box.get("in/a.txt") == b"2" * 100_000
            assert (await box.run("open('b', 'w').write('x')")).rc == 0
            assert (await box.exec(["cat", "b"], env={})).output == b"x"
            ran = await box.exec(["no-such-program"])
            assert ran.rc == 127 and "no-such-program" in ran.text
        ran = await held.sandboxes.run("import os; print(os.listdir('.'))")
        assert ran.output == b"[]\n"
        with pytest.raises(SandboxFailed, match="closed"):
            await box.exec(["true"])

    held.run(check())


def test_files_are_never_reached_through_links(held: Held) -> None:
    async def check() -> None:
        async with boxed(held.sandboxes) as box:
            await box.exec(["sh", "-c", "ln -s /etc/passwd a; ln -s / b; mkfifo c; mkdir d"])
            for path in ("a", "b/etc/passwd", "c", "d", "e", "../x", "/etc/passwd", ""):
                with pytest.raises(FileRefused):
                    await box.get(path)
            for path in ("a", "b/x", "d", "../x"):
                with pytest.raises(FileRefused):
                    await box.put(path, b"x")
            await box.put("f", b"12345")
            with pytest.raises(FileRefused, match="at most 4"):
                await box.get("f", max_bytes=4)

    held.run(check())


def test_a_tool_answers_in_words(held: Held) -> None:
    tool = PythonTool(held.sandboxes)
    assert held.run(tool.run("print(6 * 7)", 5)) == "42"
    assert held.run(tool.run("pass", 5)) == "(no output)"
    assert held.run(tool.run("while 1: pass", 0.2)) == "It was ended after 0.2 seconds."
    said = held.run(tool.run("1 / 0", 5))
    assert said.endswith("ZeroDivisionError: division by zero\nExit code 1.")


def test_a_cancelled_program_is_gone_and_its_slot_replaced(local: Held) -> None:
    async def check() -> None:
        before = set(local.sandboxes.pids)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await local.sandboxes.run("import time; time.sleep(60)", seconds=60)
        assert (await local.sandboxes.run("print(1)")).output == b"1\n"
        assert not before & set(local.sandboxes.pids)

    local.run(check())


def test_what_is_deep_or_closed_is_removed_too(held: Held) -> None:
    program = """
import os
open("kept", "w").close()
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
os.mkdir("closed")
os.chmod("closed", 0)
print("made")
"""

    async def check() -> None:
        assert (await held.sandboxes.run(program)).output == b"made\n"
        async with boxed(held.sandboxes) as box:
            assert (await box.run(program)).output == b"made\n"
        assert (await held.sandboxes.run("import os; print(os.listdir())")).output == b"[]\n"

    held.run(check())


def test_a_zygotes_error_is_the_sandboxs_and_its_slot_is_replaced(
    local: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_memory(*_: object, **__: object) -> dict[str, object]:
        return {"error": "Cannot allocate memory", "number": 12}

    async def check() -> None:
        for start in (local.sandboxes.open, lambda: local.sandboxes.run("print(1)")):
            with monkeypatch.context() as patch:
                patch.setattr("unirl.llm.sandbox.slot.Slot.request", no_memory)
                with pytest.raises(SandboxFailed, match="allocate memory"):
                    await start()
            async with asyncio.timeout(20):
                assert (await local.sandboxes.run("print(1)")).output == b"1\n"

    local.run(check())


def test_an_idle_box_is_closed() -> None:
    async def check() -> None:
        config = SandboxConfig(kind="none", slots=1, idle_seconds=0.2)
        sandboxes = await make_sandboxes(config)
        try:
            box = await sandboxes.open()
            await asyncio.sleep(1.5)
            with pytest.raises(SandboxFailed, match="left alone"):
                await box.run("print(1)")
            async with asyncio.timeout(20), boxed(sandboxes) as another:
                assert (await another.run("print(1)")).rc == 0
        finally:
            await sandboxes.close()

    asyncio.run(check())


def test_less_than_the_level_asked_for_is_refused() -> None:
    with pytest.raises(UniRLError, match="asks for zygote or better"):
        asyncio.run(make_sandboxes(SandboxConfig(kind="landlock", level="zygote")))
    with pytest.raises(UniRLError, match="no Python"):
        asyncio.run(make_sandboxes(SandboxConfig(kind="none", python="/bin/false")))
    with pytest.raises(UniRLError, match="memory_mb"):
        SandboxConfig(memory_mb=64, disk_mb=64)


def test_the_best_level_is_taken_and_says_what_the_better_ones_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_cgroups(*_: object) -> None:
        raise OSError("no cgroups are mounted")

    async def check(config: SandboxConfig) -> LocalSandboxes:
        try:
            made = await make_sandboxes(config)
        except UniRLError as error:
            pytest.skip(f"this machine has no such sandboxes: {error}")
        await made.close()
        return made

    best = asyncio.run(check(SandboxConfig(slots=1))).level
    assert best.name in CONFINED and not (best.name == CONFINED[0] and best.why)
    monkeypatch.setattr("unirl.llm.sandbox.pool.Cgroups", no_cgroups)
    level = asyncio.run(check(SandboxConfig(slots=1, python=python_for("landlock")))).level
    assert level.name != "zygote+cgroup" and "no cgroups are mounted" in level.why[0]
    assert set(level.holds) == set(levels.HOLDS["none"])


def test_where_cgroups_are_found_of_both_versions(tmp_path: Path) -> None:
    v1 = (
        "30 1 0:2 / /c/memory rw - cgroup cgroup rw,memory\n"
        "31 1 0:3 / /c/pids rw shared:3 - cgroup cgroup rw,pids\n"
        "32 1 0:4 / /c/unified rw - cgroup2 cgroup2 rw\n"
    )
    own = "9:memory:/a/b\n8:pids:/\n0::/\n"
    assert cgroups._parents(v1, own) == (Path("/c/memory/a/b"), Path("/c/pids"))
    service = tmp_path / "user.service"
    service.mkdir()
    for folder, lent in ((tmp_path, "memory pids"), (service, "")):
        (folder / "cgroup.controllers").write_text("cpu memory pids")
        (folder / "cgroup.subtree_control").write_text(lent)
    v2 = f"30 1 0:2 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert cgroups._parents(v2, "0::/user.service\n") == (service, service)
    (service / "cgroup.controllers").write_text("cpu")
    assert cgroups._parents(v2, "0::/user.service\n") == (tmp_path, tmp_path)
    with pytest.raises(OSError, match="no cgroups"):
        cgroups._parents("", "0::/\n")


def test_what_another_namespace_owns_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not cgroups.is_dead(cgroups.owner())
    namespace, pid, tick = cgroups.owner().split("-")
    assert cgroups.is_dead(f"{namespace}-{pid}-{int(tick) + 1}")
    assert not cgroups.is_dead(f"1{namespace}-{pid}-{int(tick) + 1}")
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(cgroups, "_REMOVE_SECONDS", 0)
    (tmp_path / "cgroup.procs").write_text("0\n")
    cgroups._remove(tmp_path)
    assert killed == []


def test_the_filter_has_a_table_for_both_machines() -> None:
    for machine in ("x86_64", "aarch64"):
        numbers = seccomp.numbers(machine)
        assert {"read", "execve", "openat", "clone"} <= set(numbers)
        assert not {"ptrace", "mount", "unshare", "bpf", "io_uring_setup"} & set(numbers)
        assert len(seccomp.program(machine=machine)) // 8 < 4096
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program(machine="riscv64")


def leftovers() -> list[str]:
    """Processes below this one, cgroups and folders of boxes, on this machine."""
    own = cgroups.owner()
    found = [str(path) for path in Path(tempfile.gettempdir()).glob(f"unirl-box-{own}-*")]
    for root, folders, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{root}/{name}" for name in folders if own in name]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return found + [f"process {pid}" for pid in children if b"zygote" in _arguments(pid)]


def _arguments(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def open_and_kill(count: int, kind: str) -> int:
    """Open and close boxes, and kill slots of half of them at random; how many failed for it."""
    config = SandboxConfig(kind=kind, slots=2, python=python_for(kind))  # type: ignore[arg-type]
    try:
        sandboxes = await make_sandboxes(config)
    except UniRLError as error:
        pytest.skip(f"this machine has no sandboxes of kind {kind}: {error}")
    rng, failed = random.Random(3), 0

    async def one(number: int) -> None:
        nonlocal failed
        try:
            async with boxed(sandboxes) as box:
                program = "import time; open('f', 'w').write('x'); time.sleep(0.01)"
                running = asyncio.ensure_future(box.run(program))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.02)
                    os.kill(rng.choice(sandboxes.pids), signal.SIGKILL)
                await running
        except (SandboxFailed, ProcessLookupError):
            failed += 1

    try:
        await asyncio.gather(*(one(number) for number in range(count)))
        ran = await sandboxes.run("print(1)")
        if ran.killed == "crash":  # the last kill arrived only now
            ran = await sandboxes.run("print(1)")
        assert ran.output == b"1\n"
    finally:
        await sandboxes.close()
    return failed


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_of_boxes_that_were_killed(count: int) -> None:
    before = set(leftovers())  # of boxes that other tests hold
    fds, mounts = len(os.listdir("/proc/self/fd")), Path("/proc/self/mountinfo").read_text()
    failed = asyncio.run(open_and_kill(count, "auto"))
    assert 0 < failed < count
    assert set(leftovers()) <= before
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert Path("/proc/self/mountinfo").read_text() == mounts


@pytest.mark.parametrize("kind", [*CONFINED, "container"])
def test_boxes_die_with_the_process_that_made_them(kind: LevelName) -> None:
    marker = f"marker{secrets.token_hex(8)}"
    code = f"""
import asyncio
from unirl.llm.sandbox.config import LevelName, SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes
async def main():
    box = await (await make_sandboxes({config_for(kind, slots=1)!r})).open()
    print("open", flush=True)
    await box.exec(["sh", "-c", "setsid sh -c 'sleep 60; {marker}' & sleep 60"], seconds=60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        if parent.stdout.readline() != b"open\n":
            pytest.skip(f"this machine has no sandboxes of level {kind}")
        deadline = time.monotonic() + 20
        while len(processes(f"sleep 60; {marker}")) < 3:  # ours, and two shells
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.kill()
    while left := processes(marker):
        assert time.monotonic() < deadline + 20, left
        time.sleep(0.02)
    if kind == "container":  # they end by themselves
        return
    asyncio.run(open_and_kill(1, kind))  # the next to come sweeps
    assert not list(Path(tempfile.gettempdir()).glob(f"unirl-box-*-{parent.pid}-*"))


AS_NOBODY = """
import asyncio, os
from unirl.llm.sandbox.config import LevelName, SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.errors import UniRLError
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
async def main():
    for kind in ("zygote", "bwrap", "landlock"):
        try:
            config = SandboxConfig(kind=kind, slots=1, python="/usr/bin/python3")
            made = await make_sandboxes(config)
        except UniRLError as error:
            print(kind, "refused", error)
            continue
        ran = await made.run("print(sum(range(10)))")
        again = await made.run("import subprocess; subprocess.run(['true'], check=True)")
        print(kind, ran.text.strip(), again.rc)
        await made.close()
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are run by such a user already")
def test_no_level_but_cgroups_needs_root() -> None:
    env = {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", AS_NOBODY]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, cwd="/")
    lines = [line for line in ran.stdout.splitlines() if "refused" not in line]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if not lines:
        pytest.skip(f"this machine has no level without root: {ran.stdout}")
    assert all(line.split(" ")[1:] == ["45", "0"] for line in lines), ran.stdout
    assert len(lines) == 3 or "refused" in ran.stdout
