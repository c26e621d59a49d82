"""Any transformers model, with or without peft, as a `ComposerModel`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from composer_dist._torch import finish_lazily, fsdp_param_groups
from composer_dist.composer_model import ComposerModel
from composer_dist.distributed.ranks.process_group import world_and_rank
from composer_dist.distributed.sharding.generation import check_static_cache
from composer_dist.distributed.sharding.hooks import stay_gathered
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.losses.logits import put_off
from composer_dist.models.adapters import adapter_keys
from composer_dist.models.loss_terms import IGNORED, loss_mean, loss_terms, shifts_labels
from composer_dist.structure.calling import whole
from composer_dist.structure.names import canonical_name

if TYPE_CHECKING:
    from peft import PeftConfig
    from torchmetrics import Metric
    from transformers import PreTrainedTokenizerBase


class HuggingFaceModel(ComposerModel):
    """A transformers or peft model, for batches that are mappings of its forward's arguments.

    Args:
        model: a transformers model or a `PeftModel`, real or on the meta device.
        tokenizer: exported with the model; provides the padding token for `generate`.
        use_logits: metrics get logits instead of the model's whole output.
        metrics: torchmetrics to follow while training.
        eval_metrics: torchmetrics to follow while evaluating; copies of `metrics` by default.
        shift_labels: compare position i with label i + 1 in metrics, and ignore the last position; None
            does so for models whose own loss does: causal and multimodal language models, but not those with
            an encoder and a decoder, nor decoders such as BartForCausalLM, whose labels are shifted already.
        allow_embedding_resizing: enlarge the embeddings if the tokenizer has more tokens.
        peft_config: adds an adapter to `model`, on the meta device if `model` is there.
        should_save_peft_only: `state_dict()` has only the adapters, by peft's rules, and loads only them.
        chunked_loss: train without all logits, a number of positions at a time (an integer is this number),
            where the model's head is linear and neither a metric nor a subclass's `loss` reads them.

    Raises:
        ParallelismTypeError: `model` is the name of a model, for example.
        ParallelismValueError: the tokenizer has more tokens than the model; the adapter's configuration names
            modules that the model does not have.
        CheckpointValueError: only adapters are to be saved, and one has no tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        use_logits: bool = False,
        metrics: Sequence[Metric] | None = None,
        eval_metrics: Sequence[Metric] | None = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: PeftConfig | None = None,
        should_save_peft_only: bool = True,
        chunked_loss: bool | int = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ParallelismTypeError(
                f"HuggingFaceModel takes a model, not {model!r}: load one by "
                "AutoModelForCausalLM.from_pretrained(name), for example."
            )
        if tokenizer is not None:
            _fit_vocabulary(model, len(tokenizer), allow_embedding_resizing)
        if peft_config is not None:
            model = _adapted(model, peft_config)
        _register_once(model)
        self.model: Any = model
        self.tokenizer = tokenizer
        self.use_logits = use_logits
        self.shift_labels = shifts_labels(_base(model)) if shift_labels is None else shift_labels
        self.using_peft = isinstance(getattr(model, "peft_config", None), Mapping)
        self.should_save_peft_only = should_save_peft_only and self.using_peft
        # Dictionaries, so that nn.Module does not take the metrics for submodules.
        self.train_metrics = _by_class(metrics or ())
        chosen = deepcopy(list(metrics or ())) if eval_metrics is None else eval_metrics
        self.val_metrics = _by_class(chosen)
        self._arguments = _arguments(_base(model))
        if self.should_save_peft_only:
            adapter_keys(model)  # refuse an empty adapter now, not after the training
        self.chunked_loss, self._has_own_loss = chunked_loss, type(self).loss is not HuggingFaceModel.loss
        self._loading_prefix = ""
        untyped: Any = self  # torch 2.13 has no types for these three
        untyped.register_state_dict_post_hook(_drop_base)
        untyped.register_load_state_dict_pre_hook(_note_prefix)
        untyped.register_load_state_dict_post_hook(_expect_no_base)

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self.model.config

    def forward(self, batch: Any) -> Any:
        """The model's output for the entries of the batch that its forward accepts."""
        if not isinstance(batch, Mapping):
            raise ParallelismTypeError(
                f"HuggingFaceModel's batches must be mappings, not {type(batch).__name__}; let the collate "
                "function return a mapping of tensors (input_ids, labels, ...)."
            )
        inputs = {key: value for key, value in batch.items() if key in self._arguments}
        is_packed = "position_ids" in inputs and "attention_mask" not in inputs
        if "use_cache" in self._arguments and (
            is_packed or (self.model.training and torch.is_grad_enabled())
        ):
            # With a cache, transformers does not detect packed documents: they would attend to each other.
            # In training nobody reads it, and a compiled block would be recompiled for each index in it.
            inputs.setdefault("use_cache", False)
        with self._without_logits(inputs):
            return self.model(**inputs)

    def _without_logits(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Inside, a loss is computed without logits, unless somebody reads them."""
        training = self.model.training  # of `from_pretrained` it is in eval mode, whatever this one is in
        read = self._has_own_loss or self.get_metrics(training) or (self.use_logits and not training)
        only_loss = (training or self.only_loss) and inputs.get("labels") is not None
        if not self.chunked_loss or read or not only_loss or torch.compiler.is_compiling():
            return nullcontext()
        return put_off(_base(self.model), None if self.chunked_loss is True else self.chunked_loss)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The loss that the model computed from the batch's labels; of a sum over samples, the mean."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            raise ParallelismValueError(
                f"{type(self.model).__name__} computed no loss: the batch needs labels; it has "
                f"only {', '.join(batch)}."
            )
        return loss_mean(_base(self.model), loss, batch)

    def loss_weight(self, batch: Any) -> float | None:
        """The number of terms that the loss averages over.

        These are the labels that are not -100. In semantic segmentation they are the pixels that the
        configuration does not ignore, with CTC the samples, and in question answering the answers inside of
        the input; the last is not exact where one answer's start is inside of it and its end is not.
        """
        return loss_terms(_base(self.model), batch, self.shift_labels)

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """The model's output, or with `use_logits` the logits `(batch, ..., classes)`."""
        outputs = self(batch) if outputs is None else outputs
        if not self.use_logits or isinstance(outputs, Tensor):
            return outputs
        logits = whole(outputs["logits"] if isinstance(outputs, Mapping) else _first_logits(outputs))
        return logits.squeeze(1) if logits.ndim == 2 and logits.shape[1] == 1 else logits

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """The metrics given at construction, by class name."""
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Adds the batch's outputs and labels, shifted if the model shifts them."""
        labels = batch.get("shift_labels", batch["labels"])
        if self.shift_labels and "shift_labels" not in batch:
            labels = labels.roll(-1, dims=-1)
            labels[..., -1] = IGNORED
        metric.to(labels.device).update(outputs, labels)

    def generate(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Transformers' `generate`, on a prepared model too, where it is a collective.

        Ranks may have different prompts of different lengths; a rank that has finished participates until
        all have. Parameters of the root unit stay gathered until the end, because `generate` calls encoders,
        and the base of a `PeftModel`, without the root's forward.

        Args:
            input_ids: prompts `(batch, length)`; None if `kwargs` has other inputs.
            **kwargs: as for transformers' `generate`.

        Raises:
            ParallelismValueError: with a static cache, ranks that may take different numbers of steps.
        """
        if input_ids is not None:
            kwargs["input_ids"] = input_ids
        if self.tokenizer is not None and self.tokenizer.pad_token_id is not None:
            kwargs.setdefault("pad_token_id", self.tokenizer.pad_token_id)
        sharded = any(isinstance(module, FSDPModule) for module in self.modules())
        if sharded and world_and_rank()[0] > 1:
            kwargs.setdefault("synced_gpus", True)
            check_static_cache(self.model, (), kwargs)
        with _gathered(self, self.model, _base(self.model)):
            return self._generate(**kwargs)

    def _generate(self, **kwargs: Any) -> Any:
        return self.model.generate(**kwargs)


def _by_class(metrics: Sequence[Metric]) -> dict[str, Metric]:
    named = {type(metric).__name__: metric for metric in metrics}
    if len(named) < len(metrics):
        twice = next(name for name in named if sum(type(one).__name__ == name for one in metrics) > 1)
        raise ParallelismValueError(
            f"There are several metrics of class {twice}, and results are named by class. Derive a class "
            "with another name for each."
        )
    return named


def _base(model: nn.Module) -> Any:
    """The transformers model inside a `PeftModel`, or `model` itself."""
    peeled: Any = model
    return peeled.get_base_model() if hasattr(peeled, "get_base_model") else peeled


def _adapted(model: nn.Module, peft_config: PeftConfig) -> nn.Module:
    from peft import PeftConfig, PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise ParallelismValueError(
            "The model is already a PeftModel; add another adapter with model.add_adapter, or omit "
            "peft_config."
        )
    if not isinstance(peft_config, PeftConfig):
        raise ParallelismTypeError(
            f"peft_config must be a peft configuration such as LoraConfig(...), not a "
            f"{type(peft_config).__name__}."
        )
    from composer_dist.models.targets import check_targets  # it imports peft

    check_targets(model, peft_config)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    device = torch.device("meta") if on_meta else nullcontext()
    with device, warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.23 deprecates; users cannot change that.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted: nn.Module = get_peft_model(model, peft_config)
        return adapted


def _register_once(model: nn.Module) -> None:
    """Make prompt learning's `word_embeddings`, a second registration of an embedding, a plain attribute."""
    children = dict(model.named_children())
    if "prompt_encoder" in children and "word_embeddings" in children:
        del model.word_embeddings
        vars(model)["word_embeddings"] = children["word_embeddings"]


def _fit_vocabulary(model: Any, tokens: int, allow_resizing: bool) -> None:
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokens <= vocabulary:
        return
    if not allow_resizing:
        raise ParallelismValueError(
            f"The tokenizer has {tokens} tokens, but the model's embedding only {vocabulary}. Use the "
            "model's own tokenizer, raise vocab_size in the model's configuration if its weights are to be "
            "initialized, or enlarge it: HuggingFaceModel(allow_embedding_resizing=True)."
        )
    model.resize_token_embeddings(tokens)


def _arguments(base: nn.Module) -> frozenset[str]:
    """The arguments of forward, and if it has `**kwargs`, the arguments of transformers' losses."""
    known = inspect.signature(type(base).forward).parameters
    variadic = any(one.kind is one.VAR_KEYWORD for one in known.values())
    return frozenset(known) | (frozenset({"shift_labels", "num_items_in_batch"}) if variadic else frozenset())


def _first_logits(outputs: Sequence[Any]) -> Any:
    """A tuple's logits: its first entry that is not a scalar loss."""
    return outputs[1] if outputs[0].ndim == 0 else outputs[0]


@contextmanager
def _gathered(*chain: Any) -> Iterator[None]:
    """Keep the units among `chain` (wrapper, model, base) gathered while `generate` runs inside.

    FSDP2 treats the `generate` of the outermost, the root, as a forward, so it casts the inputs and knows
    its root before an inner unit is called. Units further in gather as usual.
    """
    units: list[Any] = [*{id(m): m for m in chain if isinstance(m, FSDPModule)}.values()]
    groups = [group for unit in units for group in fsdp_param_groups(unit)]
    after_forward = [group.post_forward_mesh_info for group in groups]
    method = "_generate" if chain[0] in units else "generate"
    before = {method: vars(units[0])[method]} if units and method in vars(units[0]) else {}
    for root in units[:1]:
        finish_lazily(root)
        register_fsdp_forward_method(root, method)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    with stay_gathered(chain[0]):
        try:
            yield
        finally:
            for root in units[:1]:
                delattr(root, method)  # it was registered on the instance
                vars(root).update(before)
            for group, mesh_info in zip(groups, after_forward, strict=True):
                group.post_forward_mesh_info = mesh_info


def _drop_base(module: HuggingFaceModel, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Drop the base's tensors from this module's part of a state dict."""
    if module.should_save_peft_only:
        for name in _of_the_base(module, prefix, state):
            del state[name]


def _note_prefix(module: HuggingFaceModel, state: Any, prefix: str, *rest: Any) -> None:
    module._loading_prefix = prefix


def _expect_no_base(module: HuggingFaceModel, incompatible: Any) -> None:
    """Do not report the base as missing when only adapters are loaded."""
    if module.should_save_peft_only:
        missing = incompatible.missing_keys
        base = set(_of_the_base(module, module._loading_prefix, missing))
        missing[:] = [name for name in missing if name not in base]


def _of_the_base(module: HuggingFaceModel, prefix: str, names: Iterable[str]) -> list[str]:
    """The names among `names` that belong to `module`, at `prefix`, and not to its adapters."""
    kept = adapter_keys(module)
    own = [name for name in names if name.startswith(prefix)]
    return [name for name in own if canonical_name(name.removeprefix(prefix)) not in kept]
