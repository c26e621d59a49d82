"""accelerate's files and transformers' arguments, converted."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.recipe.converting.convert import convert_file, convert_values
from composer_dist.recipe.problems import ConfigurationError

pytestmark = pytest.mark.promise(140)

UNITS = [{"match": "type:LlamaDecoderLayer", "shard": True}, {"match": "", "shard": True}]
FSDP: dict[str, Any] = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "machine_rank": 0,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_cpu_ram_efficient_loading": True,
    },
}


def test_accelerates_file_becomes_a_parallelism(tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text(yaml.safe_dump(FSDP, sort_keys=False))
    done = convert_file(file)
    assert (done.library, done.whole) == ("accelerate", False)
    assert done.values == {
        "parallelism": {
            "fsdp2": {
                "reshard_after_forward": False,
                "cpu_offload": True,
                "state_dict_type": "sharded",
                "mixed_precision": "PURE",
            },
            "activation_checkpointing": "composable",
            "rules": UNITS,
        },
        "trainer": {"precision": "amp_bf16"},
    }
    found = {one.key: one.line for one in done.remarks}
    assert found == {"num_processes": 3, "machine_rank": 4, "fsdp_config.fsdp_cpu_ram_efficient_loading": 13}
    only = yaml.safe_load(done.text("default_config.yaml", only="parallelism"))
    assert resolve_config(only) == resolve_config(done.values["parallelism"])


@pytest.mark.parametrize(
    ("given", "parallelism"),
    [
        ({"distributed_type": "MULTI_GPU"}, "ddp"),
        ({"distributed_type": "NO"}, None),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2}},
            {"fsdp2": {"reshard_after_forward": False}},
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, "ddp"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"version": 2, "reshard_after_forward": None}},
            {"fsdp2": {}},
        ),
        ({"fsdp": "hybrid_shard_zero2", "output_dir": "out"},
         {"fsdp2": {"reshard_after_forward": False}, "strategy": "hsdp"}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "HYBRID_SHARD_ZERO2"}},
            {"fsdp2": {"reshard_after_forward": False}, "strategy": "hsdp"},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": "true",
             "fsdp_activation_checkpointing_offload": "true"}},
            {"fsdp2": {}, "activation_checkpointing": ["composable", {"offload": True}]},
        ),
        (
            {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_tp_size": 2,
             "parallelism_config_dp_shard_size": 4}},
            {"fsdp2": {}, "mesh": {"dp_shard": 4, "tp": 2}, "tp": {}},
        ),
        (
            {"distributed_type": "MULTI_GPU", "dynamo_config": {"dynamo_backend": "INDUCTOR",
             "dynamo_mode": "max-autotune"}},
            {"strategy": "ddp", "compile": {"backend": "inductor", "mode": "max-autotune"}},
        ),
    ],
)  # fmt: skip
def test_accelerates_other_files(given: dict[str, Any], parallelism: Any) -> None:
    done = convert_values(given)
    assert done.values["parallelism"] == parallelism
    if isinstance(parallelism, dict) and parallelism.get("strategy") != "hsdp":
        assert isinstance(resolve_config(parallelism), ParallelismConfig)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (
            {"version": 2, "reshard_after_forward": True,
             "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            {"parallelism": {"fsdp2": {"reshard_after_forward": True}, "rules": UNITS}},
        ),
        (
            {"fsdp": True, "bf16": True,
             "fsdp_config": {"cpu_offload": True, "state_dict_type": "FULL_STATE_DICT"}},
            {
                "parallelism": {
                    "fsdp2": {"cpu_offload": True, "state_dict_type": "full", "mixed_precision": "PURE"}
                },
                "trainer": {"precision": "amp_bf16"},
            },
        ),
        (
            {"fsdp": "shard_grad_op auto_wrap offload", "output_dir": "out"},
            {"parallelism": {"fsdp2": {"reshard_after_forward": False, "cpu_offload": True}}},
        ),
        ({"fsdp": "no_shard auto_wrap offload", "output_dir": "out"}, {"parallelism": "ddp"}),
        (
            {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 50, "ddp_broadcast_buffers": True,
             "ddp_static_graph": True, "gradient_checkpointing": True},
            {
                "parallelism": {
                    "ddp": {"find_unused_parameters": False, "bucket_cap_mb": 50, "broadcast_buffers": True,
                            "static_graph": True},
                    "activation_checkpointing": "composable",
                }
            },
        ),
    ],
)  # fmt: skip
def test_transformers_arguments(given: dict[str, Any], values: dict[str, Any]) -> None:
    done = convert_values(given)
    assert done.library == "transformers"
    assert done.values == values
    resolve_config(values["parallelism"])


def test_transformers_arguments_without_fsdp_stay_without_it() -> None:
    """As `TrainingArguments.to_json_string` writes them."""
    off = {"min_num_params": 0, "xla": False}
    given = {"output_dir": "out", "bf16": True, "fsdp": [], "fsdp_config": off, "deepspeed": "zero.json"}
    done = convert_values(given)
    assert done.values == {"parallelism": "ddp", "trainer": {"precision": "amp_bf16"}}
    assert {one.key: one.undecided for one in done.remarks} == {
        "deepspeed": True, "fsdp_config": False, "output_dir": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"distributed_type": "DEEPSPEED"},
            "distributed_type: DEEPSPEED cannot be converted: parallelism: fsdp",
        ),
        ({"distributed_type": "SOME"}, "SOME is not one of NO, FSDP, MULTI_GPU"),
        ({"distributed_type": "NO", "mixed_precision": "fp4"}, "mixed_precision: fp4 is not one of no, fp16"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_state_dict_type": "HALF"}},
            "fsdp_config.fsdp_state_dict_type: HALF is not one of FULL_STATE_DICT",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": "perhaps"}},
            "expected true or false, got 'perhaps'",
        ),
        ({"fsdp": "full_shard maybe"}, "'maybe' is not one of full_shard"),
        ({"fsdp": True, "fsdp_config": "fsdp.json"}, "fsdp.json is another file; convert that one"),
    ],
)
def test_an_error_names_the_key_and_the_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        convert_values(given)
    assert message in str(error.value)


def test_units_by_size_must_be_chosen_again() -> None:
    given = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000, "version": 2, "bogus": 1}
    done = convert_values(given)
    assert {one.key: one.undecided for one in done.remarks} == {
        "auto_wrap_policy": True,
        "min_num_params": False,
        "bogus": False,
    }
