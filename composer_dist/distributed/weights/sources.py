"""Decides where each tensor of a model gets its value from.

A tensor may be real on all ranks, on the meta device on all ranks, or real on rank 0 and on meta elsewhere.
The ranks exchange what they have and make one decision; an error names what differs between them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.distributed.feature_plan import in_plain_types
from composer_dist.distributed.optimizers.follow import StateEntry, describe_groups, find_states
from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.structure import Structure, describe
from composer_dist.tensors.fingerprint import fingerprint
from composer_dist.tensors.inner import parts
from composer_dist.wording import listed

_SHOWN = 5
"""How many differences an error lists."""


@dataclass(frozen=True)
class Sources:
    """The decision, the same on all ranks. Other tensors keep each rank's own value."""

    rank0: frozenset[str] = frozenset()
    """Delivered from the first rank."""
    init: frozenset[str] = frozenset()
    """On the meta device on all ranks: initialized."""
    local: frozenset[str] = frozenset()
    """Real and equal on all ranks: each takes its part of its own value."""
    disk: frozenset[str] = frozenset()
    """Read from files."""
    seed: int = 0
    """The first rank's, for initialization."""
    states: tuple[StateEntry, ...] = ()
    """The optimizer state to build."""
    states_here: bool = True
    """Whether this rank has that state's tensors."""


def decide_sources(
    agreement: Agreement,
    structure: Structure,
    plan: ParallelPlan,
    optimizers: Sequence[Optimizer],
    disk: frozenset[str],
) -> Sources:
    """Exchange what every rank has, and decide; nothing is changed.

    `disk` has the names of the tensors for which files have values, the same on every rank.
    """
    on_meta = [name for name, held in structure.tensors.items() if held.get().is_meta]
    mine: dict[str, Any] = {
        "structure": structure.digest,
        "plan": plan.digest(),
        "meta": "all" if len(on_meta) == len(structure.tensors) else on_meta,
        "seed": torch.initial_seed(),
        "optimizers": describe_groups(optimizers, structure),
        "states": [vars(one) for one, _ in find_states(optimizers, structure)],
    }

    def judge(findings: list[dict[str, Any]]) -> dict[str, Any]:
        for what in ("structure", "plan", "optimizers"):
            if any(finding[what] != findings[0][what] for finding in findings):
                return {"differs": what}
        ignored = frozenset(plan.replication.ignored if plan.replication else ())
        metas = [finding["meta"] for finding in findings]
        found = _sort(structure, plan.delivery.sync, metas, disk, ignored)
        found["seed"] = findings[0]["seed"]
        found["states"] = findings[0]["states"]
        found["same_states"] = all(f["states"] == findings[0]["states"] for f in findings)
        if not found["same_states"] and not found["rank0"]:
            rank0 = "" if disk else ", or use rank 0's with sync='rank0'"
            raise ParallelismValueError(
                "The ranks' optimizers hold different state, or their parameters different pending "
                f"gradients; bring all ranks to the same step{rank0}."
            )
        return found

    verdict = agreement.reach("the plan", mine, judge)
    if differs := verdict.get("differs"):
        facts = mine["optimizers"]
        if differs == "structure":
            facts = [describe(held.info) for held in structure.tensors.values()]
        elif differs == "plan":
            facts = [[unit.modules, in_plain_types(unit)] for unit in plan.units]
            facts.append(["config", plan.decisions()])
        agreement.reach(f"what differs in the {differs}", facts, _explain(differs, agreement.ranks))
    rank0, init, kept = (frozenset(verdict[key]) for key in ("rank0", "init", "kept"))
    local = frozenset(structure.tensors) - rank0 - init - kept - disk
    tensors = ((name, structure.tensors[name].get()) for name in sorted(local))
    compared = {part: tensor for name, held in tensors for part, tensor, _ in parts(name, held, None)}
    if not rank0:
        states = find_states(optimizers, structure)
        compared |= {
            one.label: value for one, value in states if isinstance(value, torch.Tensor) and not value.is_meta
        }
    if local or (verdict["states"] and not rank0):
        _verify(agreement, compared, bool(disk))
    return Sources(
        rank0=rank0,
        init=init,
        local=local,
        disk=disk,
        seed=verdict["seed"],
        states=tuple(StateEntry(**one) for one in verdict["states"]),
        states_here=verdict["same_states"] or agreement.rank == agreement.ranks[0],
    )


