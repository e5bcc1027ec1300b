"""A large card as a small one: kernels on 24 of its processors, and the clock that they run at.

Bytes per clock and processor carry over from one card to another, shares of its bandwidth do not.
The processors are a green context's, through CUDA's driver; where that is not to be had the reason
is kept.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

__all__ = ["PROCESSORS", "processors_of", "sm_clock_hz", "small_card", "stream_seconds"]

PROCESSORS = 24  # of an RTX 4060
_RUNS = 5


def processors_of(device: str) -> int:
    """The card's own."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def sm_clock_hz() -> float:
    """The processors' clock while memory is busy; what the card is rated at, if nobody tells."""
    here = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here)
    for _ in range(3000):  # half a second, and on small cards some
        there.copy_(here)
    try:
        command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return float(done.stdout.splitlines()[0]) * 1e6
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
        return 1e3 * float(_checked(driver.cuDeviceGetAttribute(attribute, _device(driver))))
    finally:
        torch.cuda.synchronize()


@cache
def small_card() -> tuple[Any, int, str]:
    """A stream whose kernels run on about ``PROCESSORS`` processors, and how many they are; or
    None, and why.
    """
    try:
        from cuda.bindings import driver

        device = _device(driver)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = _checked(driver.cuDeviceGetDevResource(device, kind))
        answer = driver.cuDevSmResourceSplitByCount(1, whole, 0, PROCESSORS)
        groups, count, _ = _checked(answer)
        if not count:
            return None, 0, "the card cannot be split"
        description = _checked(driver.cuDevResourceGenerateDesc(groups[:1], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = _checked(driver.cuGreenCtxCreate(description, device, int(flags)))
        plain = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = _checked(driver.cuGreenCtxStreamCreate(context, int(plain), 0))
        return torch.cuda.ExternalStream(int(stream)), int(groups[0].sm.smCount), ""
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return None, 0, f"no green context ({str(error)[:120]})"


def stream_seconds(launches: Sequence[Callable[[], Any]], stream: Any) -> float:
    """Median seconds of one of ``launches`` on ``stream``, started one by one."""
    samples = []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(_RUNS + 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for launch in launches:
                launch()
            last.record()
            last.synchronize()
            samples.append(first.elapsed_time(last) / 1e3 / len(launches))
    torch.cuda.synchronize()
    return statistics.median(samples[1:])


def _device(driver: Any) -> Any:
    torch.cuda.init()
    return _checked(driver.cuDeviceGet(torch.cuda.current_device()))


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver returns: one value, or a tuple of them."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(str(status))
    return values[0] if len(values) == 1 else tuple(values)
