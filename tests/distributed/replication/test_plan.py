"""The plan of a replicated model, without a process group."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import plan_parallelism, prepare_fully_shard
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from tests.kit import models
from tests.kit.toy import Toy


def test_the_plan_says_what_every_module_and_tensor_gets() -> None:
    config = DDPConfig(comm_hook="fp16", ignored=["layers.1", "re:.*table"], bucket_cap_mb=5)
    model = Toy()
    plan = plan_parallelism(model, config, world_size=4)
    assert plan.mesh == {"dp_replicate": 4, "dp_shard": 1, "cp": 1, "tp": 1}
    assert plan.units == ()
    assert set(plan.plain) == set(dict(model.named_parameters()))
    assert plan.explain("") == (
        "The root: replicated, because DDP keeps it whole and averages its gradients. DDP averages the "
        "gradients of 8 parameters, 928 bytes, in buckets of 5 MiB by comm_hook='fp16'. Every forward starts "
        "with rank 0's buffers."
    )
    text = "one parameter with head.weight: replicated on every rank, because DDP keeps it whole and averages"
    assert text in plan.explain("embed.weight")
    assert plan.explain("row").endswith("because DDP keeps it whole; it is frozen.")
    text = "layers.1.norm: replicated, because DDPConfig.ignored='layers.1' leaves it to each rank"
    assert text in plan.explain("layers.1.norm")
    assert plan.explain("layers.0.norm.running_mean").endswith("a buffer, whole on every rank.")
    assert "layers.0.table" in plan.replication.ignored
    assert "layers.1.norm.num_batches_tracked" in plan.replication.ignored
    assert "DDP averages the gradients of 8 parameters" in str(plan)
    assert "replicated: embed.weight" not in str(plan)
    facts = plan.to_dict()["replication"]
    assert facts["hook"] == {"spelled": "'fp16'", "names": ["fp16"], "options": {}}
    assert facts["arguments"]["bucket_cap_mb"] == 5


@pytest.mark.promise(118)
def test_ddp_beside_the_default_mesh_replicates_on_every_rank() -> None:
    assert resolve_config({"ddp": {}}).mesh == MeshConfig(dp_replicate=-1, dp_shard=1)
    own = ParallelismConfig(ddp=DDPConfig(), mesh=MeshConfig(dp_replicate=2))
    assert resolve_config(own) == own
    assert plan_parallelism(models.M(), own, world_size=2).mesh["dp_replicate"] == 2


@pytest.mark.promise(118)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": MeshConfig(dp_replicate=2)}, "may have dp_replicate only, not dp_shard=2"),
        ({"fsdp2": FSDP2Config()}, "fsdp2 is given, which has no effect under DDP"),
        (
            {"rules": [Rule("layers.0", shard=True)]},
            "rule 'layers.0' sets shard, which has no effect under DDP",
        ),
        (
            {"rules": [Rule("head", mixed_precision="PURE")]},
            "rule 'head' sets mixed_precision, which has no effect under DDP",
        ),
        (
            {"rules": [Rule("layers.0", skippable="replicate")]},
            "rule 'layers.0' sets skippable, which has no effect under DDP",
        ),
        ({"mesh": MeshConfig()}, "may have dp_replicate only, not dp_shard=4"),
        ({"rules": [Rule("hed", act_ckpt=True)]}, "No module matches 'hed'. Did you mean 'head'?"),
        ({"ignored": "hed"}, "DDPConfig.ignored='hed' matches nothing. Did you mean 'head'?"),
        ({"options": {"init_sync": True}}, "cannot have 'init_sync': use ParallelismConfig.sync"),
        ({"options": {"static_graph": True}}, "It is a field of DDPConfig"),
        ({"options": {"bucket_cap": 1}}, "not an option of this torch's"),
        ({"comm_hook": "bf61"}, "There is no comm_hook 'bf61'"),
        ({"comm_hook": "fp16", "mixed_precision": {"reduce_dtype": "bf16"}}, "both determine the dtype"),
        ({"mixed_precision": "SOME"}, "Unknown mixed_precision 'SOME'"),
    ],
)
def test_what_ddp_cannot_do_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    own = {key: options.pop(key) for key in list(options) if key in DDPConfig.__dataclass_fields__}
    with pytest.raises(ParallelismValueError, match=re.escape(text)):
        plan_parallelism(models.B(), ParallelismConfig(ddp=DDPConfig(**own), **options), world_size=4)


def test_policies_have_no_effect_and_are_warned_of_where_not_strict() -> None:
    with pytest.raises(ParallelismValueError, match="a wrap policy is given, which has no effect under DDP"):
        plan_parallelism(models.B(), DDPConfig(), world_size=2, fsdp_wrap_policy=lambda module: True)
    lenient = ParallelismConfig(ddp=DDPConfig(), fsdp2=FSDP2Config(), strict=False)
    plan = plan_parallelism(models.B(), lenient, world_size=2, fsdp_wrap_policy=lambda module: True)
    assert [text.split(",")[0] for text in plan.warnings] == ["fsdp2 is given", "a wrap policy is given"]


def test_checkpointing_is_planned_by_block_and_rule() -> None:
    config = ParallelismConfig(
        ddp=DDPConfig(), activation_checkpointing=True, rules=[Rule("layers.1", act_ckpt=False)]
    )
    plan = plan_parallelism(models.B(), config, world_size=2)
    assert [one.module for one in plan.checkpointing] == ["layers.0", "layers.2"]


def test_autocast_does_not_go_up() -> None:
    model = models.M()
    model[0].bfloat16()
    with pytest.raises(ParallelismValueError, match="compute in torch.float32 with 0.weight, 0.bias"):
        plan_parallelism(model, DDPConfig(), world_size=2, precision="fp32")
    assert plan_parallelism(model, DDPConfig(), world_size=2, precision="amp_bf16").replication is not None


def test_a_tie_is_ignored_only_where_all_of_its_owners_are() -> None:
    model = models.tied()
    plan = plan_parallelism(model, DDPConfig(ignored="head"), world_size=2)
    assert plan.replication.ignored == ()
    plan = plan_parallelism(model, DDPConfig(ignored=["head.weight"]), world_size=2)
    assert plan.replication.ignored == ("embed.weight",)


def test_it_goes_to_yaml_and_back() -> None:
    config = DDPConfig(
        comm_hook="powersgd", comm_hook_options={"start_powerSGD_iter": 5}, ignored=[nn.BatchNorm1d, "head"]
    )
    plain = config.to_dict()
    assert plain["ignored"] == ["type:torch.nn.modules.batchnorm.BatchNorm1d", "head"]
    assert DDPConfig.from_dict(plain).comm_hook_options == {"start_powerSGD_iter": 5}
    assert ParallelismConfig(ddp=DDPConfig(static_graph=True)).to_dict() == {"ddp": {"static_graph": True}}
    plan = plan_parallelism(
        Toy(), DDPConfig.from_dict(plain | {"ignored": plain["ignored"][:1]}), world_size=2
    )
    assert "layers.0.norm.weight" in plan.replication.ignored
    with pytest.raises(ParallelismTypeError, match="or a list of these, not 3"):
        plan_parallelism(Toy(), DDPConfig(ignored=3), world_size=2)


def test_field_values_are_checked() -> None:
    with pytest.raises(ParallelismValueError, match="static_graph must be one of False, True"):
        DDPConfig(static_graph="yes")  # type: ignore[arg-type]
    with pytest.raises(ParallelismValueError, match="bucket_cap_mb must be positive"):
        DDPConfig(bucket_cap_mb=0)
    with pytest.raises(ParallelismValueError, match="not '25'"):
        DDPConfig(bucket_cap_mb="25")  # type: ignore[arg-type]
    with pytest.raises(ParallelismValueError, match="ddp.static_grap: unknown key .*'static_graph'"):
        ParallelismConfig.from_dict({"ddp": {"static_grap": True}})


def test_dtensors_are_not_replicated() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    model = models.M()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    with pytest.raises(ParallelismTypeError, match="0.weight, 0.bias are DTensors"):
        plan_parallelism(model, DDPConfig(), world_size=2)


def test_prepare_fully_shard_does_not_replicate() -> None:
    dist.init_process_group("fake", rank=0, world_size=1)
    with pytest.raises(ParallelismValueError, match="prepare_fully_shard only shards"):
        prepare_fully_shard(models.M(), ParallelismConfig(ddp=DDPConfig()))


def test_a_plan_is_made_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.ReLU())
    plan = plan_parallelism(model, DDPConfig(), world_size=512)
    assert plan.replication.nbytes == 4 * ((1 << 32) + (1 << 16))
