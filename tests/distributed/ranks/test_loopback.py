"""In a run on one machine, nothing listens at an address that another machine could reach."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from composer_dist.distributed.ranks.loopback import HOST, host_store, own_store
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.grids import in_the_default_run
from tests.kit.ports import reserved_port

pytestmark = pytest.mark.promise(107)

RANK = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import psutil, torch
from composer_dist.distributed import launch, process_group

def listening(starter):
    process_group.init(timeout=timedelta(seconds=60))
    if process_group.world_and_rank()[0] > 1:
        torch.distributed.new_group([0, 1])
    process_group.all_reduce(torch.ones(1))
    starter = psutil.Process(starter)
    everyone = [starter, *starter.children(recursive=True)]
    sockets = [one for process in everyone for one in process.net_connections("inet")]
    found = sorted({one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN})
    process_group.barrier()
    if process_group.world_and_rank()[1] == 0:
        with Path("found.json").open("a") as file:
            file.write(json.dumps(found) + "\\n")
    process_group.barrier()
    process_group.destroy()
"""
WAYS = {
    "train -n": "from composer_dist.cli.launch import launch_local\n"
    "import os; launch_local(2, ['-c', open('rank.py').read() + f'listening({os.getpid()})'])",
    "one process, launch": "import os\nfrom rank import *\nif __name__ == '__main__':\n"
    "    listening(os.getpid())\n    launch(listening, 2, 'fork', (os.getpid(),))",
    "mpirun": "import os, sys\nfrom rank import *\nstart = os.getpid()\nfor rank in '01':\n"
    "    if os.fork() == 0:\n        os.environ |= {'RANK': rank, 'WORLD_SIZE': '2', "
    "'MASTER_ADDR': 'localhost', 'MASTER_PORT': sys.argv[1]}\n        listening(start)\n        sys.exit()\n"
    "sys.exit(any([os.wait()[1] for rank in '01']))",
}


@pytest.mark.skipif(sys.platform != "linux", reason="looks up the interface on Linux")
@pytest.mark.parametrize("way", in_the_default_run("one process, launch", among=WAYS))
def test_nothing_listens_beyond_loopback(tmp_path: Path, way: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "start.py").write_text(WAYS[way])
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    path = os.pathsep.join([str(tmp_path), *filter(None, [environ.get("PYTHONPATH")])])
    environ["PYTHONPATH"] = path
    with reserved_port() as port:
        command = [sys.executable, "start.py", str(port)]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = [json.loads(line) for line in (tmp_path / "found.json").read_text().splitlines()]
    assert found == [["127.0.0.1"]] * len(way.split(", "))


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        told = rf"cannot use port {port} \(Address already in use\)\. Set MASTER_PORT"
        with pytest.raises(ParallelismRuntimeError, match=told):
            host_store(port)


def test_a_reserved_port_is_given_to_a_store_and_to_nobody_else() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((HOST, port))
        assert host_store(port).port == port


def test_a_second_group_uses_the_same_store() -> None:
    with reserved_port() as port:
        assert own_store(port, 0) is own_store(port, 0)
        own_store(port, 0).set("a", "1")
        assert own_store(port, 1).get("a") == b"1"


@pytest.mark.promise(108)
def test_a_connection_that_is_reset_at_the_start_is_made_again_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    listener = socket.create_server((HOST, 0))
    port, hosted = listener.getsockname()[1], []

    def host() -> None:
        with listener.accept()[0], listener.accept()[0] as first:  # a look whether it is open; torch's
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            first.recv(1)
        options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        hosted.append(TCPStore(HOST, port, is_master=True, **options))

    thread = threading.Thread(target=host)
    thread.start()
    store = own_store(port, rank=1)
    thread.join()
    store.set("key", "value")
    assert hosted[0].get("key") == b"value"
    assert capfd.readouterr().err == ""
