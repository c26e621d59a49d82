"""A training script's rank whose delivery of weights stalls: `python -m tests.kit.scripts.interrupted WAY`.

It prints "stalled" when it can be interrupted; rank 0 when the bar is on its terminal as well.
"""

import os
import signal
import sys
import threading
from typing import Any

import torch
from torch import nn

from composer_dist import ParallelismConfig, progress
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.moving import deliver, transport

RANK = int(os.environ["RANK"])


def stall() -> None:
    if RANK == 0:
        drawn.wait(60)
    print("stalled", flush=True)
    threading.Event().wait(60)


def main(way: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts with "&"
    if way == "memory":
        transport.Transport._copy = lambda *args: stall()
    scatter, calls = deliver._scatter, 0

    def third(*args: Any) -> int:
        """Rank 0 stalls in the middle, and with it rank 1, in torch."""
        nonlocal calls
        calls += 1
        if calls == 3 and RANK == 0:
            stall()
        elif calls == 3:
            print("stalled", flush=True)
        return scatter(*args)

    deliver._scatter = third
    with torch.device("meta" if RANK else "cpu"):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    parallelize_model(model, ParallelismConfig(transport=way, bucket_bytes=4096))


if __name__ == "__main__":
    drawn, draw = threading.Event(), progress.Display._draw

    def tell(display: progress.Display, text: str) -> None:
        draw(display, text)
        drawn.set()

    progress.PATIENCE, progress.Display._draw = 0.0, tell
    main(sys.argv[1])
