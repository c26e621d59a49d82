"""Torch's private names, each with the feature that falls if it goes."""

import ast
import ctypes
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_dist import _torch

FEATURES = {
    "torch.cuda.memory._dump_snapshot": "Profiler(memory_snapshot=True)",
    "torch.cuda.memory._record_memory_history": "Profiler(memory_snapshot=True)",
    "torch.distributed.distributed_c10d._get_default_store": "agreement among ranks",
    "torch.distributed.distributed_c10d._resolve_process_group": "device_train_microbatch_size='auto'",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "act_ckpt='wrapped'",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": "act_ckpt='wrapped'",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "accumulate_gradients='unsharded'",
    "torch.distributed._composable_state._module_state_mapping": "unparallelize_model",
    "torch.distributed._composable.replicate.DDP": "DDP in place",
    "torch.distributed._composable.replicate.replicate": "DDP in place",
    "torch.distributed.tensor.placement_types._StridedShard": "tensor parallelism of fused matrices",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "quantized parameters (codecs)",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "quantized parameters (codecs)",
    "torch._amp_foreach_non_finite_check_and_unscale_": "precision='amp_fp16'",
    "torch.nn.modules.batchnorm._BatchNorm": "context parallelism refuses what mixes positions",
    "torch.nn.modules.conv._ConvNd": "context parallelism refuses what mixes positions",
    "torch._ops.HigherOrderOperator": "activation_checkpointing=(..., {'save': ...})",
    "torch._ops.OpOverload": "FLOPs counted by the SpeedMonitor; selective checkpointing",
    "torch._ops.OpOverloadPacket": "activation_checkpointing=(..., {'save': ...})",
    "torch.optim._muon": "updates of Muon under FSDP2",
    "torch._foreach_lerp_": "EMA",
    "torch._foreach_mul_": "clip_grad_norm",
    "torch._foreach_norm": "clip_grad_norm",
    "torch.utils._python_dispatch.TorchDispatchMode": "tracing initializers",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "tensors cut by users, saved",
    "torch._decomp.decomposition_table": "losses on sharded parameters",
    "torch._subclasses.fake_tensor": "plan.memory()",
    "torch._subclasses.fake_tensor.FakeTensorMode": "single files read in slices",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "checkpoints for torch's own",
    "torch.distributed.tensor.experimental._attention._cp_options": "context parallelism over torch's ring",
    "torch.distributed.utils._apply_to_tensors": "outputs of units that are no views",
    "torch.distributed.fsdp._common_utils.collect_grad_tensors": "losses that a unit keeps elsewhere",
    "torch.distributed.fsdp._common_utils.replace_grad_tensors": "inputs of units that are no views",
    "torch.distributed.fsdp._fully_shard._fsdp_common": "transforms of torch.func around units",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": "ranks compare which gradients they reduce",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "sharding without shapes by symbols",
    "torch.distributed.fsdp._fully_shard._fsdp_param.ShardedState": "refusing to change parameters",
    "torch._prims_common.make_contiguous_strides_for": "sharding without shapes by symbols",
    "torch.utils._python_dispatch._disable_current_modes": "changes through .data, compiling",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "changes through .data",
    "torch.utils._pytree.tree_map_only": "activation_checkpointing=(..., {'save': ...})",
    "torch._inductor.list_mode_options": "compile={'mode': ...}, checked when planned",
    "torch._inductor.list_options": "compile={'options': ...}, checked when planned",
    "torch._dynamo.decorators.skip": "compiled steps of optimizers",
    "torch._dynamo.config": "activation checkpointing of tensor-parallel blocks that are compiled",
    "torch._functorch.config": "activation_checkpointing=('memory_budget', ...)",
    "torch._utils.ExceptionWrapper": "a StopIteration of a dataset in a worker is an error",
    "torch.utils.data._utils.fetch._MapDatasetFetcher": "a StopIteration of a dataset is an error",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "a second process group in one process",
    "torch.distributed.tensor._redistribute._gen_transform_infos": "no thread is left of a process group",
    "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache": "the same",
}


