"""torch's CUDA for torch's CPU build, on a driver: tensors, memory, streams, events and graphs.

Each of torch's own kernels is a function of the host in a stream: once the driver comes to it, it
runs torch's kernel for the CPU on the GPU's memory. So it is late, recorded and replayed as ours
are. Memory is kept for reuse as torch does, at once in its own stream; what is freed is
overwritten. The driver is called by the real bindings.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver as cuda
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.driver.standin import Driver, HostFunction

_POISON = 0xA7
_OUT_OF_MEMORY, _NOT_READY = 2, 600
_MODES = {
    "global": cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    "thread_local": cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    "relaxed": cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
}


def call(name: str, *args: Any, may: Sequence[int] = ()) -> Any:
    """Call the driver; returns the results, or the status if that is one of ``may``.

    Raises:
        RuntimeError: it refuses.
    """
    status, *values = getattr(cuda, name)(*args)
    if int(status) in may:
        return status
    if int(status) != 0:
        raise RuntimeError(f"CUDA error: {status.name} by {name}")
    return values[0] if len(values) == 1 else (values or None)


# -- devices, streams, events ----------------------------------------------------------------------


class _Thread(threading.local):
    """What torch keeps for each thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_thread = _Thread()
_primary: dict[int, Any] = {}


def index_of(device: Any = None) -> int:
    """A GPU's number: the current one's if ``device`` does not say."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return _thread.device if index is None else index


@contextmanager
def using(index: int) -> Iterator[None]:
    """The driver is called in a GPU's context, which stays if the thread had none."""
    if index not in _primary:
        _primary[index] = call("cuDevicePrimaryCtxRetain", index)
    before, own = int(call("cuCtxGetCurrent")), int(_primary[index])
    if before != own:
        call("cuCtxSetCurrent", own)
    try:
        yield
    finally:
        if before not in (0, own):
            call("cuCtxSetCurrent", before)


@contextmanager
def device(which: Any) -> Iterator[None]:
    """See ``torch.cuda.device``."""
    before, _thread.device = _thread.device, index_of(which)
    try:
        with using(_thread.device):
            yield
    finally:
        _thread.device = before


