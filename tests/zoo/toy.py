"""Toy-size Hugging Face models: each model type of the auto-mappings, small enough for a test.

    model = toy.build("llama")
    toy.loss(model, toy.inputs("llama", model)).backward()

Everything is seeded: the same name gives the same weights, the same batch and the same loss.
`listing` says which model types are left out, and why.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from composer_dist.tensors.nested import tensors_in
from tests.zoo import fields, listing, tables
from tests.zoo.batches import make_batch
from tests.zoo.configs import toy_config

FAST: tuple[str, ...] = (
    "albert",  # one layer called many times; tied decoder and its bias
    "bart",  # an embedding shared by encoder, decoder and head
    "bert",  # tied decoder whose bias belongs to another module
    "clip",  # a scalar parameter
    "deberta-v2",  # relative positions shared by all layers
    "deepseek_v3",  # latent attention; router with a bias buffer
    "deformable_detr",  # tied heads; frozen backbone; a parameter that is real under meta
    "encodec",  # weight-norm parametrizations; LSTM; codebooks in buffers
    "gemma3_text",  # non-persistent buffers per layer type
    "llama4",  # a complex buffer; an idle vision tower; experts in one 3-D parameter
    "mamba",  # conv1d's and dt_proj's weights used without their forward
    "mixtral",
    "rwkv",
    "t5",  # tied three ways; relative bias in the first block only
    "videomae",  # a plain tensor attribute
    "wav2vec2",  # parametrized convolution; group norm
    "whisper",  # frozen positions; tied head
    "zamba",  # whole layers tied, parameter by parameter
    "squeezebert",  # its encoder calls layer.forward(...), past the layer's hooks
)
"""Models for the default test run, chosen for what is odd about each."""


def _heads() -> dict[str, str]:
    """The class for each model type: the first head of `tables.MAPPINGS`, or else the headless model."""
    heads: dict[str, str] = {}
    mappings = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in tables.MAPPINGS.split()]
    for mapping in [*mappings, "MODEL_MAPPING_NAMES"]:
        for name, found in getattr(modeling_auto, mapping).items():
            heads.setdefault(name, found if isinstance(found, str) else found[0])
    return heads | fields.CLASSES


_HEADS = _heads()


def names() -> list[str]:
    """Model types that build at toy size and give a finite loss, in alphabetical order."""
    return sorted(_HEADS.keys() - {name for names in listing.REASONS.values() for name in names.split()})


def model_class(name: str) -> type[nn.Module]:
    return getattr(transformers, _HEADS[name])


def build(name: str, device: str = "cpu") -> nn.Module:
    """The toy model `name` in eval mode, float32, without dropout, with weights from seed 0.

    On `device="meta"` nothing is allocated, but for tensors of models that ignore the default device.
    """
    config = toy_config(name)
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(name)(config).eval()


def inputs(name: str, model_or_config: nn.Module | PretrainedConfig) -> dict[str, Tensor]:
    """A batch of two samples on the CPU, the same for every call."""
    config: Any = model_or_config.config if isinstance(model_or_config, nn.Module) else model_or_config
    return make_batch(name, model_class(name), config)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's own loss as a float32 scalar, or else a fixed linear form of its outputs.

    Entries that a model masks with infinity count as zero.
    """
    output = model(**batch)
    own = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(own, Tensor):
        return own.float().mean()
    forms = []
    for tensor in (one for one in tensors_in(output) if one.is_floating_point() and one.numel()):
        values = torch.nan_to_num(tensor.float(), 0.0, 0.0, 0.0).flatten()
        forms.append((values * torch.linspace(-1, 1, values.numel(), device=values.device)).mean())
    return torch.stack(forms).sum()