def _imported() -> set[str]:
    """The private names that `_torch` imports from torch, or takes from its modules."""
    names: set[str] = set()
    for path in Path(_torch.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        modules = {"torch": "torch"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                imported = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                names, modules = names | set(imported.values()), modules | imported
        for assigned in (node.value for node in tree.body if isinstance(node, ast.Assign)):
            for node in assigned.elts if isinstance(assigned, ast.Tuple) else [assigned]:
                first, _, rest = ast.unparse(node).partition(".")
                names |= {f"{modules[first]}.{rest}"} if first in modules else set()
    return {name for name in names if "._" in name}


def test_every_private_import_is_listed_with_its_feature() -> None:
    assert _imported() == set(FEATURES)


@pytest.mark.parametrize("name", FEATURES)
def test_it_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute), f"{FEATURES[name]} falls without {name}"


def test_a_stop_iteration_of_a_worker_is_known() -> None:
    with pytest.raises(StopIteration) as raised:
        next(iter(()))
    assert not _torch.raised_by_samples(raised.value)
    wrapper = torch._utils.ExceptionWrapper((type(raised.value), raised.value, raised.tb))
    with pytest.raises(StopIteration) as raised:
        wrapper.reraise()
    assert _torch.raised_by_samples(raised.value)


def _alone(**options: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **options)


def _sharded() -> FSDPModule:
    """A linear layer with 5 rows, sharded on meta over the first of 2 ranks."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=2)
    with torch.device("meta"):
        linear = nn.Linear(3, 5)
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(linear, FSDPModule)
    return linear


def test_fsdp_s_records_are_read() -> None:
    """Without `_get_fsdp_state`, `_fsdp_param_groups` and `_module_info`: sharding, delivering weights.

    Without its class order: undoing preparation, class names in reports. Without FSDPParamGroup's flags:
    no_sync, which restores what was before.
    """
    linear = _sharded()
    (group,) = _torch.fsdp_param_groups(linear)
    assert (group.reduce_grads, group.all_reduce_grads) == (True, True)
    places = [_torch.fsdp_param_place(param) for param in _torch.fsdp_params(linear)]
    assert places == [(linear, "weight"), (linear, "bias")]
    assert _torch.original_class(type(linear)) is nn.Linear
    linear.set_requires_gradient_sync(False)
    flags = [getattr(owner, name) is yes for owner, name, yes in _torch.gradient_sync_flags(linear)]
    assert flags == [False, False]


def test_shards_are_allocated_once_padded_and_in_place_and_the_root_settles() -> None:
    """Without FSDPParam's sizes and setters: bounded memory while weights are delivered.

    Without `_lazy_init`: FSDP2's checks before the first forward.
    """
    linear = _sharded()
    for param, name in zip(_torch.fsdp_params(linear), ("weight", "bias"), strict=True):
        size, dtype = _torch.padded_shard(param)
        parameter, local = _torch.materialize_shard(param, torch.empty(size, dtype=dtype))
        assert getattr(linear, name) is parameter
        assert local.shape == ((3, 3) if name == "weight" else (3,))
        assert parameter.to_local().data_ptr() == local.data_ptr() == param._sharded_param_data.data_ptr()
    _torch.finish_lazily(linear)
    assert linear._get_fsdp_state()._is_root is True


def test_backward_passes_are_numbered_and_have_an_end() -> None:
    """Without `_current_graph_task_id` and `queue_callback`: averaging of plain parameters."""
    assert _torch.current_backward() == -1
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        seen.append(_torch.current_backward())
        _torch.at_end_of_backward(lambda: seen.append(-2))

    x.register_hook(hook)
    x.sum().backward()
    assert seen[0] >= 0
    assert seen[1:] == [-2]


def test_replicate_s_hooks_run_the_ddp_they_are_given() -> None:
    """Without replicate's state and DDP's `_pre_forward` and `_post_forward`: DDP in place.

    Without `_comm_hook_args`: the register_comm_hook of a prepared model is a silent no-op.
    """

    class Ours(_torch.InPlaceDDP):
        asked = 0

        def wants_backward(self, output: object) -> bool:
            self.asked += 1
            return True

    _alone()
    linear = nn.Linear(3, 5)
    ours = Ours(linear, init_sync=False, static_graph=True)
    _torch.serve_in_place(linear, ours)
    assert _torch.is_replicated(linear)
    assert _torch.original_class(type(linear)) is nn.Linear
    assert not ours._static_graph_delay_allreduce_enqueued
    linear(torch.ones(2, 3)).sum().backward()
    assert ours.asked == 1
    assert ours._static_graph_delay_allreduce_enqueued
    linear.register_comm_hook(None, lambda state, bucket: None)
    _torch.register_late_hooks(linear)
    assert len(ours._comm_hooks) == 1


def test_ddp_leaves_out_what_it_is_told_to() -> None:
    """Without `_ddp_params_and_buffers_to_ignore`: DDPConfig.ignored."""
    _alone()
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model.own = nn.Parameter(torch.ones(1))
    with _torch.ddp_ignores(model, ["own", "0.bias", "1.running_mean"]):
        ddp = DistributedDataParallel(model)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert len(ddp._build_params_for_reducer()[0]) == 3
    assert len(ddp.modules_buffers) == 2


def test_a_policy_s_function_can_be_read() -> None:
    """Without `CustomPolicy._lambda_fn`: CustomPolicy as fsdp_wrap_policy."""
    assert _torch.policy_function(_torch.CustomPolicy(bool)) is bool
    assert list(inspect.signature(_torch.CustomPolicy).parameters) == ["lambda_fn"]


def test_meshes_are_cut_and_joined() -> None:
    """Without `_flatten` and `_concatenate`: context parallelism beside sharding."""
    dist.init_process_group("fake", rank=5, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = _torch.flatten_mesh(mesh["b", "c"], "b_c")
    assert flat is _torch.flatten_mesh(mesh["b", "c"], "b_c")
    joined = _torch.concatenate_meshes(mesh["a"], flat)
    assert (joined.mesh_dim_names, joined.mesh.tolist()) == (("a", "b_c"), [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert joined.get_coordinate() == (1, 1)
    assert joined.get_group(1) is flat.get_group()


def test_fsdp_s_collectives_can_be_watched() -> None:
    """Without `_all_gather_comm`, `_reduce_scatter_comm` and `mesh_info`: errors for ranks out of step."""
    linear = _sharded()
    told: list[tuple[bool, int, int]] = []

    def tell(reduces: bool, sent: torch.Tensor, groups: list[Any], plain: bool) -> None:
        assert plain
        told.append((reduces, sent.numel(), len(groups)))

    _torch.before_collectives(linear, tell)
    linear.to_empty(device="cpu")
    linear(torch.ones(2, 3)).sum().backward()
    # 15 weights and 5 biases: 3 of 5 rows here, gathered; padded to 6 for both ranks when they are reduced.
    assert told == [(False, 12, 1), (True, 24, 1)]


def test_fsdp_s_hooks_are_wrapped_once_and_give_inputs_that_are_no_views() -> None:
    """Without FSDP2's `_register_post_backward_hook` and `_dynamo_disable`: slower steps of many units."""
    seen: list[Any] = []
    for shorten in (lambda unit: None, _torch.shorten_hooks):
        linear = _sharded()
        shorten(linear)
        linear.to_empty(device="cpu")
        linear.register_forward_pre_hook(lambda unit, args: seen.append(args[0]._base is None))
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.to_local().fill_(1)
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        (linear(x * 1) * 2).sum().backward()
        # The values of the shards' gradients are undefined in a fake group.
        seen.append((x.grad.tolist(), [one.grad.to_local().shape for one in linear.parameters()]))
    assert (seen[0], seen[2]) == (False, True)
    assert seen[1] == seen[3]


def test_operations_tell_their_overloads_and_arguments() -> None:
    """Without the dispatcher's list: activation_checkpointing=(..., {"save": names}).

    Without an operation's schema: tracing initializers, selective checkpointing, FLOPs.
    """
    assert {"default", "out"} <= set(_torch.operators()["aten.mm"])
    assert _torch.is_composite(torch.ops.aten.linear.default)
    assert not _torch.is_composite(torch.ops.aten.addmm.default)
    add, mm = torch.ops.aten.add_.Tensor, torch.ops.aten.mm.default
    assert (_torch.is_mutable(add), _torch.is_mutable(mm)) == (True, False)
    assert [argument.name for argument in _torch.arguments(mm)] == ["self", "mat2"]
    assert _torch.packet(mm) is torch.ops.aten.mm
    assert _torch.packet(len) is None


def test_what_is_detached_beneath_autograd_shares_its_version() -> None:
    """Without the guard of dispatch keys: a kept result that is changed in place goes unnoticed."""
    kept = []

    class Keep(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            kept.append(_torch.detached(result))
            return result

    x = torch.ones(2, requires_grad=True)
    with Keep():
        y = x.exp()
    version = kept[0]._version
    assert kept[0].grad_fn is None
    assert kept[0].data_ptr() == y.data_ptr()
    y.add_(1)
    assert kept[0]._version > version


def test_collectives_return_new_tensors_and_groups_their_timeout() -> None:
    """Without torch's functional collectives: tensor parallelism that compiles.

    Without the backends' options: agreements wait as long as collectives do.
    """
    _alone(timeout=timedelta(seconds=77))
    assert _torch.collective_timeout() == timedelta(seconds=77)
    x, group = torch.arange(4.0), dist.distributed_c10d._get_default_group().group_name
    collectives = (_torch.all_gathered(x, 1, group), _torch.reduce_scattered(x, 1, group))
    for found in (_torch.all_reduced(x, group), *collectives):
        assert torch.equal(found, x)
        assert found.data_ptr() != x.data_ptr()


_MADE = """
import torch
from composer_dist import _torch
assert not _torch.classes_of_optimizers()
class Mine(torch.optim.SGD):
    def step(self):
        pass
assert not _torch.classes_of_optimizers()
Mine([torch.zeros(1)], lr=1.0)
assert _torch.classes_of_optimizers() == {Mine}
"""


@pytest.mark.slow
def test_it_shows_that_an_optimizer_was_made() -> None:
    """Without the mark on a class's step: an optimizer that was not handed in goes unnoticed."""
    subprocess.run([sys.executable, "-c", _MADE], check=True)


def test_tensors_tell_their_storage_version_view_and_hooks() -> None:
    """Without `_cdata`, `_version`, `_base` and the hooks: ties, kept activations, hooks that stay."""
    x, y = torch.ones(4, requires_grad=True), torch.ones(4)
    assert _torch.storage_key(y) == _torch.storage_key(y[1:]) != _torch.storage_key(x)
    before = _torch.version(y)
    y.add_(1)
    assert _torch.version(y) == before + 1
    assert [_torch.is_view(one) for one in (y, y[1:], x * 2)] == [False, True, False]
    assert _torch.gradient_hooks(x) == _torch.accumulated_gradient_hooks(x) == []
    x.register_hook(repr)
    x.register_post_accumulate_grad_hook(print)
    assert (_torch.gradient_hooks(x), _torch.accumulated_gradient_hooks(x)) == ([repr], [print])


def test_archives_are_written_around_a_tensor_s_bytes() -> None:
    """Without `skip_data` on files that are no paths: tensors in sharded checkpoints are no archives."""
    tensor, whole = torch.arange(6, dtype=torch.bfloat16).view(2, 3), BytesIO()
    head, tail = _torch.archive_around(tensor)
    assert (head, tail) == _torch.archive_around(tensor + 1)
    torch.save(tensor, whole)
    written = head + bytes(tensor.view(torch.uint8).flatten().numpy()) + tail
    assert whole.getvalue()[: len(head) + 12] == written[: len(head) + 12]
    assert len(whole.getvalue()) == len(written)
    assert torch.equal(torch.load(BytesIO(written)), tensor)


def test_modules_tell_what_is_saved_and_compiled() -> None:
    """Without `_non_persistent_buffers_set` and `_compiled_call_impl`: load_pretrained, compile."""
    module = nn.BatchNorm1d(2)
    module.register_buffer("table", torch.ones(1), persistent=False)
    assert [_torch.is_saved(module, key) for key in ("running_mean", "table")] == [True, False]
    assert isinstance(module, _torch.AnyBatchNorm)
    assert isinstance(nn.Conv1d(1, 1, 1), _torch.AnyConvolution)
    assert not _torch.has_compiled_call(module)
    module.compile(backend="eager")
    assert _torch.has_compiled_call(module)


def _compiled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.bias.data = module.bias.data * 2
    return x @ module.weight.data[0]


def _floats_at(weight: torch.Tensor) -> Any:
    return numpy.ctypeslib.as_array((ctypes.c_float * weight.numel()).from_address(weight.data_ptr()))


GIVEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda weight: weight.detach().numpy(),
    "numpy of a view": lambda weight: weight.detach()[1:].numpy(),
    "an array": lambda weight: numpy.asarray(weight.detach()),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "dlpack of before": lambda weight: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())),
    "dlpack to numpy": lambda weight: numpy.from_dlpack(weight.detach()),
    "a tensor of the storage": lambda weight: torch.tensor([]).set_(weight.untyped_storage()),
    "a tensor of the typed storage": lambda weight: torch.tensor([]).set_(weight.storage()),
    "an address": _floats_at,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_writes_through_memory_that_was_given_out_are_counted(give: Callable[[torch.Tensor], Any]) -> None:
    weight = torch.arange(4.0)
    _torch.watch_data([weight])
    given = give(weight)
    assert [_torch.data_writes(weight), _torch.wrote_data()] == [0, True]
    given *= 3
    assert [_torch.data_writes(weight), _torch.data_writes(weight)] == [1, 1]
    given += 1
    assert _torch.data_writes(weight) == 2
    assert weight.tolist()[1:] == [4, 7, 10]
    assert weight._version == 0


