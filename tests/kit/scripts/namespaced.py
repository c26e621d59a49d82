"""One rank of a small preparation, which prints how weights came; its argument is the rank."""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.moving import transport
from tests.kit.compare import same, values
from tests.kit.meshes import config
from tests.kit.toy import built

os.environ["RANK"] = os.environ["LOCAL_RANK"] = sys.argv[1]
transport.FEW = 0  # a small model is sent by messages anywhere
model = built(device="meta" if int(sys.argv[1]) else "cpu")
done = parallelize_model(model, config(replicas=2))
same(values(model), values(built()))
said = {"rank": dist.get_rank(), "pid": os.getpid(), "way": done.transport}
os.write(1, f"{json.dumps(said)}\n".encode())  # in one piece: ranks share the pipe
dist.barrier()
dist.destroy_process_group()
