"""Planning, sharding, delivering weights, following the optimizer, agreeing across ranks."""

from typing import TYPE_CHECKING

from composer_dist._lazy import lazy_names

_HERE = "composer_dist.distributed"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "parallelize_model": f"{_HERE}.prepare",
        "parallelize_composer_model": f"{_HERE}.prepare",
        "plan_parallelism": f"{_HERE}.plan",
        "ParallelPlan": f"{_HERE}.parallel_plan",
        "Preparation": f"{_HERE}.preparation",
        "init_context": f"{_HERE}.steps",
        "launch": f"{_HERE}.launching",
        "meta_init": f"{_HERE}.steps",
        "prepare_fully_shard": f"{_HERE}.steps",
        "sync_module_states": f"{_HERE}.steps",
        "apply_ac": f"{_HERE}.activation_checkpointing",
        "assert_no_meta": f"{_HERE}.initialize",
        "summon_full_params": f"{_HERE}.summon",
        "DDPSyncStrategy": f"{_HERE}.data_parallel",
        "ddp_sync_context": f"{_HERE}.data_parallel",
        "convert_sync_batch_norm": f"{_HERE}.sync_batch_norm",
        "revert_sync_batch_norm": f"{_HERE}.sync_batch_norm",
        "context_parallel": f"{_HERE}.context",
        "no_sync": f"{_HERE}.gradients",
        "accumulate": f"{_HERE}.accumulation",
        "accumulated_bytes": f"{_HERE}.accumulation",
        "parallel_cross_entropy": f"{_HERE}.tp_loss",
        "clip_grad_norm": f"{_HERE}.clipping",
        "clip_grad_value": f"{_HERE}.clipping",
        "named_parameters_canonical": f"{_HERE}.names",
        "build_mesh": f"{_HERE}.mesh",
        "sampler_kwargs": f"{_HERE}.mesh",
        "fsdp_mesh": f"{_HERE}.mesh",
        "register_strategy": f"{_HERE}.strategies",
        "register_tensor_codec": f"{_HERE}.codecs",
        "submesh": f"{_HERE}.mesh",
    },
)

if TYPE_CHECKING:
    from composer_dist.distributed.accumulation import accumulate as accumulate
    from composer_dist.distributed.accumulation import accumulated_bytes as accumulated_bytes
    from composer_dist.distributed.activation_checkpointing import apply_ac as apply_ac
    from composer_dist.distributed.clipping import clip_grad_norm as clip_grad_norm
    from composer_dist.distributed.clipping import clip_grad_value as clip_grad_value
    from composer_dist.distributed.codecs import register_tensor_codec as register_tensor_codec
    from composer_dist.distributed.context import context_parallel as context_parallel
    from composer_dist.distributed.data_parallel import DDPSyncStrategy as DDPSyncStrategy
    from composer_dist.distributed.data_parallel import ddp_sync_context as ddp_sync_context
    from composer_dist.distributed.gradients import no_sync as no_sync
    from composer_dist.distributed.initialize import assert_no_meta as assert_no_meta
    from composer_dist.distributed.launching import launch as launch
    from composer_dist.distributed.mesh import build_mesh as build_mesh
    from composer_dist.distributed.mesh import fsdp_mesh as fsdp_mesh
    from composer_dist.distributed.mesh import sampler_kwargs as sampler_kwargs
    from composer_dist.distributed.mesh import submesh as submesh
    from composer_dist.distributed.names import (
        named_parameters_canonical as named_parameters_canonical,
    )
    from composer_dist.distributed.parallel_plan import ParallelPlan as ParallelPlan
    from composer_dist.distributed.plan import plan_parallelism as plan_parallelism
    from composer_dist.distributed.preparation import Preparation as Preparation
    from composer_dist.distributed.prepare import (
        parallelize_composer_model as parallelize_composer_model,
    )
    from composer_dist.distributed.prepare import parallelize_model as parallelize_model
    from composer_dist.distributed.steps import init_context as init_context
    from composer_dist.distributed.steps import meta_init as meta_init
    from composer_dist.distributed.steps import prepare_fully_shard as prepare_fully_shard
    from composer_dist.distributed.steps import sync_module_states as sync_module_states
    from composer_dist.distributed.strategies import register_strategy as register_strategy
    from composer_dist.distributed.summon import summon_full_params as summon_full_params
    from composer_dist.distributed.sync_batch_norm import (
        convert_sync_batch_norm as convert_sync_batch_norm,
    )
    from composer_dist.distributed.sync_batch_norm import (
        revert_sync_batch_norm as revert_sync_batch_norm,
    )
    from composer_dist.distributed.tp_loss import parallel_cross_entropy as parallel_cross_entropy
