"""Rounds of contenders, measured as a user meets them.

Every contender runs in a fresh torchrun of its own in every round, or, where a benchmark says so, all of a
round run one after the other in one; who comes first rotates. Nothing is warmed, touched beforehand or
kept for anybody, and nothing else should run on the machine. Clocks start when all ranks have imported what
they need and made their model. All rounds are printed, with the load of the machine before each, and the
medians in the end.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from composer_dist.distributed.account import peak, reset_peak

Figures = dict[str, float]
"""Seconds under "seconds"; whatever else a contender counts by its heading."""
Contender = Callable[[argparse.Namespace], Figures]
NAMES, RESULT = "BENCHMARK_CONTENDERS", "BENCHMARK_RESULT"


def device() -> torch.device:
    """Where this rank computes."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option that says where to measure."""
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if there are any"
    )


def choose_device(parser: argparse.ArgumentParser, name: str, ranks: int = 1) -> None:
    """Hide the GPUs if the CPU is asked for; else check that each rank has one, if they are used."""
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    found = torch.cuda.device_count()
    if name == "cuda" and not found:
        built = torch.version.cuda or "no CUDA"
        parser.error(f"--device cuda: torch {torch.__version__} (built for {built}) finds no GPU here.")
    if 0 < found < ranks:
        parser.error(
            f"{ranks} ranks need {ranks} GPUs, and {found} were found: pass fewer --ranks, or --device cpu."
        )


def now() -> float:
    """A clock's seconds, once the device has finished what it was given."""
    if (here := device()).type != "cpu":
        torch.accelerator.synchronize(here)
    return time.perf_counter()


def timed(body: Callable[[], object], made: int = 0) -> Figures:
    """Seconds of the slowest rank, those of processor time of all ranks together, and the peak memory.

    The memory is of the rank with the most, beyond what it held and the bytes that it made.
    """
    gc.collect()
    here = device()
    reset_peak(here)
    before = peak(here)
    dist.barrier()
    start, used = now(), time.process_time()
    body()
    seconds, used = now() - start, time.process_time() - used
    most = reduced({"seconds": seconds, "extra MiB": (peak(here) - before - made) / 2**20})
    return {**most, **reduced({"processor s": used}, dist.ReduceOp.SUM)}


def reduced(figures: Figures, how: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> Figures:
    """The largest of every figure over the ranks, or their sum."""
    numbers = torch.tensor(list(figures.values()), dtype=torch.float64, device=device())
    dist.all_reduce(numbers, op=how)
    return dict(zip(figures, numbers.tolist(), strict=True))


def play(
    contenders: Mapping[str, Contender],
    ratios: Sequence[str],
    options: Callable[[argparse.ArgumentParser], None],
    ranks: Sequence[int],
    stage: Callable[[argparse.Namespace, Path], None] = lambda arguments, folder: None,
    together: bool = False,
) -> None:
    """Run the contenders in rounds, or, in a process of a world, those that are asked for.

    Args:
        ratios: contenders to whose seconds those of all others are compared.
        options: adds the benchmark's own options.
        ranks: worlds to launch, unless the command says others.
        stage: fills a folder, `arguments.folder`, once before the first round.
        together: run the contenders of a round in one world, which `--together` also asks for.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help="worlds to launch")
    parser.add_argument("--rounds", type=int, default=5)
    these = {"choices": [*contenders], "metavar": "CONTENDER", "help": "these alone, as the table names them"}
    parser.add_argument("--only", nargs="+", **these)
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    one_world = "run the contenders of a round one after the other in one world"
    parser.add_argument("--together", action="store_true", default=together, help=one_world)
    add_device(parser)
    arguments = parser.parse_args()
    choose_device(parser, arguments.device, max(arguments.ranks))
    if NAMES in os.environ:
        perform({name: contenders[name] for name in json.loads(os.environ[NAMES])}, arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        arguments.folder = Path(folder)
        stage(arguments, arguments.folder)
        found = {world: rounds(contenders, arguments, world) for world in arguments.ranks}
    for world, rows in found.items():
        report(rows, ratios, world)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def perform(contenders: Mapping[str, Contender], arguments: argparse.Namespace) -> None:
    """One run of each, in a process of a world."""
    warnings.simplefilter("ignore")
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    for name, contender in contenders.items():
        figures = contender(arguments)
        if dist.get_rank() == 0:
            with open(os.environ[RESULT], "a") as file:
                print(json.dumps([name, figures]), file=file)
    dist.barrier()
    dist.destroy_process_group()


def rounds(
    contenders: Mapping[str, Contender], arguments: argparse.Namespace, world: int
) -> dict[str, list[Figures]]:
    """All rounds with so many ranks; a rival that does not run here is left out."""
    names = [name for name in contenders if not arguments.only or name in arguments.only]
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        turn = [name for name in names[number % len(names) :] + names[: number % len(names)] if name in found]
        while turn:
            load, group = os.getloadavg()[0], turn if arguments.together else turn[:1]
            done, error = in_fresh_world(group, arguments, world)
            for name, figures in done.items():
                found[name].append(figures)
                told = "  ".join(f"{value:.2f} {heading}" for heading, value in figures.items())
                print(f"{world} ranks, round {number + 1}, load {load:.1f}: {name}: {told}", flush=True)
            turn = turn[len(done) :]
            if error is not None:
                print(f"without {turn[0]}: {error}", flush=True)
                del found[turn.pop(0)]
    return found


def in_fresh_world(
    names: Sequence[str], arguments: argparse.Namespace, world: int
) -> tuple[dict[str, Figures], str | None]:
    """The figures of those that ran in processes of their own, and why the next one did not."""
    result = arguments.folder / "result.json"
    result.unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, RESULT: str(result)}
    own[NAMES] = json.dumps(names)
    own.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as for a user
    command = [*launcher, *sys.argv, "--folder", str(arguments.folder)]
    run = subprocess.run(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = dict(map(json.loads, result.read_text().splitlines())) if result.exists() else {}
    if len(done) == len(names):
        return done, None
    if "composer_dist" in names[len(done)]:
        raise SystemExit(run.stdout)
    said = [line for line in run.stdout.splitlines() if "Error" in line]
    return done, (said or run.stdout.splitlines() or [""])[0].strip()


def report(found: Mapping[str, list[Figures]], ratios: Sequence[str], world: int) -> None:
    """A table of the medians, with all rounds."""
    median = {
        name: {heading: statistics.median(each[heading] for each in all_) for heading in all_[0]}
        for name, all_ in found.items()
    }
    against = [name for name in ratios if name in median]
    headings = list(
        dict.fromkeys(heading for row in median.values() for heading in row if heading != "seconds")
    )
    columns = ["seconds", *(f"x {name}" for name in against), *headings, "all rounds"]
    table = Table(
        "contender",
        *columns,
        title=f"{world} ranks, unwarmed: medians of {len(next(iter(found.values())))} rounds",
    )
    for name, row in median.items():
        table.add_row(
            name,
            f"{row['seconds']:.3f}",
            *(f"{row['seconds'] / median[other]['seconds']:.2f}" for other in against),
            *(f"{row[heading]:.5g}" if heading in row else "" for heading in headings),
            " ".join(f"{each['seconds']:.2f}" for each in found[name]),
        )
    Console(width=150).print(table)
