"""Precision names and policies, and the dtypes that really travel between two ranks."""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from composer_dist.errors import ParallelismValueError
from composer_dist.precision import Precision, mixed_precision_policy, require_fp8
from tests.kit.measure import record
from tests.kit.world import World

pytestmark = pytest.mark.promise(88)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

TABLE = [
    (None, "DEFAULT", None, None),
    (None, "FULL", None, None),
    ("fp32", "DEFAULT", F32, F32),
    ("fp32", "PURE", F32, F32),
    ("fp32", "FULL", F32, F32),
    ("amp_fp16", "DEFAULT", F16, F32),
    ("amp_fp16", "PURE", F16, F16),
    ("amp_fp16", "FULL", F32, F32),
    ("amp_bf16", "DEFAULT", BF16, F32),
    ("amp_bf16", "PURE", BF16, BF16),
    ("amp_bf16", "FULL", F32, F32),
]


@pytest.mark.parametrize(("precision", "mode", "param", "reduce"), TABLE)
def test_policies_follow_the_table(
    precision: str | None, mode: str, param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    expected = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    assert mixed_precision_policy(precision, mode) == expected
    assert mixed_precision_policy(precision, mode.lower()) == expected


def test_precision_is_a_string_enum() -> None:
    assert [str(precision) for precision in Precision] == ["fp32", "amp_fp16", "amp_bf16", "amp_fp8"]
    by_name = mixed_precision_policy(Precision.AMP_BF16)
    assert by_name == mixed_precision_policy("amp_bf16") == mixed_precision_policy("AMP_BF16")
    assert by_name == mixed_precision_policy("amp_fp8"), "it gathers bf16"


@pytest.mark.parametrize("name", [BF16, "bfloat16", "torch.bfloat16", "bf16", "amp_bf16", "BF16"])
def test_mapping_takes_dtypes_and_their_names(name: Any) -> None:
    policy = mixed_precision_policy(None, {"param_dtype": name, "output_dtype": "fp32"})
    assert policy == MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)


def test_mapping_overrides_default_key_by_key() -> None:
    policy = mixed_precision_policy("amp_bf16", {"cast_forward_inputs": False})
    assert policy == MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, cast_forward_inputs=False)
    assert mixed_precision_policy("amp_bf16", {"param_dtype": None}).param_dtype is None
    assert mixed_precision_policy("amp_bf16", {"reduce_dtype": BF16}).reduce_dtype is BF16


def test_buffer_dtype_is_accepted_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="FSDP2 does not cast buffers") as caught:
        policy = mixed_precision_policy("amp_bf16", {"buffer_dtype": "bf16"})
    assert policy == mixed_precision_policy("amp_bf16")
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize(
    ("precision", "mixed_precision", "says"),
    [
        (None, "PURE", "precision is None"),
        ("bf16-mixed", "DEFAULT", "'amp_fp16', 'amp_bf16', 'amp_fp8'"),
        ("fp32", "HALF", "'DEFAULT', 'PURE', 'FULL'"),
        ("fp32", {"parm_dtype": "fp32"}, "'parm_dtype'. Valid keys: param_dtype, reduce_dtype"),
        ("fp32", {"param_dtype": "float8"}, "'float8' is not a dtype .* float64, .* bf16"),
        ("fp32", {"param_dtype": torch.int8}, "torch.int8 is not a dtype"),
        ("fp32", {"cast_forward_inputs": "no"}, "is a bool, not 'no'"),
    ],
)
def test_wrong_values_and_combinations_are_refused(precision: Any, mixed_precision: Any, says: str) -> None:
    with pytest.raises(ParallelismValueError, match=says):
        mixed_precision_policy(precision, mixed_precision)


CANNOT = "cannot run here: "
NOT_INSTALLED = r"torchao is not installed \(pip .*\)"


@pytest.mark.parametrize(
    ("torchao", "device", "capability", "says"),
    [
        (None, "cpu", None, NOT_INSTALLED + r" and the model is on 'cpu', .* Use 'amp_bf16'"),
        (object(), "cpu", (9, 0), CANNOT + "the model is on 'cpu', not on a CUDA device. Use"),
        (object(), "cuda:1", (8, 0), CANNOT + "the device's compute capability is 8.0, below 8.9. Use"),
        (None, "cuda:1", (9, 0), CANNOT + NOT_INSTALLED + ". Use"),
        (object(), "cuda", (9, 0), None),
    ],
)
def test_fp8_is_refused_where_it_cannot_run(
    torchao: Any, device: str, capability: Any, says: str | None
) -> None:
    refusal = pytest.raises(ParallelismValueError, match=says) if says else contextlib.nullcontext()
    with (
        mock.patch("importlib.util.find_spec", return_value=torchao),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        refusal,
    ):
        require_fp8(torch.device(device))


def travelling_dtypes(precision: str | None, mixed_precision: Any, dtype: torch.dtype) -> dict[str, Any]:
    policy = mixed_precision_policy(precision, mixed_precision)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    # Inside the root a unit's output feeds modules that compute in param_dtype.
    fully_shard(model[0], mp_policy=dataclasses.replace(policy, output_dtype=None))
    fully_shard(model, mp_policy=policy)
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.update(computed=next(module.parameters()).dtype, input=args[0].dtype)

    model[0].register_forward_pre_hook(look)
    seen |= {"gathered": set(), "reduced": set()}
    with (
        record(seen["gathered"], "all_gather_single", "all_gather_into_tensor"),
        record(seen["reduced"], "reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        output = model(torch.randn(2, 8, dtype=dtype))
        output.sum().backward()
    seen["output"] = output.dtype
    seen["shards"] = {p.dtype for p in model.parameters()}
    seen["gradients"] = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return seen


@pytest.mark.parametrize(("precision", "mode", "param", "reduce"), TABLE)
def test_collectives_have_the_tables_dtypes(
    world2: World, precision: str | None, mode: str, param: Any, reduce: Any
) -> None:
    for seen in world2(travelling_dtypes, precision, mode, F32):
        assert seen["computed"] == seen["input"] == seen["output"] == (param or F32)
        assert seen["gathered"] == {param or F32}
        assert seen["reduced"] == {reduce or F32}
        assert seen["shards"] == seen["gradients"] == {F32}


def test_own_dtypes_and_a_mappings_are_what_travels(world2: World) -> None:
    for seen in world2(travelling_dtypes, None, "DEFAULT", BF16):
        assert seen["gathered"] == seen["reduced"] == seen["shards"] == {BF16}
        assert seen["output"] == BF16
    wanted = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "float32"}
    for seen in world2(travelling_dtypes, None, wanted, F32):
        assert (seen["gathered"], seen["reduced"]) == ({BF16}, {F32})
        assert (seen["computed"], seen["output"]) == (BF16, F32)
