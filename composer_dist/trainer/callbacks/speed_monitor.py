"""The speed of training, and how much of the hardware it uses."""

from collections.abc import Mapping
from typing import Any

from composer_dist.distributed.forwards import is_compiled
from composer_dist.distributed.prepared import mesh_of
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.clock import Timestamp
from composer_dist.trainer.data.batch import num_samples
from composer_dist.trainer.data.sampling import data_part
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.speed.flops import FlopCount
from composer_dist.trainer.speed.peak_flops import peak_flops as peak_of_device
from composer_dist.trainer.state import State
from composer_dist.users_code import warn


class SpeedMonitor(Callback):
    """Logs batches, samples and tokens per second over the last batches, and the utilization (MFU).

    `throughput/batches_per_sec`, `samples_per_sec`, `tokens_per_sec` and `flops_per_sec` cover all ranks,
    `throughput/device/...` is the average of one rank. `throughput/device/mfu` is the share of the peak. Time
    in evaluations does not count. Every Trainer has a SpeedMonitor.

    A model may have Composer's method `flops_per_batch(batch)`: the FLOPs of forward and backward of this
    rank's batch. Otherwise they are counted once, during the first batch.

    Args:
        window_size: batches to average over.
        peak_flops: the peak of one device, in FLOP/s; None looks the device up. If it is not known, as on a
            CPU, neither FLOPs nor MFU are logged.
    """

    def __init__(self, window_size: int = 20, peak_flops: float | None = None) -> None:
        if window_size < 1 or (peak_flops is not None and not peak_flops > 0):
            raise ParallelismValueError(
                f"SpeedMonitor's window_size and peak_flops must be positive, not {window_size} and "
                f"{peak_flops}."
            )
        self._window = window_size
        self._given = peak_flops
        self._peak: float | None = None
        """Of all ranks together."""
        self._count: FlopCount | None = None
        """Entered, during a microbatch of the first batch."""
        self._learning = False
        self._flops = self._samples = 0.0
        """Of this rank's microbatches of the first batch."""
        self._before = Timestamp()
        self._per_sample: float | None = None
        """FLOPs of the model per sample, and per token; 0 if batches have no tokens."""
        self._per_token: float | None = None

    def init(self, state: State, logger: Logger) -> None:
        state.throughput.window = self._window
        mine = self._given or peak_of_device(state.device)
        if process_group.all_ranks(mine is not None):
            self._peak = process_group.all_reduce(mine or 0.0, "sum")

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._leave()
        self._before = state.timestamp
        self._learning = self._peak is not None and self._per_sample is None
        if not self._learning:
            return
        self._flops = self._samples = 0.0
        model: Any = state.model
        if hasattr(model, "flops_per_batch"):
            self._flops, self._samples = float(model.flops_per_batch(state.batch)), num_samples(state.batch)
        elif any(is_compiled(module) for module in state.model.modules()):
            # Dynamo permanently skips what it meets inside of a dispatch mode.
            self._learning, self._peak = False, None
            warn(
                "The FLOPs of a compiled model cannot be counted, so no MFU is logged. Give the model a "
                "method flops_per_batch(batch)."
            )

    def before_forward(self, state: State, logger: Logger) -> None:
        self._leave()
        if self._learning and not hasattr(state.model, "flops_per_batch"):
            self._count = FlopCount()
            self._count.enter()

    def before_backward(self, state: State, logger: Logger) -> None:
        """From here on, a forward belongs to activation checkpointing."""
        if self._count is not None:
            self._count.in_backward = True

    def after_backward(self, state: State, logger: Logger) -> None:
        """Ends the counting of a microbatch; one that ran out of memory never comes here."""
        if self._count is not None:
            self._flops += self._count.flops
            self._samples += num_samples(state.batch)
        self._leave()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._learning:
            self._learn(state)
            self._learning = False
        rates = state.throughput.rates()
        if rates is None:
            return
        speed = {"batches_per_sec": rates.batches, "samples_per_sec": rates.samples}
        if rates.tokens:
            speed["tokens_per_sec"] = rates.tokens
        if self._per_sample is not None and self._per_token is not None:
            flops = rates.tokens * self._per_token if rates.tokens else rates.samples * self._per_sample
            speed["flops_per_sec"] = flops
        metrics = {f"throughput/{name}": value for name, value in speed.items()}
        metrics |= {f"throughput/device/{name}": v / state.world_size for name, v in speed.items()}
        if self._peak and "flops_per_sec" in speed:
            metrics["throughput/device/mfu"] = speed["flops_per_sec"] / self._peak
        logger.log_metrics(metrics)

    def close(self, state: State, logger: Logger) -> None:
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """The counts: a resumed run does not count its first batch again."""
        return {} if self._per_sample is None else {"flops": [self._per_sample, self._per_token]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._per_sample, self._per_token = state["flops"]

    def _learn(self, state: State) -> None:
        """The FLOPs of a sample and a token of this batch, over all ranks."""
        flops, samples = process_group.all_reduce([self._flops, self._samples], "sum")
        if not hasattr(state.model, "flops_per_batch"):  # ranks with the same data have shared its FLOPs
            flops *= state.world_size / data_part(mesh_of(state.model))["num_replicas"]
        before, now = self._before, state.timestamp
        tokens = now.token - before.token
        self._per_sample = flops / samples
        self._per_token = flops / samples * (now.sample - before.sample) / tokens if tokens else 0.0

    def _leave(self) -> None:
        if self._count is not None:
            self._count.leave()
        self._count = None
