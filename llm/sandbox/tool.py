"""A Python interpreter as a tool of a model: code in, what it printed out."""

from __future__ import annotations

from unirl.llm.sandbox.box import Ran, Sandboxes, boxed

_HALF = 2000
"""Characters that are kept of each end of a long output."""


class PythonTool:
    """Runs code, each time in a box of its own."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def run(self, code: str, seconds: float) -> str:
        """What the model is given: what the code printed, and how it ended if not well. Raises
        SandboxFailed.
        """
        async with boxed(self._sandboxes) as box:
            return as_text(await box.run(code, seconds=seconds), seconds)


def as_text(ran: Ran, seconds: float) -> str:
    """How a program ended, in words for a model."""
    text = ran.text.rstrip()
    if len(text) > 2 * _HALF:
        left_out = len(text) - 2 * _HALF
        text = f"{text[:_HALF]}\n... {left_out} characters left out ...\n{text[-_HALF:]}"
    ending = {
        "time": f"It was ended after {seconds:g} seconds.",
        "output": "It was ended: it printed too much.",
        "memory": "It was ended: it used too much memory.",
        "crash": "It was ended: it crashed.",
        "": "" if ran.rc == 0 else f"Exit code {ran.rc}.",
    }[ran.killed]
    return "\n".join(part for part in (text, ending) if part) or "(no output)"
