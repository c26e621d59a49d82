"""Configurations: what they accept, refuse, and turn into."""

import dataclasses
from typing import Any

import pytest
import yaml

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import near_miss
from tests.kit.compare import fails


@pytest.mark.promise(1)
def test_sizes_that_do_not_fit_the_world_are_named() -> None:
    sizes = ("dp_replicate=1", "dp_shard=2", "cp=1", "tp=2")
    with fails(ParallelismValueError, *sizes, "2 ranks", "multiply to 4", "4 processes"):
        MeshConfig(dp_shard=2, tp=2).resolve(2)
    with fails(ParallelismValueError, "multiply to 3. Change a size, or start a multiple of 3 processes."):
        MeshConfig(tp=3).resolve(4)


@pytest.mark.promise(1)
def test_minus_one_takes_the_rest() -> None:
    assert MeshConfig(dp_shard=-1, tp=2).resolve(2) == {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert MeshConfig(dp_replicate=-1, dp_shard=4).resolve(8)["dp_replicate"] == 2
    with pytest.raises(ParallelismValueError, match="world of 6 ranks"):
        MeshConfig(dp_shard=-1, tp=4).resolve(6)


def test_composer_defaults() -> None:
    defaults = {
        "device_mesh": None,
        "reshard_after_forward": True,
        "activation_checkpointing": False,
        "activation_cpu_offload": False,
        "state_dict_type": "sharded",
        "load_monolith_rank0_only": False,
        "mixed_precision": "DEFAULT",
        "verbose": False,
    }
    assert {name: getattr(FSDP2Config(), name) for name in defaults} == defaults


@pytest.mark.promise(17)
@pytest.mark.parametrize("config", [FSDP2Config(), MeshConfig(), Rule("a"), ParallelismConfig(), DDPConfig()])
def test_configurations_are_frozen(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)


def test_composer_attributes_are_carried_over() -> None:
    attrs = {"activation_checkpointing": True, "activation_cpu_offload": True, "reshard_after_forward": False}
    assert FSDP2Config.from_compatible_attrs(attrs | {"device_mesh": None}) == FSDP2Config(**attrs)
    assert FSDP2Config.from_compatible_attrs({}) == FSDP2Config()


def test_composer_attributes_without_meaning_warn_once_each() -> None:
    ignored = {"invalid_attribute1": "value1", "auto_wrap": True, "sync_module_states": True}
    attrs = {"activation_checkpointing": True, **ignored}
    with pytest.warns(UserWarning, match="is ignored") as caught:
        config = FSDP2Config.from_compatible_attrs(attrs)
    assert config.activation_checkpointing is True
    assert len(caught) == 3
    for name, value in ignored.items():
        assert sum(f"'{name}: {value}'" in str(one.message) for one in caught) == 1
    assert len(attrs) == 4


def test_fsdp1_sharding_strategy_becomes_resharding() -> None:
    for strategy, reshard in (("FULL_SHARD", True), ("shard_grad_op", False)):
        config = FSDP2Config.from_compatible_attrs({"sharding_strategy": strategy})
        assert config.reshard_after_forward is reshard
    for strategy, others in (("FULL_SHARD", {"reshard_after_forward": False}), ("NO_SHARD", {})):
        with pytest.warns(UserWarning, match="sharding_strategy"):
            FSDP2Config.from_compatible_attrs({"sharding_strategy": strategy} | others)


@pytest.mark.promise(91)
def test_misspelt_keys_name_themselves_and_their_neighbors_all_at_once() -> None:
    with pytest.raises(ParallelismValueError) as caught:
        ParallelismConfig.from_dict({"fsdp": {}, "sync": "rank0"})
    assert str(caught.value) == "ParallelismConfig.fsdp: unknown key 'fsdp'. Did you mean 'fsdp2'?"
    with fails(
        ParallelismValueError,
        "ParallelismConfig.mesh.dp_shards: unknown key 'dp_shards'. Did you mean 'dp_shard'?\n",
        "fsdp2.reshard_after_forwards: unknown key 'reshard_after_forwards'. Did you mean 'reshard_after_f",
        "rules.0.shrad: unknown key 'shrad'. Did you mean 'shard'?\n",
        "sync: expected 'auto', 'rank0' or 'verify', got 'rank1'",
    ):
        rules = [{"match": "a", "shrad": True}]
        rest = {"fsdp2": {"reshard_after_forwards": True}, "rules": rules, "sync": "rank1"}
        ParallelismConfig.from_dict({"mesh": {"dp_shards": 2}, **rest})


@pytest.mark.promise(91)
def test_yaml() -> None:
    text = """
    mesh: {dp_replicate: 2, dp_shard: 4}
    fsdp2: {reshard_after_forward: 2, mixed_precision: {param_dtype: bfloat16}, cpu_offload: pageable}
    rules:
      - {match: "re:layers\\\\.[01]", shard: true}
      - {match: [head, embed], shard: false, optional: true}
    activation_checkpointing: [composable, null]
    sync: verify
    """
    assert ParallelismConfig.from_dict(yaml.safe_load(text)) == ParallelismConfig(
        mesh=MeshConfig(dp_replicate=2, dp_shard=4),
        fsdp2=FSDP2Config(
            reshard_after_forward=2, mixed_precision={"param_dtype": "bfloat16"}, cpu_offload="pageable"
        ),
        rules=[Rule(r"re:layers\.[01]", shard=True), Rule(["head", "embed"], shard=False, optional=True)],
        activation_checkpointing=["composable", None],
        sync="verify",
    )


@pytest.mark.promise(91)
@pytest.mark.parametrize("value", [True, 1])
def test_bool_and_int_stay_what_they_are(value: Any) -> None:
    found = FSDP2Config.from_dict({"reshard_after_forward": value}).reshard_after_forward
    assert (type(found), found) == (type(value), value)


def test_everything_resolves_to_one_config() -> None:
    fsdp2 = FSDP2Config(reshard_after_forward=False)
    whole = ParallelismConfig(mesh=MeshConfig(), fsdp2=fsdp2)
    assert resolve_config(whole) == resolve_config(ParallelismConfig(fsdp2=fsdp2)) == whole
    assert resolve_config(fsdp2) == whole
    assert resolve_config({"fsdp2": {"reshard_after_forward": False}}) == whole
    assert resolve_config("fsdp") == ParallelismConfig(mesh=MeshConfig(), fsdp2=FSDP2Config())
    assert resolve_config(DDPConfig()).mesh == MeshConfig(dp_replicate=-1, dp_shard=1)


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ParallelismTypeError, match="not TPConfig"):
        resolve_config(TPConfig())  # type: ignore[arg-type]


