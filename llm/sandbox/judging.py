"""Tests of a program that a model wrote, judged where the program cannot reach.

Tests run in one box and the program in another; between them is a socket, over which the tests call
what the program defines. What comes back is plain data, or a handle to an object that stays there,
whose comparison with anything is never asked for: a program cannot say that it equals what is
expected. Results are written to a descriptor that the program's box does not have, with a number
that it does not know. Nothing else is believed, not what is printed and not an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unirl.llm.sandbox.pool import LocalSandboxes
from unirl.llm.sandbox.slot import memory_file

_SHARED = r"""
import builtins, json, socket, sys
class Line:
    def __init__(self, fd):
        self.file = socket.socket(fileno=fd).makefile("rwb")
    def write(self, value):
        self.file.write(json.dumps(value).encode() + b"\n"); self.file.flush()
    def read(self):
        line = self.file.readline(16 << 20)
        if not line.endswith(b"\n"):
            raise EOFError("the program has ended")
        return json.loads(line)
def encode(value, other):
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(each, other) for each in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {"kind": kind.__name__, "items": [encode(each, other) for each in value]}
    if isinstance(value, dict):
        rows = [[encode(key, other), encode(each, other)] for key, each in value.items()]
        return {"kind": "dict", "items": rows}
    if isinstance(value, (bytes, bytearray)):
        return {"kind": "bytes", "items": list(value)}
    return {"kind": "object", "items": other(value)}
def decode(value, other):
    if isinstance(value, list):
        return [decode(each, other) for each in value]
    if not isinstance(value, dict):
        return value
    kind, items = value["kind"], value["items"]
    if kind == "dict":
        return {decode(key, other): decode(each, other) for key, each in items}
    if kind == "bytes":
        return bytes(items)
    if kind == "object":
        return other(items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        decode(each, other) for each in items)
"""
_JUDGED = (
    _SHARED
    + r"""
line, kept = Line(3), []
def keep(value):
    kept.append(value)
    return len(kept) - 1
def answer(asked):
    given = [decode(each, kept.__getitem__) for each in asked["args"]]
    named = {n: decode(v, kept.__getitem__) for n, v in asked["kwargs"].items()}
    target, op = kept[asked["object"]], asked["op"]
    if op == "call":
        value = target(*given, **named)
    else:
        value = {"get": getattr, "iter": list, "len": len, "str": str, "repr": repr,
                 "bool": bool}[op](target, *given)
    return {"value": encode(value, keep), "args": [encode(each, keep) for each in given]}
def serve(space):
    own = {n: v for n, v in space.items() if not n.startswith("__") and type(v) is not type(sys)}
    line.write({n: encode(v, keep) for n, v in own.items()})
    while True:
        try:
            asked = line.read()
        except EOFError:
            return
        try:
            said = answer(asked)
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            said = {"raised": kinds, "text": str(error)[:2000]}
        line.write(said)
def load():
    space = {"__name__": "solution"}
    exec(compile(sys.stdin.read(), "solution.py", "exec"), space)
    return space
serve(load())
"""
)
_JUDGE = (
    _SHARED
    + r"""
import os
def start():
    nonce, tests = json.loads(sys.stdin.read())
    def report(number, result):
        os.write(4, json.dumps([nonce, number, result]).encode() + b"\n")
    codes = []
    for number, test in enumerate(tests):
        try:
            codes.append(compile(test, "test.py", "exec"))
        except (SyntaxError, ValueError) as error:
            report(number, f"test {number} is no Python: {error}"[:500])
            os._exit(0)
    return codes, report
codes, report = start()
line = Line(3)
def bad(value):
    raise TypeError(f"{type(value).__name__} cannot be given to the program that is tested")
def known(value):
    return value._number if type(value) is Handle else bad(value)
def ask(number, op, args=(), kwargs={}):
    line.write({"object": number, "op": op, "args": [encode(a, known) for a in args],
                "kwargs": {n: encode(v, known) for n, v in kwargs.items()}})
    said = line.read()
    if "raised" in said:
        for name in said["raised"]:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(said["text"])
        raise RuntimeError(said["text"])
    for before, after in zip(args, said["args"]):  # what it changed in place
        after = decode(after, Handle)
        if isinstance(before, list) and isinstance(after, list):
            before[:] = after
        elif isinstance(before, (dict, set)) and type(before) is type(after):
            before.clear(); before.update(after)
    return decode(said["value"], Handle)