def _sort(
    structure: Structure, sync: str, metas: Sequence[Any], disk: frozenset[str], ignored: frozenset[str]
) -> dict[str, Any]:
    """Where each tensor that is not in files gets its value, given what every rank has on meta."""
    everything = set(structure.tensors) - disk
    per_rank = [everything if meta == "all" else set(meta) - disk for meta in metas]
    nowhere, somewhere = set.intersection(*per_rank), set.union(*per_rank)
    if lacking := sorted(per_rank[0] - nowhere):
        raise ParallelismValueError(
            f"Rank 0 holds {listed(lacking)} on the meta device while other ranks hold real values. Weights "
            "are delivered from rank 0: build them there, or put them on meta everywhere."
        )
    mixed = somewhere - nowhere
    if sync == "verify" and mixed:
        raise ParallelismValueError(
            f"sync='verify' compares values, but some ranks hold {listed(sorted(mixed))} on the meta device; "
            "use sync='auto', which delivers rank 0's."
        )
    real = everything - somewhere
    kept = ignored & real
    for name in real:
        held = structure.tensors[name]  # every rank keeps its own plain attributes, unless sync="rank0"
        if (held.info.kind == "attribute" and sync != "rank0") or isinstance(held.get(), DTensor):
            kept |= {name}
    # If some are on meta, rank 0 is the source for all: a constructor may make a few real regardless.
    rank0 = mixed | (real - kept if mixed or sync == "rank0" else set())
    return {"rank0": sorted(rank0), "init": sorted(nowhere), "kept": sorted(kept)}


def _verify(agreement: Agreement, tensors: Mapping[str, torch.Tensor], reading: bool) -> None:
    """Raise unless all ranks hold the same values of these tensors, by hash.

    Args:
        reading: other tensors are read from files, so that rank 0's cannot be used.
    """
    if len(agreement.ranks) == 1:
        return
    hashes = [fingerprint(tensor) for tensor in tensors.values()]
    total = str(hash(tuple(hashes)))
    if agreement.reach("the values", total, lambda totals: len(set(totals)) == 1):
        return

    def name_them(findings: list[list[int]]) -> None:
        rows = zip(tensors, zip(*findings, strict=True), strict=True)
        different = [name for name, row in rows if len(set(row)) > 1]
        if reading:
            raise ParallelismValueError(
                f"The ranks hold different values of {listed(different)}, which the files lack. Seed every "
                "rank identically before building the model (and clear gradients), or build it inside of "
                "init_context, so that they are initialized alike."
            )
        raise ParallelismValueError(
            f"The ranks hold different values of {listed(different)}. Seed every rank identically before "
            "building the model (and clear gradients), or use rank 0's values with sync='rank0'."
        )

    agreement.reach("which values differ", hashes, name_them)


def _explain(what: str, ranks: Sequence[int]) -> Callable[[list[list[Any]]], None]:
    def explain(findings: list[list[Any]]) -> None:
        lines: list[str] = []
        first = {_key(fact): fact for fact in findings[0]}
        for rank, facts in zip(ranks[1:], findings[1:], strict=True):
            theirs = {_key(fact): fact for fact in facts}
            for key in dict.fromkeys([*first, *theirs]):
                if first.get(key) != theirs.get(key):
                    lines += _difference(what, rank, first.get(key), theirs.get(key))
        given = {"structure": "model", "plan": "configuration", "optimizers": "optimizer"}[what]
        raise ParallelismValueError(
            f"The ranks were given a different {given}:\n"
            + "\n".join(lines[:_SHOWN] or ["  the plans differ in the reasons they give for modules"])
            + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
            + "\nBuild the same model, frozen parameters, optimizers and configuration on every rank."
        )

    return explain


def _difference(what: str, rank: int, first: Any, theirs: Any) -> list[str]:
    """One line about what differs between rank 0 and this rank; none if other facts say it."""
    name = _key(first or theirs)
    name = f"unit {name or '(root)'}" if what == "plan" else name
    if first is None or theirs is None:
        has, lacks = (0, rank) if theirs is None else (rank, 0)
        return [f"  {name}: rank {has} has it, rank {lacks} does not"]
    if what == "optimizers":
        return [f"  {name}: {first[1]} on rank 0, {theirs[1]} on rank {rank}"]
    if what == "plan":  # facts about modules only repeat what units and the configuration say
        mine, other = first[1], theirs[1]
        keys = [key for key in mine | other if mine.get(key) != other.get(key)]
        texts = (f"{key} is {mine.get(key)} on rank 0, {other.get(key)} on rank {rank}" for key in keys)
        return [("  " if first[0] == "config" else f"  {name}: ") + "; ".join(texts)] if keys else []
    labels = ("names", "kind", "shape", "dtype", "requires_grad", "made of")
    for label, mine, other in zip(labels, first, theirs, strict=True):
        if mine != other:
            return [f"  {name}: {label} is {mine} on rank 0, {other} on rank {rank}"]
    return [f"  {name}"]


def _key(fact: Any) -> str:
    """What a fact is about: a label, or the first of a list of names."""
    return str(fact[0] if isinstance(fact[0], str) else fact[0][0])
