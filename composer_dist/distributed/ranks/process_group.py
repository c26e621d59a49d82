"""torch.distributed with the same calls for one process and for many.

Without a process group every function works as for one rank, without environment variables, ports and
launchers. The device of a collective depends on the group, not on the machine: a gloo group on a machine with
GPUs uses CPU tensors.
"""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__

from composer_dist._torch import clear_dtensor_caches
from composer_dist.config.launched import launched_number
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.gloo_interface import gloo_variables
from composer_dist.distributed.ranks.gpus import check_own_gpu
from composer_dist.distributed.ranks.launcher_variables import VARIABLES, check_alone
from composer_dist.distributed.ranks.line import await_readers
from composer_dist.distributed.ranks.rendezvous import meeting_place
from composer_dist.distributed.ranks.reports import lost_named
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError, ParallelismValueError

T = TypeVar("T")
_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,  # divided afterwards: only NCCL can average
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def init(
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta | None = None,
    reuse: bool = False,
) -> None:
    """Make the default process group, and make this process's accelerator the current device.

    With a launcher's environment variables (torchrun's `MASTER_ADDR`, `MASTER_PORT`, `RANK`, `WORLD_SIZE`)
    the group spans all its processes, and on several hosts `GLOO_SOCKET_IFNAME` is set if gloo needs it.
    Without them it has one rank and a store in memory, and needs no port.

    Args:
        backend: torch's name, such as `"gloo"` or `"cuda:nccl,cpu:gloo"`. By default the device's own, with
            gloo for CPU tensors.
        device: where the model will be. By default the accelerator, if there is one.
        timeout: a timedelta, for each collective. By default torch's: 10 minutes for NCCL, 30 for the others.
        reuse: keep an existing default group, whatever its backend.

    Raises:
        ParallelismRuntimeError: a group exists and `reuse` is not set, a launcher has started several ranks
            but torchrun's variables are missing, or a rank did not arrive.
        ParallelismTypeError: `timeout` is not a timedelta.
        ParallelismValueError: the machine lacks `device`, or NCCL is to connect ranks that share a GPU.
    """
    if not (timeout is None or isinstance(timeout, timedelta)):
        raise ParallelismTypeError(f"timeout must be a datetime.timedelta, not {timeout!r}.")
    if _active() and reuse:
        return
    if _active():
        raise ParallelismRuntimeError(
            f"A process group exists already (backend {dist.get_backend()}, "
            f"{dist.get_world_size()} ranks). Pass reuse=True to use it, or call destroy() first."
        )
    if not dist.is_available():
        raise ParallelismRuntimeError("This build of torch has no torch.distributed.")
    if not is_distributed():
        check_alone(os.environ)
    chosen = device_here(device) if device is not None else _default_device()
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(_with_index(chosen).index)
    backend = backend_for(chosen.type, cpu_ops=chosen.type != "cpu") if backend is None else backend
    alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
    os.environ.update(gloo_variables(os.environ))
    place = meeting_place(timeout) if is_distributed() else alone
    dist.init_process_group(backend, timeout=timeout, **place)
    Agreement().begin()  # from now on, it is noticed if a rank of this host ends
    if chosen.type == "cuda" and "nccl" in backend.lower():
        try:
            check_own_gpu(_with_index(chosen))
        except BaseException:
            destroy()
            raise


def device_here(device: torch.device | str) -> torch.device:
    """The device, after a check that this machine has it.

    Raises:
        ParallelismValueError: it does not, or torch has no such kind of device.
    """
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ParallelismValueError(f"torch has no device {device!r}; write 'cpu' or 'cuda'.") from None
    if chosen.type == "cpu":
        return chosen
    offered, count = _default_device().type, torch.accelerator.device_count()
    if offered != chosen.type or (chosen.index or 0) >= count:
        many = "" if offered == "cpu" else f" ({count} of them)"
        raise ParallelismValueError(
            f"Device {str(chosen)!r} was asked for, but this machine offers {offered!r}{many} to torch "
            f"{torch.__version__}."
        )
    return chosen


