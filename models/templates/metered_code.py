"""Jinja2's compiler, changed so that the code it writes charges a meter.

Every turn of a loop and every call of a macro is charged before it begins, with the text and the
expressions in it. Operators whose result can be large are calls of the meter's methods. Does not
know what anything costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

from localrt.models.templates.meter import METER

__all__ = ["FILTERED_ITEM", "MeteredCodeGenerator"]

FILTERED_ITEM = "an item that a loop looks at"
"""The test that charges an item which a loop's ``if`` may leave out."""

_TURN = 64  # units of a turn of a loop, or of a call of a macro
_EXPRESSION = 24
_VISIT = 256  # units of each piece of the template, while it is compiled


class MeteredCodeGenerator(CodeGenerator):
    """Writes Python that charges ``environment.meter()``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns: dict[int, int] = {}  # by the id of a body, what each time through it costs

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write ``node``. This is charged as well: what compiles it has a meter of its own."""
        METER.get().spend(_VISIT)
        match node:
            case nodes.Template():
                self._prepare(node)
            case nodes.For() | nodes.Macro() | nodes.CallBlock():
                self._turns[id(node.body)] = _turn(node)
        visitor = _OPERATORS.get(type(node))
        if visitor is not None:
            return visitor(self, node, *args, **kwargs)
        return super().visit(node, *args, **kwargs)

    def _prepare(self, template: nodes.Template) -> None:
        for block in template.find_all(nodes.Block):
            self._turns[id(block.body)] = _turn(block)
        for loop in template.find_all(nodes.For):
            if loop.test is not None:
                looked = nodes.Test(loop.test, FILTERED_ITEM, [], [], None, None)
                loop.test = looked.set_lineno(loop.lineno)

    def write_commons(self) -> None:
        """Write what begins the template and each of its blocks."""
        super().write_commons()
        self.writeline("meter = environment.meter()")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write a body, and first what it costs if it can come again."""
        if cost := self._turns.get(id(nodes)):
            self.writeline(f"meter.spend({cost})")
        super().blockvisit(nodes, frame)

    def call(self, method: str, *parts: nodes.Node | str, frame: Frame) -> None:
        """Write a call of the meter's ``method`` with ``parts``: expressions, or Python's text."""
        self.write(f"meter.{method}(")
        for part in parts:
            if isinstance(part, str):
                self.write(part)
            else:
                self.visit(part, frame)
                self.write(", ")
        self.write(")")

    def _make_finalize(self) -> CodeGenerator._FinalizeInfo:
        return self._FinalizeInfo(None, None)  # no constant is computed while compiling

    def _output_child_pre(self, *args: Any) -> None:
        self.write("meter.show(")


def _turn(node: nodes.Node) -> int:
    cost = _TURN
    for part in node.find_all((nodes.Expr, nodes.Stmt)):
        cost += _EXPRESSION
        if isinstance(part, nodes.TemplateData):
            cost += len(part.data)
        elif isinstance(part, nodes.Const) and isinstance(part.value, str):
            cost += len(part.value)
    return cost


def _operator(method: str) -> Callable[[MeteredCodeGenerator, Any, Frame], None]:
    def write(code: MeteredCodeGenerator, node: nodes.BinExpr, frame: Frame) -> None:
        code.call(method, node.left, node.right, frame=frame)

    return write


def _add(code: MeteredCodeGenerator, node: nodes.Add, frame: Frame) -> None:
    terms: list[nodes.Node] = [node.right]
    while isinstance(node.left, nodes.Add):
        node = node.left
        terms.append(node.right)
    code.call("add", node.left, *reversed(terms), frame=frame)


def _concat(code: MeteredCodeGenerator, node: nodes.Concat, frame: Frame) -> None:
    code.call("join", *node.nodes, frame=frame)


def _compare(code: MeteredCodeGenerator, node: nodes.Compare, frame: Frame) -> None:
    operands = [node.expr, *(operand.expr for operand in node.ops)]
    code.write("(")
    for index, operand in enumerate(operands):
        word = node.ops[index - 1].op if index else ""
        if index:
            code.write(_WORDS[word])
        beside = operands[max(index - 1, 0) : index + 2]
        searched = word in ("in", "notin")
        if _is_small(operand) or (not searched and any(map(_is_small, beside))):
            code.visit(operand, frame)
        else:
            code.call("searched" if searched else "compared", operand, frame=frame)
    code.write(")")


_WORDS = {
    "eq": " == ",
    "ne": " != ",
    "gt": " > ",
    "gteq": " >= ",
    "lt": " < ",
    "lteq": " <= ",
    "in": " in ",
    "notin": " not in ",
}


def _is_small(node: nodes.Expr) -> bool:
    """Whether comparing with ``node`` costs next to nothing, whatever it is compared with."""
    if isinstance(node, (nodes.Tuple, nodes.List)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, (nodes.Const, nodes.Compare, nodes.Not, nodes.Test))


def _getitem(code: MeteredCodeGenerator, node: nodes.Getitem, frame: Frame) -> None:
    if isinstance(node.arg, nodes.Const):
        code.visit_Getitem(node, frame)
        return
    if not isinstance(node.arg, nodes.Slice):
        code.write("environment.getitem(")
        code.visit(node.node, frame)
        code.write(", ")
        code.call("key", node.arg, frame=frame)
        code.write(")")
        return
    bounds = node.arg
    code.write("meter.part(")
    code.visit(node.node, frame)
    code.write(", slice(")
    for part in (bounds.start, bounds.stop, bounds.step):
        if part is None:
            code.write("None, ")
        else:
            code.visit(part, frame)
            code.write(", ")
    code.write("))")


def _dict(code: MeteredCodeGenerator, node: nodes.Dict, frame: Frame) -> None:
    code.write("{")
    for pair in node.items:
        if isinstance(pair.key, nodes.Const):
            code.visit(pair.key, frame)
        else:
            code.call("key", pair.key, frame=frame)
        code.write(": ")
        code.visit(pair.value, frame)
        code.write(", ")
    code.write("}")


_OPERATORS: dict[type[nodes.Node], Callable[..., None]] = {
    nodes.Add: _add,
    nodes.Compare: _compare,
    nodes.Concat: _concat,
    nodes.Dict: _dict,
    nodes.Getitem: _getitem,
    nodes.Mod: _operator("modulo"),
    nodes.Mul: _operator("multiply"),
    nodes.Pow: _operator("power"),
    nodes.Sub: _operator("subtract"),
}