def test_near_miss() -> None:
    assert near_miss("layer.1", ["layers.1", "head"]) == " Did you mean 'layers.1'?"
    assert near_miss("xyz", ["layers.1"]) == ""
    llama = ["num_labels", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    assert near_miss("num_layers", llama) == " Did you mean 'num_hidden_layers'?"
    assert near_miss("num_heads", llama) == " Did you mean 'num_attention_heads'?"
    assert near_miss("lm_head", ["base", "base.model.lm_head"]) == " Did you mean 'base.model.lm_head'?"


WRONG_SIZES = [
    (lambda: MeshConfig(dp_shard=0), "dp_shard=0"),
    (lambda: MeshConfig(dp_shard=-2), "dp_shard=-2"),
    (lambda: MeshConfig(dp_replicate=-1), "dp_replicate and dp_shard"),
]
WRONG_VALUES = [
    (lambda: FSDP2Config(activation_checkpointing=("wraped", {})), "activation_checkpointing must be one"),
    (lambda: FSDP2Config(activation_cpu_offload="no"), "activation_cpu_offload must be one of False, T"),
    (lambda: MeshConfig(device_type=2**63), "device_type must be a device type .* not 9223372036854775808"),
    (lambda: DDPConfig(bucket_cap_mb=float("inf")), "bucket_cap_mb must be positive, .* not inf"),
    (lambda: TPConfig(plan={"re:a{99999999999}": "colwise"}), "plan's 're:a.*' is an invalid regular"),
    (lambda: TPConfig(plan={"re:" + "(" * 5000: "colwise"}), "plan's 're:.*'[.]* is an invalid regular"),
    (lambda: MeshConfig(device_type="cpuu"), "device_type must be a device type .* not 'cpuu'"),
    (lambda: TPConfig(plan={"re:layers.(": "colwise"}), "TPConfig.plan's 're:layers.*invalid regular"),
    (lambda: FSDP2Config(load_monolith_rank0_only=True), "leave it out.*every rank read only its part"),
]
WRONG_TYPES = [
    (lambda: FSDP2Config(reshard_after_forward="yes"), "reshard_after_forward must be True, False or"),
    (lambda: MeshConfig(dp_shard="2"), "Mesh size dp_shard must be an integer, not '2'"),
    (lambda: ParallelismConfig(rules=Rule("head")), "rules must be a sequence of Rule"),
    (lambda: ParallelismConfig(forward_methods=[3]), r"forward_methods must be .* not \[3\]"),
    (lambda: ParallelismConfig(rules=5), "rules must be a sequence of Rule"),
    (lambda: ParallelismConfig.from_dict({"strategy": 5}), "strategy must be the name of one, not 5"),
    (lambda: TPConfig(head_attributes=5), "head_attributes must be .* not 5"),
    (lambda: TPConfig(head_attributes="breadth"), "head_attributes must be .* not 'breadth'"),
]
TWICE = {"fsdp2": FSDP2Config(activation_checkpointing=True), "activation_checkpointing": "offload"}


@pytest.mark.promise(118)
@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: ParallelismConfig(sync="rank1"), "sync must be one of 'auto', 'rank0', 'verify', not"),
        (lambda: ParallelismConfig(containers="keep"), "containers must be one of 'expand', 'skip', not"),
        (lambda: FSDP2Config(state_dict_type="local"), "state_dict_type must be one of 'sharded', 'full'"),
        (lambda: FSDP2Config(cpu_offload="pined"), "cpu_offload must be one of .*'pinned'"),
        (lambda: ParallelismConfig(bucket_bytes=0), "bucket_bytes must be a positive number"),
        (lambda: ParallelismConfig(bucket_bytes="1"), "bucket_bytes must be a positive number, not '1'"),
        (lambda: ParallelismConfig(strict="no"), "strict must be one of False, True, not 'no'"),
        (lambda: ParallelismConfig(**TWICE), "set twice"),
        *(pytest.param(*case, marks=pytest.mark.promise(1)) for case in WRONG_SIZES),
        *(pytest.param(*case, marks=pytest.mark.promise(91)) for case in WRONG_VALUES + WRONG_TYPES),
    ],
)
def test_what_does_not_exist_or_has_a_wrong_type_is_refused_by_name(build: Any, text: str) -> None:
    kind = ParallelismTypeError if (build, text) in WRONG_TYPES else ParallelismValueError
    with pytest.raises(kind, match=text):
        build()


@pytest.mark.parametrize(
    ("environment", "tp"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "1"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "2"}, 2),
    ],
)
def test_auto_is_tensor_parallel_within_a_host_and_sharded_across(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], tp: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert MeshConfig.auto() == MeshConfig(tp=tp)
    assert MeshConfig.auto(2).resolve(8) == {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2}


@pytest.mark.parametrize("local", ["", "3", "many", "0"])
def test_auto_does_not_guess_how_many_ranks_a_host_has(monkeypatch: pytest.MonkeyPatch, local: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(ParallelismValueError, match=f"LOCAL_WORLD_SIZE is {local or 'not set'}"):
        MeshConfig.auto()


def test_ddp_on_a_device_replicates_over_all_ranks() -> None:
    mesh = MeshConfig(device_type="cpu")
    found = resolve_config(ParallelismConfig(mesh=mesh, ddp=DDPConfig())).mesh
    assert found == MeshConfig(dp_replicate=-1, dp_shard=1, device_type="cpu")