@contextmanager
def relaxed() -> Iterator[None]:
    """This thread may call what could disturb a capture."""
    before = call("cuThreadExchangeStreamCaptureMode", _MODES["relaxed"])
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Stream:
    """See ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, *, default: bool = False) -> None:
        self.index, self.cuda_stream = index_of(device), 0
        if not default:
            with using(self.index):
                self.cuda_stream = int(call("cuStreamCreate", 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.index, self.cuda_stream))

    def synchronize(self) -> None:
        with using(self.index):
            call("cuStreamSynchronize", self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        event.wait(self)


class Event:
    """See ``torch.cuda.Event``: the driver's is made when it is first recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._flags = (1 if blocking else 0) | (0 if enable_timing else 2)
        self._index, self._handle = 0, 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with using(stream.index):
            if not self._handle:
                self._index, self._handle = stream.index, int(call("cuEventCreate", self._flags))
                weakref.finalize(self, cuda.cuEventDestroy, self._handle)
            call("cuEventRecord", self._handle, stream.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if self._handle:
            with using(stream.index):
                call("cuStreamWaitEvent", stream.cuda_stream, self._handle, 0)

    def synchronize(self) -> None:
        if self._handle:
            with using(self._index):
                call("cuEventSynchronize", self._handle)

    def query(self) -> bool:
        if not self._handle:
            return True
        with using(self._index):
            return call("cuEventQuery", self._handle, may=(_NOT_READY,)) is None

    def elapsed_time(self, last: Event) -> float:
        with using(self._index):
            return float(call("cuEventElapsedTime", self._handle, last._handle))


def current_stream(device: Any = None) -> Stream:
    """See ``torch.cuda.current_stream``."""
    index = index_of(device)
    if index not in _thread.streams:
        _thread.streams[index] = Stream(index, default=True)
    return _thread.streams[index]


@contextmanager
def stream(which: Stream) -> Iterator[None]:
    """See ``torch.cuda.stream``."""
    before = current_stream(which.index)
    with device(which.index):
        _thread.streams[which.index] = which
        try:
            yield
        finally:
            _thread.streams[which.index] = before


class Graph:
    """See ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._stream = current_stream()
        self._memory = gpu_memory(self._stream.index)
        self._memory.drain()
        with using(self._stream.index):
            call("cuStreamBeginCapture", self._stream.cuda_stream, _MODES[capture_error_mode])
        self._memory.pools[self._stream] = pool or object()

    def capture_end(self) -> None:
        self._memory.drain()
        del self._memory.pools[self._stream]
        with using(self._stream.index):
            made = call("cuStreamEndCapture", self._stream.cuda_stream)
            self._exec = int(call("cuGraphInstantiate", made, 0))
            call("cuGraphDestroy", made)
        weakref.finalize(self, cuda.cuGraphExecDestroy, self._exec)

    def replay(self) -> None:
        where = current_stream()
        gpu_memory(where.index).drain()
        kernels.launches.append("replay")
        with using(where.index):
            call("cuGraphLaunch", self._exec, where.cuda_stream)


# -- memory ----------------------------------------------------------------------------------------


def _bytes_at(address: int, nbytes: int) -> tuple[Tensor, Any]:
    """Memory as a tensor of the CPU, and what lives as long as that."""
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(buffer)), buffer


@dataclass(eq=False)
class _Block:
    """A piece of memory. Once freed, those who allocate in ``home`` may have it."""

    address: int
    nbytes: int
    home: object  # a stream, or a graph's pool
    stream: Stream | None = None  # that it was allocated in
    streams: set[Stream] = field(default_factory=set)  # of pinned RAM: those that copy
    free: bool = False


class GpuMemory:
    """A GPU's memory. Tensors end at any time: what they free is dealt with by the next call."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pools: dict[Stream, object] = {}  # of streams that are recorded
        self.blocks: dict[int, _Block] = {}
        self._kept: dict[tuple[object, int], list[_Block]] = defaultdict(list)
        self._ended: deque[_Block] = deque()
        self._lock = threading.RLock()

    def tensor(self, nbytes: int) -> Tensor:
        """New bytes, as a tensor of the CPU."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            self.drain()
            block = self._take(-(-nbytes // 512) * 512)
        whole, buffer = _bytes_at(block.address, nbytes)
        weakref.finalize(buffer, self.end, block)
        return whole

    def end(self, block: _Block) -> None:
        """Nothing refers to it."""
        if not block.free:
            block.free = True
            self._ended.append(block)

    def drain(self) -> None:
        """Keep what has ended for others."""
        with self._lock, using(self.index):
            while self._ended:
                block = self._ended.popleft()
                where = block.stream
                assert where is not None
                if block.home == where or where in self.pools:  # else replays may be writing it
                    call("cuMemsetD8Async", block.address, _POISON, block.nbytes, where.cuda_stream)
                self._kept[block.home, block.nbytes].append(block)

    def _take(self, nbytes: int) -> _Block:
        where = current_stream(self.index)
        home = self.pools.get(where, where)
        kept = self._kept[home, nbytes]
        if kept:
            block = kept.pop()
        else:
            block = _Block(self._alloc(nbytes), nbytes, home)
            self.blocks[block.address] = block
        block.stream, block.free = where, False
        return block

    def _alloc(self, nbytes: int) -> int:
        with using(self.index), relaxed():
            found = call("cuMemAlloc", nbytes, may=(_OUT_OF_MEMORY,))
            if found == _OUT_OF_MEMORY and not self.pools:
                self.empty_cache()
                found = call("cuMemAlloc", nbytes, may=(_OUT_OF_MEMORY,))
            if found == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {nbytes} bytes")
            return int(found)

    def empty_cache(self) -> None:
        """See ``torch.cuda.empty_cache``."""
        self.drain()
        with self._lock, using(self.index):
            for key in list(self._kept):
                if isinstance(key[0], Stream):
                    for block in self._kept.pop(key):
                        call("cuMemFree", block.address)
                        del self.blocks[block.address]

    def give_back(self) -> None:
        """Free all."""
        with using(self.index):
            for address in self.blocks:
                call("cuMemFree", address)

    def block_of(self, tensor: DeviceTensor) -> _Block:
        """Where a tensor lies."""
        return self.blocks[tensor.inner.untyped_storage().data_ptr()]

    def allocated(self) -> int:
        """Bytes of tensors."""
        self.drain()
        return sum(block.nbytes for block in self.blocks.values() if not block.free)


_memories: dict[int, GpuMemory] = {}


def gpu_memory(device: Any = None) -> GpuMemory:
    """The memory of a GPU."""
    return _memories.setdefault(index_of(device), GpuMemory(index_of(device)))


class _HostMemory:
    """Pinned RAM, which is used again once the copies from and to it have ended."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._ended: deque[_Block] = deque()
        self._waiting: list[tuple[_Block, list[Event]]] = []
        self._lock = threading.Lock()

    def tensor(self, nbytes: int) -> Tensor:
        """New bytes."""
        size = 1 << max(9, (nbytes - 1).bit_length())
        with self._lock, using(_thread.device), relaxed():
            self._drain()
            block = next((b for b in self._blocks.values() if b.free and b.nbytes == size), None)
            if block is None:
                block = _Block(int(call("cuMemHostAlloc", size, 0)), size, None)
                self._blocks[block.address] = block
            block.free, block.streams = False, set()
        whole, buffer = _bytes_at(block.address, nbytes)
        weakref.finalize(buffer, self._ended.append, block)
        return whole

    def use(self, tensor: Tensor, stream: Stream) -> None:
        """A copy has begun."""
        with self._lock:
            if block := self._blocks.get(tensor.untyped_storage().data_ptr()):
                block.streams.add(stream)

    def give_back(self) -> None:
        """Free all: nothing uses it any more."""
        with using(0):
            for address in self._blocks:
                call("cuMemFreeHost", address)
        self._blocks.clear()
        self._ended.clear()
        self._waiting.clear()

    def _drain(self) -> None:
        while self._ended:
            block = self._ended.popleft()
            events = [Event() for _ in block.streams]
            for event, user in zip(events, block.streams, strict=True):
                event.record(user)
            self._waiting.append((block, events))
        for block, events in list(self._waiting):
            if all(event.query() for event in events):
                self._waiting.remove((block, events))
                block.free = True
                ctypes.memset(block.address, _POISON, block.nbytes)


_host = _HostMemory()


# -- tensors ---------------------------------------------------------------------------------------

Place = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]  # address, bytes, ...


