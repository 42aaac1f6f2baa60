"""The package transformers, or an error that says how to get it."""

from __future__ import annotations

from typing import Any

from unirl.llm.packages import needs


def import_transformers() -> Any:
    with needs("transformers", "no language model can be loaded"):
        import transformers
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()  # type: ignore[no-untyped-call]  # it would be drawn over the console
    return transformers


def brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