at_destroy: list[Callable[[], None]] = []
"""Called by `destroy`: they let go of meshes."""


def destroy() -> None:
    """End the default process group and all groups made from it, if there is one."""
    if _active():
        await_readers()
        dist.destroy_process_group()
        for let_go in at_destroy:
            let_go()
        clear_dtensor_caches()


def is_distributed() -> bool:
    """Whether a launcher's environment variables are set; true for torchrun with one process too."""
    return dist.is_available() and all(os.environ.get(name) for name in VARIABLES)


def world_and_rank() -> tuple[int, int]:
    """How many ranks there are, and which one this is; `(1, 0)` without a process group."""
    return (dist.get_world_size(), dist.get_rank()) if _active() else (1, 0)


def local_rank() -> int:
    """This process's number on its machine: the launcher's `LOCAL_RANK`, if it is set.

    Otherwise ranks are assumed to be numbered by machine, with one rank for each accelerator, or to be all on
    one machine without accelerators.
    """
    if os.environ.get("LOCAL_RANK"):
        return launched_number("LOCAL_RANK")
    _, rank = world_and_rank()
    return rank % (torch.accelerator.device_count() or rank + 1)


def backend_for(device_type: str, cpu_ops: bool = False) -> str:
    """The backend that suits a device type: `"nccl"` for `"cuda"`, `"gloo"` for `"cpu"`.

    Args:
        device_type: such as `"cuda"`, `"cpu"` or `"xpu"`.
        cpu_ops: support CPU tensors too, for offload and asynchronous checkpoints: `"cuda:nccl,cpu:gloo"`.

    Raises:
        ParallelismValueError: torch knows no backend for the type.
    """
    backends = dist.Backend.default_device_backend_map
    if device_type not in backends:
        raise ParallelismValueError(
            f"No communication backend is known for device type {device_type!r}; "
            f"known: {', '.join(sorted(backends))}. Pass the backend's name."
        )
    backend = backends[device_type]
    if not cpu_ops:
        return backend
    return ",".join(f"{kind}:{backends[kind]}" for kind in dict.fromkeys((device_type, "cpu")))


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device on which tensors must be to communicate in `group`, by default the default group.

    It depends on the group's backends: this process's CUDA device for `"cuda:nccl,cpu:gloo"`, the CPU for
    `"gloo"`. Without a process group it is the device that `init()` would choose.
    """
    if not _active():
        return _with_index(_default_device())
    bound: torch.device | None = getattr(group or dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return bound
    backends = _backends(group)
    accelerators = [kind for kind in backends if kind != "cpu" and backends[kind] != backends.get("cpu")]
    return _with_index(torch.device(accelerators[0] if accelerators else "cpu"))


def device_for_facts(group: dist.ProcessGroup | None = None) -> torch.device:
    """The best device to send a few numbers in `group`: the CPU if possible, which needs no stream."""
    return torch.device("cpu") if "cpu" in _backends(group) else device_of_group(group)


@lost_named("all_reduce")
def all_reduce(
    value: T, op: str = "mean", group: dist.ProcessGroup | None = None, inplace: bool = False
) -> T:
    """Reduce tensors and numbers over the ranks of a group; every rank gets the result.

    Args:
        value: a tensor, a number, or dicts, lists and tuples of these, of the same structure and shapes on
            every rank. Anything else in it is returned unchanged.
        op: `"mean"`, `"sum"`, `"min"`, `"max"` or `"product"`. A tensor keeps its dtype: the mean of integers
            is rounded toward zero. The mean of Python numbers is a float.
        group: by default the default group.
        inplace: write the result into the tensors themselves, instead of new ones.

    Returns:
        The reduced value, on its own devices, without autograd history; `value` without a process group.

    Raises:
        ParallelismValueError: `op` is unknown.
        ParallelismTypeError: `value` contains a DTensor.
    """
    if op not in _OPERATIONS:
        raise ParallelismValueError(f"Unknown op {op!r}; known: {', '.join(_OPERATIONS)}.")
    if not _active():
        return value
    result: T = _reduced(value, op, group, inplace)
    return result


@lost_named("broadcast")
def broadcast(obj: T, src: int = 0) -> T:
    """Send the picklable object of rank `src` to every rank; without a process group, return `obj`.

    It is for settings and small objects. The other ranks' objects are ignored.

    Raises:
        ParallelismValueError: there is no rank `src`.
    """
    if not _active():
        return obj
    world, _ = world_and_rank()
    if not 0 <= src < world:
        raise ParallelismValueError(f"There is no rank {src} in a world of {world}.")
    box = [obj]
    dist.broadcast_object_list(box, src=src, device=device_of_group())
    return box[0]


@lost_named("gather_objects")
def gather_objects(obj: T) -> list[T]:
    """The picklable objects of all ranks, in their order, on every rank; without a process group, `[obj]`."""
    if not _active():
        return [obj]
    box: list[Any] = [None] * world_and_rank()[0]
    dist.all_gather_object(box, obj)
    return box


def rows_of_ranks(row: Collection[float]) -> torch.Tensor:
    """The numbers of every rank, one float64 row per rank, on the CPU.

    It sums instead of gathering, so any backend and device that can reduce will do.
    """
    world, rank = world_and_rank()
    table = torch.zeros(world, len(row), dtype=torch.float64)
    table[rank] = torch.tensor([float(value) for value in row], dtype=torch.float64)
    return all_reduce(table, "sum") if world > 1 else table


@lost_named("barrier")
def barrier() -> None:
    """Return when every rank has called it; without a process group, immediately."""
    if not _active():
        return
    device = device_of_group()
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


def all_ranks(flag: bool) -> bool:
    """Whether `flag` is true on every rank; the same answer on all of them."""
    return bool(all_reduce(int(bool(flag)), "min"))


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on at least one rank; the same answer on all of them."""
    return bool(all_reduce(int(bool(flag)), "max"))