class DeviceTensor(Tensor):
    """A tensor on a GPU. ``inner`` is its memory as a tensor of the CPU, for the address alone."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", index),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return _step(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.dtype} {tuple(self.shape)} on {self.device}>"

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        return _copy(self, source, non_blocking)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, key: Any) -> Any:  # torch's own needs more of a GPU
        if chosen := _chosen(key):
            return torch.ops.aten.index(self, chosen)
        return DeviceTensor(self.inner[key], index_of(self.device))

    def __setitem__(self, key: Any, value: Any) -> None:
        if chosen := _chosen(key):
            torch.ops.aten.index_put_(self, chosen, value)
        elif isinstance(value, Tensor):
            self[key].copy_(value)
        else:
            self[key].fill_(value)

    def untyped_storage(self) -> Any:
        memory = gpu_memory(self.device)

        def resize_(nbytes: int) -> None:
            assert nbytes == 0, "it is only freed"
            memory.end(memory.block_of(self))

        inner = self.inner.untyped_storage()
        return SimpleNamespace(resize_=resize_, data_ptr=inner.data_ptr, nbytes=inner.nbytes)


def _chosen(key: Any) -> list[Any]:
    """The tensors of an index; none if it is a view."""
    keys = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(each, Tensor) for each in keys):
        return []
    assert all(isinstance(each, Tensor) or each == slice(None) for each in keys), key
    return [each if isinstance(each, Tensor) else None for each in keys]


def _place(tensor: Tensor) -> Place:
    """Where a tensor lies, without keeping it."""
    span = 0
    if tensor.numel():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        span = (last + 1) * tensor.element_size()
    return tensor.data_ptr(), span, tensor.dtype, tensor.shape, tensor.stride()


def _at(place: Place) -> Tensor:
    address, span, dtype, shape, stride = place
    if not span:
        return torch.empty(shape, dtype=dtype)
    return _bytes_at(address, span)[0].view(dtype).as_strided(shape, stride)


def new(shape: Sequence[int], dtype: torch.dtype, index: int, stride: Any = None) -> DeviceTensor:
    """Memory of a GPU without contents."""
    count = math.prod(shape)
    whole = gpu_memory(index).tensor(count * dtype.itemsize)
    flat = whole.view(dtype)
    inner = flat.view(tuple(shape)) if stride is None else flat.as_strided(tuple(shape), stride)
    return DeviceTensor(inner, index)


class Kernels:
    """Functions of the host that stand for torch's kernels, by their numbers."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all: dict[int, tuple[Callable[[], None], list[Place], int, bool]] = {}
        self._numbers = itertools.count(1)
        self._called = HostFunction(self._run)
        self.errors: list[BaseException] = []
        self.launches: list[str] = []  # names of torch's kernels, or replay
        self.refused = False  # an error of the runtime's that was not asked for

    def launch(self, name: str, body: Callable[[], None], index: int, uses: list[Place]) -> None:
        """Start ``body`` in the current stream, which uses this memory."""
        if self.refused:
            self.refused = False
            raise RuntimeError("CUDA error: of an earlier call")
        where, memory = current_stream(index), gpu_memory(index)
        memory.drain()
        number = next(self._numbers)
        self.launches.append(name)
        self._all[number] = (body, uses, index, where in memory.pools)
        with using(index):
            self._driver.launch(where.cuda_stream, self._called, number)

    def _run(self, number: int) -> None:
        body, uses, index, recorded = self._all[number]
        if not recorded:  # a graph may replay it, even once it has ended
            del self._all[number]
        try:
            if not all(self._driver.has(place[0], place[1]) for place in uses):
                self._driver.fault(index)
                return
            with torch.inference_mode():
                body()
        except BaseException as error:  # noqa: BLE001 - nothing may pass through the driver
            self.errors.append(error)
            self._driver.fault(index)