def test_writes_into_the_storage_of_watched_tensors_are_counted() -> None:
    weight = torch.arange(4.0)
    _torch.watch_data([weight])
    assert _torch.data_writes(weight) == 0
    weight.untyped_storage().fill_(1)
    assert _torch.data_writes(weight) == 1
    weight.untyped_storage()[3] = 0
    weight.untyped_storage().copy_(torch.ones(4).untyped_storage())
    assert _torch.data_writes(weight) == 2
    assert weight.tolist() == [1] * 4


def test_numpy_reads_memory_that_will_be_freed_but_cannot_write_it() -> None:
    weight = torch.arange(4.0)
    _torch.watch_data([weight], are_freed=True)
    for array in (weight.numpy(), numpy.asarray(weight)):
        assert array.tolist() == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="read-only"):
            array *= 2
    weight.untyped_storage().resize_(0)  # torch refuses that of storages that numpy shares
    other = torch.arange(4.0)
    other.numpy()[:] = 1
    assert other.tolist() == [1] * 4


def test_writes_through_data_of_watched_tensors_are_counted_and_nothing_else_differs() -> None:
    module, other = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
    weight = module.weight
    _torch.watch_data([weight])
    early = weight.data
    writes: list[Any] = [
        lambda: weight.data.mul_(2),
        lambda: weight.data.data.mul_(2),
        lambda: weight[0].data.zero_(),
        lambda: weight.detach().view(-1).data[0].fill_(1),
        lambda: torch.add(other.data, 1, out=weight.data[0]),
        lambda: early.mul_(2),
        torch.inference_mode()(lambda: weight.data.mul_(2)),
    ]
    for index, write in enumerate(writes):
        assert _torch.data_writes(weight) == index
        write()
    version, data = weight._version, weight.data
    other.data.mul_(2)
    torch.func.grad(lambda x: (weight.data * x).sum())(torch.ones(4, 4))
    assert (_torch.data_writes(weight), weight._version) == (len(writes), version)
    assert (type(data), data.requires_grad, data._base, data.is_inference()) == (
        torch.Tensor,
        False,
        None,
        False,
    )
    assert torch.equal(data, weight)
    assert data.data_ptr() == weight.data_ptr()
    assert type(torch.Tensor.data).__name__ == "getset_descriptor"
    compiled = torch.compile(_compiled, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(module, torch.ones(4)), data[0].sum())


def test_a_tensor_at_the_address_of_a_watched_one_that_is_gone_reads_its_data() -> None:
    watched = [torch.ones(1) for _ in range(100)]
    addresses = {tensor.untyped_storage()._cdata for tensor in watched}
    _torch.watch_data(watched)
    for tensor in watched:
        tensor.data.mul_(2)
    del watched, tensor
    later = [torch.ones(1, device="meta") for _ in range(100)]
    assert addresses & {tensor.untyped_storage()._cdata for tensor in later}
    assert {tensor.data.device.type for tensor in later} == {"meta"}


def test_warnings_of_c10_are_off_only_inside() -> None:
    level = ctypes.c_int.in_dll(
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "FLAGS_caffe2_log_level"
    )
    before = level.value
    with _torch.warnings_of_c10_off(), _torch.warnings_of_c10_off():
        assert level.value == max(before, 2)
    assert level.value == before
