"""Samples of what a language model writes while it is trained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import autocast
from composer_dist.random_states import set_aside
from composer_dist.structure.families import position_tables
from composer_dist.structure.kept import evaluating
from composer_dist.trainer.callbacks.base import Periodic
from composer_dist.trainer.clock import Time
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State
from composer_dist.wording import near_miss


class Generate(Periodic):
    """Lets a `HuggingFaceModel` continue prompts now and then, and logs the table `generations`.

    All ranks take part, each with all prompts, so it works however the model is sharded. Training is
    unaffected: modes and random numbers are restored, and the time does not count.

    Args:
        prompts: texts to continue.
        interval: how often; an integer means epochs.
        batch_size: prompts to continue at once; None takes all.
        **options: of transformers' `generate`; by default 32 new tokens, without sampling.

    Raises:
        ParallelismValueError: there are no prompts; at INIT: `generate` has no such option, or a text may
            become longer than the model's table of positions.
        ParallelismTypeError: at INIT, on every rank: the model cannot generate or has no tokenizer.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        interval: Time | str | int = "1ep",
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        self._prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not self._prompts or (batch_size is not None and batch_size < 1):
            raise ParallelismValueError(
                f"Generate needs at least one prompt and a positive batch_size, not {self._prompts} and "
                f"{batch_size}."
            )
        super().__init__(interval)
        self._size = batch_size or len(self._prompts)
        default = {} if "max_length" in options else {"max_new_tokens": 32}
        self._options = default | {"do_sample": False} | options

    def init(self, state: State, logger: Logger) -> None:
        lacking = [name for name in ("generate", "tokenizer") if getattr(state.model, name, None) is None]
        if lacking:
            raise ParallelismTypeError(
                f"Generate needs a HuggingFaceModel with a tokenizer; this {type(state.model).__name__} has "
                f"no {' and no '.join(lacking)}."
            )
        from transformers import GenerationConfig

        config: Any = GenerationConfig
        try:
            unused = (config := config()).update(**self._options)
            config.validate()
        except ValueError as error:
            raise ParallelismValueError(f"Generate: {error}") from error
        model: Any = state.model
        takes = signature(model.model.generate).parameters | signature(model.model.forward).parameters
        if unknown := sorted(unused.keys() - takes):
            near = near_miss(unknown[0], [*config.to_dict(), *takes])
            raise ParallelismValueError(f"Generate: generate has no {', '.join(unknown)}.{near}")
        self._check_length(model)

    def _check_length(self, model: Any) -> None:
        """Refuse texts that may become longer than a table of positions: an IndexError in training."""
        if model.config.is_encoder_decoder:
            return
        for prompt in self._prompts:
            tokens = len(model.tokenizer(prompt)["input_ids"])
            new = self._options.get("max_new_tokens")
            end = self._options.get("max_length") or 20 if new is None else tokens + new
            for name, positions in position_tables(model.model.get_decoder()).items():
                if end - 1 > positions:  # the last token is not given to the model again
                    raise ParallelismValueError(
                        f"Generate: the prompt {prompt!r} and what follows it may have {end} tokens, but "
                        f"{name} has only {positions} positions. Lower max_new_tokens, or shorten the prompt."
                    )

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self._every.passed(state):
            with state.throughput.pause(), _at_rest(state):
                texts = [text for batch in self._batches(state) for text in self._continue(state, batch)]
            rows = [[*pair] for pair in zip(self._prompts, texts, strict=True)]
            logger.log_table("generations", ["prompt", "generation"], rows)

    epoch_checkpoint = batch_checkpoint

    def _batches(self, state: State) -> Iterator[list[str]]:
        """The prompts, one by one if the tokenizer cannot pad them to one length."""
        tokenizer: Any = state.model.tokenizer
        size = self._size if tokenizer.pad_token is not None else 1
        for start in range(0, len(self._prompts), size):
            yield self._prompts[start : start + size]

    def _continue(self, state: State, prompts: list[str]) -> list[str]:
        model: Any = state.model
        side = "right" if model.config.is_encoder_decoder else "left"  # a decoder continues at the right end
        padding = {"padding": True, "padding_side": side} if len(prompts) > 1 else {}
        inputs = model.tokenizer(prompts, return_tensors="pt", **padding).to(state.device)
        inputs.pop("token_type_ids", None)
        with autocast(state.precision, state.device):
            tokens = model.generate(**inputs, **self._options)
        if not model.config.is_encoder_decoder:
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        texts: list[str] = model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts


@contextmanager
def _at_rest(state: State) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards modes and random numbers are as they were."""
    with set_aside(state.device), evaluating(state.model):
        yield
