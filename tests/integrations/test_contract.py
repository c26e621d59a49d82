"""What the integrations override and read in other libraries: a name that moves is named here."""

import importlib
import inspect
from typing import Any

import pytest

LIGHTNING = "lightning.pytorch.strategies.ModelParallelStrategy"
FABRIC = "lightning.fabric.strategies.ModelParallelStrategy"
PRECISION = "lightning.pytorch.plugins.precision.Precision"
ACCELERATOR = "accelerate.Accelerator"
NAMES = {
    f"{LIGHTNING}.__init__": "save_distributed_checkpoint process_group_backend timeout",
    f"{LIGHTNING}.setup_environment": "",
    f"{LIGHTNING}._setup_distributed": "",
    f"{LIGHTNING}.setup": "trainer",
    f"{LIGHTNING}.setup_optimizers": "trainer",
    f"{LIGHTNING}.setup_precision_plugin": "",
    f"{LIGHTNING}.tensor_init_context": "empty_init",
    f"{LIGHTNING}.block_backward_sync": "",
    f"{LIGHTNING}.predict_step": "args kwargs",
    f"{LIGHTNING}.on_predict_end": "",
    f"{LIGHTNING}.lightning_module_state_dict": "",
    f"{LIGHTNING}.optimizer_state": "optimizer",
    f"{LIGHTNING}.save_checkpoint": "checkpoint filepath storage_options",
    f"{LIGHTNING}.load_checkpoint": "checkpoint_path",
    f"{LIGHTNING}.load_model_state_dict": "checkpoint strict",
    f"{LIGHTNING}.load_optimizer_state_dict": "checkpoint",
    f"{PRECISION}.clip_grad_by_norm": "optimizer clip_val",
    f"{PRECISION}.clip_grad_by_value": "optimizer clip_val",
    f"{PRECISION}.main_params": "optimizer",
    f"{PRECISION}.convert_module": "module",
    f"{FABRIC}.__init__": "parallelize_fn save_distributed_checkpoint process_group_backend timeout",
    f"{FABRIC}._setup_distributed": "",
    f"{FABRIC}.setup_module": "module",
    f"{FABRIC}.setup_module_and_optimizers": "module optimizers",
    f"{FABRIC}.module_init_context": "empty_init",
    f"{FABRIC}.clip_gradients_norm": "module optimizer max_norm norm_type error_if_nonfinite",
    f"{FABRIC}.clip_gradients_value": "module optimizer clip_val",
    f"{FABRIC}.save_checkpoint": "path state storage_options filter",
    f"{FABRIC}.load_checkpoint": "path state strict",
    "lightning.fabric.strategies.strategy._BackwardSyncControl.no_backward_sync": "module enabled",
    f"{ACCELERATOR}.__init__": "cpu mixed_precision fsdp_plugin deepspeed_plugin deepspeed_plugins "
    "megatron_lm_plugin torch_tp_plugin parallelism_config dynamo_backend dynamo_plugin",
    f"{ACCELERATOR}.prepare": "args device_placement",
    f"{ACCELERATOR}.prepare_model": "model device_placement evaluation_mode",
    f"{ACCELERATOR}.prepare_optimizer": "optimizer device_placement",
    f"{ACCELERATOR}.prepare_scheduler": "scheduler",
    f"{ACCELERATOR}.prepare_data_loader": "data_loader",
    f"{ACCELERATOR}._prepare_device_mesh": "",
    f"{ACCELERATOR}.no_sync": "model",
    f"{ACCELERATOR}.clip_grad_norm_": "parameters max_norm norm_type",
    f"{ACCELERATOR}.clip_grad_value_": "parameters clip_value",
    f"{ACCELERATOR}.gather": "tensor",
    f"{ACCELERATOR}.get_state_dict": "model unwrap",
    f"{ACCELERATOR}.save_model": "model save_directory",
    f"{ACCELERATOR}.save_state": "output_dir",
    f"{ACCELERATOR}.load_state": "input_dir",
    f"{ACCELERATOR}.register_save_state_pre_hook": "hook",
    f"{ACCELERATOR}.register_load_state_pre_hook": "hook",
    "accelerate.scheduler.AcceleratedScheduler.__init__": "scheduler optimizers step_with_optimizer "
    "split_batches",
}
"""Methods, and the parameters that we take or pass."""
ATTRIBUTES = {
    f"{LIGHTNING}.__init__": "_device_mesh _save_distributed_checkpoint",
    f"{FABRIC}.__init__": "_device_mesh _save_distributed_checkpoint _backward_sync_control",
    "lightning.pytorch.strategies.ParallelStrategy.__init__": "_layer_sync",
    "lightning.pytorch.strategies.Strategy.precision_plugin.fset": "_precision_plugin",
    "lightning.fabric.Fabric.no_backward_sync": "_backward_sync_control",
    f"{ACCELERATOR}.accumulate": "self.no_sync",
    f"{ACCELERATOR}.prepare_data_loader": "self._prepare_device_mesh",
    f"{ACCELERATOR}.gather_for_metrics": "self.gather(",
    f"{ACCELERATOR}.save_state": "self._models self._optimizers hook(self._models, self.get_state_dict",
    f"{ACCELERATOR}.load_state": "self._models self._optimizers hook(models,",
}
"""Functions whose source has the private attributes that we read or set, and the calls that we rely on."""


def found(path: str) -> Any:
    """A class's attribute; an AssertionError names what is missing."""
    parts = path.split(".")
    pytest.importorskip(parts[0], reason=f"needs {parts[0]}")
    where = next(i for i, part in enumerate(parts) if part[:1].isupper() or part.startswith("_"))
    thing = importlib.import_module(".".join(parts[:where]))
    for part in parts[where:]:
        assert hasattr(thing, part), f"{path}: {thing} has no {part!r} any more"
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("path", NAMES)
def test_a_method_has_the_parameters_that_we_know(path: str) -> None:
    parameters = set(inspect.signature(found(path)).parameters) - {"self"}
    missing = set(NAMES[path].split()) - parameters
    assert not missing, f"{path} has no {missing} any more, but {parameters}"


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_a_private_attribute_is_where_we_know_it(path: str) -> None:
    source = inspect.getsource(found(path))
    missing = [name for name in ATTRIBUTES[path].split() if name not in source]
    assert not missing, f"{path} does not set {missing} any more"