kernels: Kernels

_WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"}
_SIZES = {"aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2"}
_VIEWS = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias"}


def _step(func: Any, args: Any, kwargs: Any) -> Any:
    """One of torch's steps with a tensor on a GPU."""
    name = func.name().split(".")[0]
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    parts = func.decompose(*args, **kwargs)  # in inference mode torch does not do it before
    if parts is not NotImplemented:
        return parts
    flat, form = tree_flatten((args, kwargs))
    there = [each for each in flat if isinstance(each, DeviceTensor)]
    index = there[0].device.index
    if any(each.device.index != index for each in there):
        raise RuntimeError("Expected all tensors to be on the same device")
    if func.is_view or name in _VIEWS:
        found = func(*_inner(args), **_inner(kwargs))
        return tree_map_only(Tensor, lambda each: DeviceTensor(each, index), found)
    if name == "aten::_to_copy":
        return _to_copy(args[0], func, index, kwargs)
    if name in _WAITS or name in _SIZES or _by_mask(name, args):
        current_stream(index).synchronize()
        found = func(*_inner(args), **_inner(kwargs))
        return tree_map_only(Tensor, lambda each: upload(each.contiguous(), index), found)
    if kwargs.get("device") is not None:
        if torch.device(kwargs["device"]).type == "cpu":
            return func(*_meta(args), **{**_meta(kwargs), "device": "cpu"})
        kwargs = {**kwargs, "device": torch.device("cuda", index)}
        form = tree_flatten((args, kwargs))[1]
        flat = tree_flatten((args, kwargs))[0]
    return _launch(func, name, flat, form, index)


def _by_mask(name: str, args: Any) -> bool:
    """Whether the result's size depends on values."""
    return name == "aten::index" and any(
        each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
    )


def _inner(tree: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda each: each.inner, tree)


