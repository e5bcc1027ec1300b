"""Tensors on a GPU: what torch's dispatcher does with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.driver.torch_cuda.launches import Kernels, Place, at_place, is_place, place_of
from tests.driver.torch_cuda.memory import gpu_memory, host_memory
from tests.driver.torch_cuda.streams import call, current_stream, index_of, using


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
        memory, inner = gpu_memory(self.device), self.inner.untyped_storage()

        def resize_(nbytes: int) -> None:
            assert nbytes == 0, "it is only freed"
            memory.end(memory.blocks[inner.data_ptr()])

        return SimpleNamespace(resize_=resize_, data_ptr=inner.data_ptr, nbytes=inner.nbytes)


def _chosen(key: Any) -> list[Any]:
    """The tensors of an index; none if it is a view."""
    keys = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(each, Tensor) for each in keys):
        return []
    assert all(isinstance(each, Tensor) or each == slice(None) for each in keys), key
    return [each if isinstance(each, Tensor) else None for each in keys]


def new(shape: Sequence[int], dtype: torch.dtype, index: int, stride: Any = None) -> DeviceTensor:
    """Memory of a GPU without contents."""
    count = math.prod(shape)
    whole = gpu_memory(index).tensor(count * dtype.itemsize)
    flat = whole.view(dtype)
    inner = flat.view(tuple(shape)) if stride is None else flat.as_strided(tuple(shape), stride)
    return DeviceTensor(inner, index)


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
            given.append(place_of(each.inner))
            uses.append(given[-1])
        elif isinstance(each, Tensor):
            if each.dim() and name not in ("aten::index", "aten::index_put_"):
                raise RuntimeError("Expected all tensors to be on the same device")
            given.append(each.clone())
        else:
            given.append(torch.device("cpu") if isinstance(each, torch.device) else each)
    outs = [] if written else [place_of(each.inner) for each in made]
    uses += outs

    def body() -> None:
        now = [at_place(each) if is_place(each) else each for each in given]
        here_args, here_kwargs = tree_unflatten(now, form)
        found = tree_flatten(func(*here_args, **here_kwargs))[0]
        for out, each in zip(outs, found, strict=False):
            at_place(out).copy_(each)

    Kernels.installed.launch(name, body, index, uses)
    return tree_unflatten(made, shape_of)


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
        places = place_of(out.inner), place_of(source.inner)
        Kernels.installed.launch("copy_", lambda: _copy_places(*places), index, list(places))
        return out
    if to_gpu:
        index = out.device.index
        staged = source.to(out.dtype).contiguous()
        there = out if out.is_contiguous() else new(out.shape, out.dtype, index)
        _driver_copy("cuMemcpyHtoDAsync", there, staged, nbytes, index)
        if there is not out:
            _copy(out, there)
        host_memory.use(staged, current_stream(index))
    else:
        index = source.device.index
        if not plain:  # torch converts on the GPU
            source = source.to(out.dtype).contiguous()
        here = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        _driver_copy("cuMemcpyDtoHAsync", here, source, nbytes, index)
        if here is not out:
            current_stream(index).synchronize()
            out.copy_(here)
        host_memory.use(out, current_stream(index))
    if not non_blocking:
        current_stream(index).synchronize()
    return out


def _copy_places(out: Place, source: Place) -> None:
    at_place(out).copy_(at_place(source))


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
