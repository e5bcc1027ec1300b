"""What to type: a plan's changes and contexts, each with its command.

Commands name the model as the user did, with the options that it was planned with.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from localrt.common.option_names import on_command_line
from localrt.offload.planner.plan import Plan

FILE = "file"
"""The option of a change that takes another of a repository's files."""


def with_commands(plan: Plan, model: str, options: Mapping[str, object], *, weights: bool) -> Plan:
    """``plan`` of ``model``, planned with these ``options`` of ``load``, with what to type.

    Without ``weights`` on this machine there are none to quantize.
    """
    changes = []
    for change in plan.changes:
        name, value = change.option or ("", "")
        command = ""
        if name == "format":
            if plan.sizes or not weights:
                continue  # sizes in bits, or other files, say it better
            command = typed("quantize", model, {name: value})
        elif name == FILE:
            command = typed("chat", value, options)
        elif name:
            command = typed("chat", model, {**options, name: value})
        changes.append(replace(change, command=command))
    contexts = tuple(
        replace(each, command=typed("chat", model, {**options, "ctx": each.tokens}))
        for each in plan.contexts
    )
    return replace(
        plan,
        command=typed("chat", model, options),
        changes=tuple(changes),
        contexts=contexts,
    )


def typed(command: str, model: str, options: Mapping[str, object]) -> str:
    """``"localrt chat model.gguf --ctx 8192"``."""
    words = ["localrt", command, shlex.quote(model)]
    return " ".join(words + [on_command_line(name, value) for name, value in options.items()])
