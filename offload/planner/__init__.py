"""Where every unit of a model should be on a machine, how fast that will be, and why.

Everything here is arithmetic on numbers of bytes and operations: no weight is read, no file but the
cached measurements is written, torch is never imported. It knows rates, placements and schedules,
and neither models' names nor who carries a placement out (``offload/pipeline``).

Start with ``plan.py`` (what is asked, what is answered) and ``advice.make_plan``. ``machine.py`` is
a machine in rates, ``costs.py`` turns rates into seconds; the rates are measured by ``measure.py``
or described in words (``pc.py``, ``gpus.py``). ``shapes.py`` has a model's sizes from its config.
``search.py`` tries ring sizes, ``solve.py`` fills them by rules, ``simulate.py`` replays the
schedule byte by byte as ``offload/ring.py`` has it. ``predict.py`` says what to expect, with a
replay or without, ``verdict.py`` whether that is good for chat, ``advice.py`` what would help,
``report.py`` all of it in words. ``pair.py`` places a draft beside its target. A forecast shown
beside a measurement uses the rates that disk and CPU had in recent passes.
"""

from localrt.offload.account import Budgets
from localrt.offload.planner.advice import make_plan
from localrt.offload.planner.machine import GpuProfile, MachineProfile
from localrt.offload.planner.plan import Plan, PlanRequest, Prediction
from localrt.offload.planner.shapes import shape_from_config
from localrt.offload.shapes import ModelShape, shape_from_checkpoint

__all__ = [
    "Budgets",
    "GpuProfile",
    "MachineProfile",
    "ModelShape",
    "Plan",
    "PlanRequest",
    "Prediction",
    "make_plan",
    "shape_from_checkpoint",
    "shape_from_config",
]