def _meta(tree: Any) -> Any:
    def bare(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return tree_map_only(Tensor, bare, tree)


def _launch(func: Any, name: str, flat: list[Any], form: Any, index: int) -> Any:
    """Start torch's kernel. What it makes has its memory before."""
    mutated = {
        number
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    args, kwargs = tree_unflatten(flat, form)
    on_meta = [torch.device("meta") if isinstance(each, torch.device) else each for each in flat]
    meta_args, meta_kwargs = _meta(tree_unflatten(on_meta, form))
    results, shape_of = tree_flatten(func(*meta_args, **meta_kwargs))
    made: list[Any] = []
    written = [args[n] for n in sorted(mutated) if n < len(args)]
    written += [
        kwargs[argument.name]
        for n, argument in enumerate(func._schema.arguments)
        if n in mutated and argument.name in kwargs
    ]
    for number, each in enumerate(results):
        if not isinstance(each, Tensor):
            made.append(each)
        elif written:
            made.append(written[number])
        else:
            made.append(new(each.shape, each.dtype, index, each.stride()))
    if name.startswith(("aten::empty", "aten::new_empty")):
        return tree_unflatten(made, shape_of)
    given: list[Any] = []
    uses: list[Place] = []
    for each in flat:
        if isinstance(each, DeviceTensor):
            given.append(_place(each.inner))
            uses.append(given[-1])
        elif isinstance(each, Tensor):
            if each.dim() and name not in ("aten::index", "aten::index_put_"):
                raise RuntimeError("Expected all tensors to be on the same device")
            given.append(each.clone())
        else:
            given.append(torch.device("cpu") if isinstance(each, torch.device) else each)
    outs = [] if written else [_place(each.inner) for each in made]
    uses += outs

    def body() -> None:
        now = [_at(each) if _is_place(each) else each for each in given]
        here_args, here_kwargs = tree_unflatten(now, form)
        found = tree_flatten(func(*here_args, **here_kwargs))[0]
        for out, each in zip(outs, found, strict=False):
            _at(out).copy_(each)

    kernels.launch(name, body, index, uses)
    return tree_unflatten(made, shape_of)


def _is_place(each: object) -> bool:
    return isinstance(each, tuple) and len(each) == 5 and isinstance(each[2], torch.dtype)


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous()


def _copy(out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``copy_`` as torch does it: by the driver where bytes are bytes, else with a step before."""
    to_gpu, from_gpu = isinstance(out, DeviceTensor), isinstance(source, DeviceTensor)
    source = source if source.shape == out.shape else source.expand(out.shape)
    if not out.numel():
        return out
    nbytes = out.numel() * out.element_size()
    plain = source.dtype == out.dtype and source.is_contiguous() and out.is_contiguous()
    if to_gpu and from_gpu:
        index = out.device.index
        if plain:
            _driver_copy("cuMemcpyDtoDAsync", out, source, nbytes, index)
            return out
        places = _place(out.inner), _place(source.inner)
        kernels.launch("copy_", lambda: _copy_places(*places), index, list(places))
        return out
    if to_gpu:
        index = out.device.index
        staged = source.to(out.dtype).contiguous()
        there = out if out.is_contiguous() else new(out.shape, out.dtype, index)
        _driver_copy("cuMemcpyHtoDAsync", there, staged, nbytes, index)
        if there is not out:
            _copy(out, there)
        _host.use(staged, current_stream(index))
    else:
        index = source.device.index
        if not plain:  # torch converts on the GPU
            source = source.to(out.dtype).contiguous()
        here = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        _driver_copy("cuMemcpyDtoHAsync", here, source, nbytes, index)
        if here is not out:
            current_stream(index).synchronize()
            out.copy_(here)
        _host.use(out, current_stream(index))
    if not non_blocking:
        current_stream(index).synchronize()
    return out


def _copy_places(out: Place, source: Place) -> None:
    _at(out).copy_(_at(source))


def _driver_copy(name: str, out: Tensor, source: Tensor, nbytes: int, index: int) -> None:
    gpu_memory(index).drain()
    where = current_stream(index).cuda_stream
    with using(index):
        call(name, out.data_ptr(), source.data_ptr(), nbytes, where)


def _to_copy(source: Tensor, func: Any, index: int, kwargs: Any) -> Tensor:
    target = kwargs.get("device")
    if target is None or torch.device(target).type == "cuda":
        kwargs = {**kwargs, "device": torch.device("cuda", index)}
        flat, form = tree_flatten(((source,), kwargs))
        return _launch(func, "aten::_to_copy", flat, form, index)
    like = func(_meta(source), **{**kwargs, "device": torch.device("meta")})
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    _copy(out, source, kwargs.get("non_blocking", False))
    return out


def upload(source: Tensor, index: int, *, non_blocking: bool = False) -> DeviceTensor:
    """A copy on a GPU."""
    source = source if source.is_contiguous() else source.contiguous()
    out = new(source.shape, source.dtype, index)
    _copy(out, source, non_blocking)
    return out


# -- torch -----------------------------------------------------------------------------------------

_MADE = ("tensor", "empty", "zeros", "ones", "full", "arange", "randn", "randint")
_LIKE = ("empty_like", "zeros_like")


def _factory(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors, for GPUs and pinned RAM too."""
    name = plain.__name__

    def make(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            like = plain(*args, device="meta", **options)
            return (
                _host.tensor(like.numel() * like.element_size()).view(like.dtype).view(like.shape)
            )
        if device is None or torch.device(device).type != "cuda":
            return plain(*args, device=device, **options)
        index = index_of(device)
        if isinstance(args[0], DeviceTensor):
            return plain(*args, **options)
        if name == "tensor":
            return upload(plain(*args, **options), index)
        if name in ("empty", "empty_like"):
            like = plain(*args, device="meta", **options)
            return new(like.shape, like.dtype, index)
        values = plain(*args, **options)
        out = new(values.shape, values.dtype, index)
        place = _place(out.inner)
        kernels.launch(name, lambda: _copy_values(place, values), index, [place])
        return out

    return make


def _copy_values(place: Place, values: Tensor) -> None:
    _at(place).copy_(values)


def _to(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            return plain(tensor, *args, **options)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **options)
        if device is None or device.type != "cuda":
            return plain(tensor, *args, **options)
        source = tensor if dtype is None else plain(tensor, dtype)
        return upload(source, index_of(device), non_blocking=non_blocking)

    return to


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    out = _host.tensor(tensor.numel() * tensor.element_size()).view(tensor.dtype)
    return out.view(tensor.shape).copy_(tensor)


class _Runtime:
    """See ``torch.cuda.cudart``: an error is raised again by the next kernel of torch's."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return self._call(cuda.cuMemHostRegister, address, nbytes, flags)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return self._call(cuda.cuMemHostUnregister, address)

    def _call(self, function: Callable[..., Any], *args: int) -> int:
        with using(_thread.device):
            (status,) = function(*args)
        kernels.refused |= int(status) != 0
        return int(status)


def _attribute(name: str, index: int) -> int:
    kinds = cuda.CUdevice_attribute
    return int(call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), index))


def _properties(device: Any = None) -> Any:
    index = index_of(device)
    return SimpleNamespace(
        multi_processor_count=_attribute("MULTIPROCESSOR_COUNT", index),
        L2_cache_size=_attribute("L2_CACHE_SIZE", index),
    )


def _capability(device: Any = None) -> tuple[int, int]:
    kinds = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
    major, minor = (_attribute(kind, index_of(device)) for kind in kinds)
    return major, minor


def _name(device: Any = None) -> str:
    return bytes(call("cuDeviceGetName", 256, index_of(device))).rstrip(b"\0").decode()


def _info(device: Any = None) -> tuple[int, int]:
    with using(index_of(device)):
        free, total = call("cuMemGetInfo")
        return int(free), int(total)


def _synchronize(device: Any = None) -> None:
    with using(index_of(device)):
        call("cuCtxSynchronize")


def _reserved(device: Any = None) -> int:
    return sum(block.nbytes for block in gpu_memory(device).blocks.values())


def install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Have torch compute on ``driver``."""
    global kernels
    kernels = Kernels(driver)
    _runtime = _Runtime()
    for name, replacement in {
        "is_available": lambda: True,
        "device_count": lambda: int(call("cuDeviceGetCount")),
        "current_device": lambda: _thread.device,
        "get_device_capability": _capability,
        "get_device_name": _name,
        "get_device_properties": _properties,
        "mem_get_info": _info,
        "memory_reserved": _reserved,
        "memory_allocated": lambda device=None: gpu_memory(device).allocated(),
        "empty_cache": lambda: [memory.empty_cache() for memory in _memories.values()],
        "synchronize": _synchronize,
        "cudart": lambda: _runtime,
        "graph_pool_handle": object,
        "current_stream": current_stream,
        "device": device,
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    for name in (*_MADE, *_LIKE):
        monkeypatch.setattr(torch, name, _factory(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "to", _to(Tensor.to))
    monkeypatch.setattr(Tensor, "pin_memory", _pin)
    monkeypatch.setattr(
        Tensor,
        "is_pinned",
        lambda t, device=None: driver.has(t.data_ptr(), t.numel() * t.element_size()),
    )
    return kernels


def close() -> None:
    """Every tensor has ended: the GPUs are empty."""
    gc.collect()
    for memory in _memories.values():
        memory.empty_cache()
        # Those of pools end with their graphs.
        left = [block.nbytes for block in memory.blocks.values() if not block.free]
        assert not left, f"{len(left)} tensors are left, of {sum(left)} bytes"
        memory.give_back()
    _memories.clear()
    _host.give_back()
