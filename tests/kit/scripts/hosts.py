"""Two hosts on this machine: network namespaces of their own, with a cable between them.

They share the disk and the host's name, which leads back to each of them, as on many real machines.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_CABLE = """
set -e
mount -t tmpfs none /run  # where `ip netns` keeps names
for host in one two; do ip netns add $host; ip -n $host link set lo up; done
ip link add va netns one type veth peer name vb netns two
ip -n one addr add 10.7.0.1/24 dev va
ip -n two addr add 10.7.0.2/24 dev vb
ip -n one link set va up
ip -n two link set vb up
"""
_RUN = """
ip netns exec one {0} > {folder}/one & first=$!
ip netns exec two {1} > {folder}/two
second=$?
wait $first && exit $second
"""


def on_two_hosts(first: Sequence[str], second: Sequence[str], timeout: float = 240) -> tuple[str, str]:
    """What two commands print, on 10.7.0.1 (interface `va`) and on 10.7.0.2 (`vb`), at the same time.

    Where the kernel makes no network namespaces the test is skipped.
    """
    try:
        refused = _isolated(_CABLE, 10).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        refused = str(error)
    if refused:
        pytest.skip(f"this machine gives no network namespaces: {refused.strip()}")
    with tempfile.TemporaryDirectory() as folder:
        run = _RUN.format(shlex.join(first), shlex.join(second), folder=folder)
        done = _isolated(f"{_CABLE}set +e\n{run}", timeout)
        one, two = ((Path(folder) / name).read_text() for name in ("one", "two"))
    assert done.returncode == 0, f"{one}\n{two}\n{done.stderr}"
    return one, two


def _isolated(script: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a script where it may make namespaces; they, and what runs there, end with it."""
    command = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    options = {"timeout": timeout, "cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    return subprocess.run([*command, "bash", "-c", script], capture_output=True, text=True, **options)
