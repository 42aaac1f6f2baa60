"""The tool `calculator`: arithmetic, read as a syntax tree and never evaluated as code."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from unirl.llm.agents.tools.tool import ToolError

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)
_MOST_CHARACTERS = 400
_MOST_BITS = 4096
"""Of an exact result: powers of powers would otherwise fill the memory."""


def _round(value: Any, digits: Any = None) -> Any:
    """Python works out 10**-digits, however large it is."""
    if digits is not None and abs(digits) > _MOST_CHARACTERS:
        raise OverflowError("the result is too large")
    return round(value, digits)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"sqrt": math.sqrt, "abs": abs, "round": _round, "min": min, "max": max}
)


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses; sqrt, abs, round, min and max.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ToolError(f"an expression has at most {_MOST_CHARACTERS} characters.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what models write, such as 3if
            result = _value(ast.parse(expression.strip(), mode="eval").body)
        return f"{result:.12g}" if isinstance(result, float) else str(result)
    except SyntaxError:
        raise ToolError("this is no arithmetic expression.") from None
    except (ArithmeticError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"it has no result: {error}.") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _bounded(function(*map(_value, node.args)))
    raise ToolError("it may hold numbers, + - * / // % **, parentheses and a few functions alone.")


def _power(base: Any, exponent: Any) -> Any:
    is_exact = isinstance(base, int) and isinstance(exponent, int) and exponent > 0
    if is_exact and base.bit_length() * exponent > _MOST_BITS:
        raise OverflowError("the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return _bounded(result)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise OverflowError("the result is too large")
    return value
