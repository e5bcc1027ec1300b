"""Plans where each unit of a model should be on a machine, and forecasts how fast that will be.

Everything here is arithmetic on numbers of bytes and operations: no weight is read, no file but the
cached measurements is written, torch is never imported. It knows rates, placements and schedules,
but no models' names, and not the code that executes a placement (``offload/pipeline``).

Start with ``plan.py`` (the request and the plan) and ``advice.make_plan``. ``machine.py`` holds a
machine's rates, ``costs.py`` turns them into seconds; ``measure.py`` measures rates, or ``pc.py``
and ``gpus.py`` read them from a description. ``shapes.py`` gets a model's sizes from its config.
``search.py`` tries ring sizes, ``solve.py`` places units for each, ``simulate.py`` replays the
schedule as ``offload/ring.py`` runs it. ``predict.py`` forecasts speed with or without a replay,
``verdict.py`` judges it for chat, ``advice.py`` finds what would help, ``report.py`` prints it all.
A forecast shown beside a measurement uses the rates that disk and CPU had in recent passes.
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