def together(step: str) -> AbstractContextManager[None]:
    """Run a body without collectives on every rank: it succeeds on all, or all raise an error with `step`."""
    return Agreement().together(step)


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    # Modulo: a launcher may show each process its own device only, as number 0.
    return torch.device(device.type, local_rank() % max(torch.accelerator.device_count(), 1))


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The group's backend for each device type; torch writes it as `"cpu:gloo,cuda:nccl"`."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}


def _reduced(value: Any, op: str, group: dist.ProcessGroup | None, inplace: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return _reduced_tensor(value, op, group, inplace)
    if isinstance(value, (int, float)):
        wide = torch.float64 if isinstance(value, float) or op == "mean" else torch.int64
        return _reduced_tensor(torch.tensor(value, dtype=wide), op, group, inplace=True).item()
    if isinstance(value, Mapping):
        return {key: _reduced(item, op, group, inplace) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_reduced(item, op, group, inplace) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _reduced_tensor(
    tensor: torch.Tensor, op: str, group: dist.ProcessGroup | None, inplace: bool
) -> torch.Tensor:
    if hasattr(tensor, "device_mesh"):
        raise ParallelismTypeError(
            f"all_reduce takes plain tensors; this is a DTensor of shape {tuple(tensor.shape)}. "
            "Pass its full_tensor() or to_local()."
        )
    dtype = tensor.dtype
    if op == "mean":  # in a type that holds the sum
        exact = not (dtype.is_floating_point or dtype.is_complex)
        dtype = torch.int64 if exact else torch.promote_types(dtype, torch.float32)
    served = tensor.device.type in _backends(group)
    result = tensor.detach()
    aliased = inplace and served and dtype == tensor.dtype and tensor.is_contiguous()
    if not aliased:
        device = tensor.device if served else device_of_group(group)
        result = result.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
    if (size := dist.get_world_size(group)) > 1:
        dist.all_reduce(result, op=_OPERATIONS[op], group=group)
        if op == "mean":
            result.div_(size, rounding_mode="trunc" if exact else None)
    if not inplace:
        return result.to(tensor.device, tensor.dtype)
    if not aliased:
        with torch.no_grad():
            tensor.copy_(result)
    return tensor