class Handle:
    # What stays with the program; equal to itself alone.
    def __init__(self, number): self._number = number
    def __call__(self, *args, **kwargs): return ask(self._number, "call", args, kwargs)
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return ask(self._number, "get", [name])
    def __len__(self): return ask(self._number, "len")
    def __str__(self): return ask(self._number, "str")
    def __repr__(self): return ask(self._number, "repr")
    def __bool__(self): return ask(self._number, "bool")
    def __iter__(self): return iter(ask(self._number, "iter"))
    def __getitem__(self, key):
        return ask(ask(self._number, "get", ["__getitem__"])._number, "call", [key])
def judge():
    own = line.read()
    for number, code in enumerate(codes):
        passed = False
        try:
            # Not even what it defines under a builtin's name: its range would end the tests' loops.
            space = {n: decode(v, Handle) for n, v in own.items() if not hasattr(builtins, n)}
            exec(code, {**space, "__name__": "tests", "__builtins__": builtins})
            passed = True
        except BaseException:
            pass
        report(number, passed)
judge()
"""
)
_RESULT_BYTES = 1024
"""Of each test, at most."""


class Judged(NamedTuple):
    """What became of the tests."""

    passed: tuple[bool, ...]
    why: str = ""
    """The tests themselves are at fault: there is no result."""


class CodeTests:
    """Judges programs by their tests, in pairs of boxes."""

    def __init__(self, sandboxes: LocalSandboxes) -> None:
        self._sandboxes = sandboxes
        # Two that each hold one box of a pair would wait for each other.
        self._pairs = asyncio.Semaphore(sandboxes.config.slots // 2)

    async def judge(self, program: str, tests: Sequence[str], seconds: float) -> Judged:
        """tests: Python code each, which fails by raising, and calls what the program defines.
        seconds: for all of them. Raises SandboxFailed.
        """
        async with self._pairs:
            return await self._judge(program, tests, seconds)

    async def _judge(self, program: str, tests: Sequence[str], seconds: float) -> Judged:
        boxes, nonce = self._sandboxes, secrets.token_hex(16)
        # Both boxes first: neither waits for the other, nor loses time by it, and descriptors are
        # sent while they are what they were.
        async with boxes.lent() as run_tests, boxes.lent() as run_program:
            ours, theirs = socket.socketpair()
            with ours, theirs, memory_file(b"") as results:
                given = json.dumps([nonce, list(tests)]).encode()
                both = [
                    asyncio.ensure_future(each)
                    for each in (
                        run_tests(
                            _JUDGE, input=given, seconds=seconds, fds=[ours.fileno(), results]
                        ),
                        run_program(
                            _JUDGED,
                            input=program.encode("utf-8", "replace"),
                            seconds=seconds + 1,
                            fds=[theirs.fileno()],
                        ),
                    )
                ]
                try:
                    # Ours are closed when one of them has ended, and the other sees it.
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    ours.close()
                    theirs.close()
                    await asyncio.gather(*both)
                finally:
                    for task in both:
                        task.cancel()
                    await asyncio.gather(*both, return_exceptions=True)
                said = os.pread(results, _RESULT_BYTES * (len(tests) + 1), 0)
        return _result(said, nonce, len(tests))

    async def compare(
        self, program: str, cases: Sequence[Mapping[str, str]], seconds: float
    ) -> Judged:
        """cases: what is on standard input, and what the program must print, but for white space
        at the ends of lines. seconds: for each.
        """
        passed = []
        for case in cases:
            expected = str(case["output"])
            most = max(self._sandboxes.config.max_output, 2 * len(expected.encode()) + 65536)
            ran = await self._sandboxes.run(
                program,
                input=str(case["input"]).encode(),
                seconds=seconds,
                max_output=most,
                has_errors=False,
            )
            right = _lines(expected)
            passed.append(ran.rc == 0 and not ran.killed and _lines(ran.text) == right)
        return Judged(tuple(passed))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _result(said: bytes, nonce: str, count: int) -> Judged:
    passed = [False] * count
    for line in said.splitlines():
        with contextlib.suppress(ValueError, TypeError, IndexError):
            given, number, result = json.loads(line)
            if given != nonce:
                continue
            if isinstance(result, str):
                return Judged(tuple(passed), result)
            passed[number] = result is True
    return Judged(tuple(passed))
