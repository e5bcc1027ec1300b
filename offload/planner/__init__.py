"""Where every unit of a model should live on a machine, how fast that will be, and why.

``make_plan`` is the way in. Everything here is arithmetic on numbers of bytes and operations: no
weight is read, no file but the cached measurements is written, and torch is never imported.
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
