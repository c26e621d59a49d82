"""Seeded dummy inputs, made from the signature of a model's forward and from its configuration."""

import inspect
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from tests.zoo import arguments, tables

BATCH = 2
PATCHES = 16
"""Patches per image of models that take flattened patches: a grid of 1 x 4 x 4."""

_OPTIONAL = {"input_ids", "return_loss", "bbox", "decoder_input_ids", "labels"}
_OPTIONAL |= {"start_positions", "end_positions"}
_LABELED_BY_DICTS = ("Detection", "Segmentation", "Depth")
_COMMON = {name: make for names, make in arguments.COMMON.items() for name in names.split()}
_SPECIAL = {name: makers for names, makers in arguments.INPUTS.items() for name in names.split()}
_IMAGES = {name: layout for names, layout in arguments.IMAGES.items() for name in names.split()}


def make_batch(name: str, cls: Any, config: Any) -> dict[str, Tensor]:
    """Two samples for `cls.forward`: what it requires, its main input, its labels."""
    accepted = inspect.signature(cls.forward).parameters
    main = cls.main_input_name
    wanted = {k for k, p in accepted.items() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD}
    wanted |= ({main} if isinstance(main, str) else set(main)) | (_OPTIONAL & set(accepted))
    if "return_loss" in wanted:  # a dual encoder needs both sides
        wanted |= {"pixel_values", "input_features"} & set(accepted)
    if any(task in cls.__name__ for task in _LABELED_BY_DICTS):
        wanted.discard("labels")
    if "labels" in wanted:
        wanted.discard("decoder_input_ids")
    special = _SPECIAL.get(name, {})
    makers = _COMMON | special
    draw = Draw(config, cls.__name__, seq2seq="decoder_input_ids" in accepted)
    for key in sorted((wanted | set(special)) - {"self"}, key=lambda k: (k == "labels", k)):
        if (make := makers.get(key)) is not None:
            draw.made[key] = draw.normal(*make) if isinstance(make, tuple) else make(draw)
        if key == "input_ids" and name in _IMAGES:
            draw.splice_images(*_IMAGES[name], accepted)
    return draw.made


class Draw:
    """Draws from one generator."""

    def __init__(self, config: Any, cls_name: str, seq2seq: bool) -> None:
        self.config = config
        self.cls_name = cls_name
        self.seq2seq = seq2seq
        self.generator = torch.Generator().manual_seed(0)
        self.made: dict[str, Tensor] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def integers(self, *shape: int, low: int = 10, high: int = 100) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(*shape, dtype=torch.long)

    def tensor(self, value: Any) -> Tensor:
        return torch.tensor(value)

    def ids(self, length: int = tables.LENGTH) -> Tensor:
        """Token ids below the special tokens, `(BATCH, length)`."""
        high = min(find(self.config, "vocab_size", default=tables.VOCAB), 100)
        return self.integers(BATCH, length, low=min(10, high // 2), high=high)

    def bbox(self) -> Tensor:
        corner = self.integers(BATCH, tables.LENGTH, 2, low=1, high=30)
        return torch.cat([corner, corner + 5], dim=-1)

    def labels(self) -> Tensor:
        if "Classification" in self.cls_name:
            return torch.tensor([0, 1])
        if "CTC" in self.cls_name:
            return self.ids(4)
        ids = self.made.get("input_ids")
        return self.ids() if self.seq2seq or ids is None else ids.clone()

    def pixel_values(self) -> Tensor:
        return self.normal(BATCH, *self._image())

    def pixel_values_videos(self) -> Tensor:
        frames = find(self.config, "num_frames", "frames_per_clip", default=2)
        return self.normal(BATCH, frames, *self._image())

    def input_features(self) -> Tensor:
        audio = _inner(self.config, ("audio_config", "encoder_config", "speech_config", "encoder"))
        mels = find(audio, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
        if getattr(audio, "max_source_positions", None) and not self.cls_name.startswith("Speech2Text"):
            return self.normal(BATCH, mels, 2 * audio.max_source_positions)
        return self.normal(BATCH, 64, mels)

    def splice_images(self, layout: str, tokens: int, accepted: Container[str]) -> None:
        """Put one image of `tokens` tokens before each sample's text, its pixels beside it."""
        text = self.made["input_ids"]
        token = find(self.config, "image_token_id", "image_token_index", default=tables.TOKENS["image"])
        self.made["input_ids"] = torch.cat(
            [text[:, :1], torch.full((BATCH, tokens), token), text[:, 1:]], dim=1
        )
        channels, height, width = self._image()
        if layout in ("grid", "patches"):
            self.made["pixel_values"] = self.patches().flatten(1) if layout == "grid" else self.patches()
            self.made["image_grid_thw"] = self.grid()
        else:
            tiles = [1] if layout == "tiles" else []
            self.made["pixel_values"] = self.normal(BATCH, *tiles, channels, height, width)
        if layout == "sizes":
            self.made["image_sizes"] = torch.tensor([[height, width]] * BATCH)
        for key in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
            if key in accepted:
                self.made[key] = (self.made["input_ids"] == token).long()

    def _image(self) -> tuple[int, int, int]:
        config = _inner(
            self.config, ("vision_config", "backbone_config", "image_config", "encoder", "thinker_config")
        )
        size = find(config, "image_size", "img_size", default=tables.IMAGE)
        channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return (channels if isinstance(channels, int) else 3, height, width)

    def grid(self) -> Tensor:
        return torch.tensor([[1, 4, 4]] * BATCH)

    def patches(self) -> Tensor:
        config = _inner(self.config, ("thinker_config", "vision_config"))
        channels = find(config, "in_channels", "num_channels", "in_chans", default=3)
        depth = find(config, "temporal_patch_size", default=1)
        return self.normal(BATCH * PATCHES, channels * depth, config.patch_size, config.patch_size)


def find(config: Any, *names: str, default: Any) -> Any:
    """The first of `names` in the configuration or, breadth first, in its sub-configurations."""
    queue = [config]
    while queue:
        current = queue.pop(0)
        for name in names:
            value = getattr(current, name, None)
            if value is not None:
                return value
        queue += [
            sub for key in current.sub_configs_defaults if (sub := getattr(current, key, None)) is not None
        ]
    return default


def _inner(config: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if key in config.sub_configs_defaults and getattr(config, key, None) is not None:
            return _inner(getattr(config, key), keys)
    return config
