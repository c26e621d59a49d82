"""Gives every tensor of a sharded model its value: delivered, sliced or initialized."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.deliver import inner_cargoes, take_part
from composer_dist.distributed.moving.messages import Cargo, in_buckets
from composer_dist.distributed.moving.scatter import write_full
from composer_dist.distributed.moving.transport import Transport
from composer_dist.distributed.optimizers.follow import Follower
from composer_dist.distributed.plan.decisions import Delivery
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.weights.disk import Pretrained, UnfilledPart
from composer_dist.distributed.weights.draw import draw
from composer_dist.distributed.weights.initialize import Component, Scratch, peak_bytes, run_component
from composer_dist.distributed.weights.sources import Sources
from composer_dist.distributed.weights.storage import make_anew, replace
from composer_dist.progress import Stage
from composer_dist.structure.structure import Structure
from composer_dist.tensors.inner import encoded, local_part


@dataclass
class Filling:
    """A sharded model whose tensors are being filled; `run` fills them all."""

    structure: Structure
    originals: Mapping[str, torch.Tensor]
    """The parameters that are sharded now, as they were before."""
    sources: Sources
    components: Sequence[Component]
    """What initializes the tensors in `sources.init`."""
    disk: Pretrained | None
    """Where the tensors in `sources.disk` are read from."""
    delivery: Delivery
    mesh: Mesh
    agreement: Agreement

    def __post_init__(self) -> None:
        self.device = self.mesh.device
        self.first = self.agreement.ranks[0]
        self.bucket_bytes = self.delivery.bucket_bytes
        self.transport = Transport(self.mesh, self.agreement, self.bucket_bytes, self.delivery.transport)
        self.values = {
            name: self.originals.get(name, held.get()) for name, held in self.structure.tensors.items()
        }

    def run(
        self, follower: Follower, step: Callable[[str], AbstractContextManager[None]]
    ) -> tuple[int, int, str]:
        """Give every tensor its value, and the optimizers their parameters and state; `step` times steps.

        The result is the bytes that this rank has moved, those that it has read, and how weights were sent.
        """
        with self.transport:
            with step("weights"):
                self.deliver_weights()
            if self.components:
                with step("initialize"):
                    self.initialize(self.components)
            with step("optimizer"):
                held = self.structure.parameters.items()
                new: dict[str, Any] = {name: parameter.get() for name, parameter in held}
                cargoes = follower.cargoes(new)
                if self.sources.rank0 and self.sources.states:
                    self.transport.send({self.first: cargoes})
                else:
                    for cargo in cargoes:
                        take_part(cargo, self.mesh.here)
                follower.rebind(new)
        moved, read = (self.disk.bytes_moved, self.disk.bytes_read) if self.disk else (0, 0)
        return self.transport.moved + moved, read, self.transport.way

    def deliver_weights(self) -> None:
        """Read tensors from files, deliver rank 0's, and slice those that every rank has."""
        if self.disk is not None:
            made_of = {name: self.structure.tensors[name].info.inner for name in sorted(self.sources.disk)}
            plain = [self._target(name) for name, inner in made_of.items() if not inner]
            self.disk.fill(plain, self.bucket_bytes, self.transport.progress)
            others = {name: self._destination(name) for name, inner in made_of.items() if inner}
            fill_encoded(self.disk, others, self.device, self.agreement, self.transport.send)
        here = self.agreement.rank == self.first
        delivered = [
            cargo
            for name in sorted(self.sources.rank0)
            for cargo in inner_cargoes(name, self._destination(name), self.values[name] if here else None)
        ]
        self.transport.send({self.first: delivered})
        for name in sorted(self.sources.local):
            if name in self.originals:
                write_full(self._destination(name), self.values[name])
            elif self.values[name].device != self.device:
                replace(self.structure.tensors[name], self.values[name].detach().to(self.device))

    def initialize(self, components: Sequence[Component]) -> None:
        """Fill tensors, and run the other initializers, each on one rank, which delivers the tensors."""
        with self.transport.progress.stage("initializing") as stage:
            stage.expect(sum(component.nbytes for component in components))
            filled = [component for component in components if component.fills is not None]
            if filled:
                self._draw(filled)
            stage.advance(sum(component.nbytes for component in filled))
            self._run([component for component in components if component.fills is None], stage)

    def _draw(self, components: Sequence[Component]) -> None:
        """Each rank fills its parts of tensors that are cut; whole ones are filled by one rank, in place."""
        fills = {name: fills for one in components for name, fills in (one.fills or {}).items()}
        targets = {name: self._destination(name) for name in fills}
        layouts = {name: Layout.of(target) for name, target in targets.items()}
        whole = [Component((), (name,), targets[name].nbytes) for name in fills if not layouts[name].cut]
        owners = deal_out(whole, self.agreement.ranks, {})
        mine = {one.tensors[0] for one in owners[self.agreement.rank]}
        with self.agreement.together("initialization"):
            for name, target in targets.items():
                if (layout := layouts[name]).cut or name in mine:
                    part = layout.part(Mesh.of(target).here if isinstance(target, DTensor) else Coordinate())
                    local = local_part(target).detach().view(-1)
                    draw(fills[name], self.sources.seed, part, local, self.device)
        self.transport.send(
            {
                rank: [
                    cargo
                    for name in (one.tensors[0] for one in theirs)
                    for cargo in inner_cargoes(name, targets[name], targets[name] if name in mine else None)
                ]
                for rank, theirs in owners.items()
            }
        )

    def _run(self, components: Sequence[Component], stage: Stage) -> None:
        """Run components in rounds."""
        real = {name: value for name, value in self.values.items() if name not in self.sources.init}
        owners = deal_out(components, self.agreement.ranks, real)
        limit = peak_bytes(components, self.bucket_bytes)
        rounds = {
            rank: list(in_buckets(mine, lambda one: one.nbytes, limit)) for rank, mine in owners.items()
        }
        scratch = Scratch(limit, self.device)
        for number in range(max(map(len, rounds.values()), default=0)):
            turn = {rank: mine[number] for rank, mine in rounds.items() if number < len(mine)}
            self._initialize(turn, real, scratch)
            scratch.clear()
            stage.advance(sum(component.nbytes for mine in turn.values() for component in mine))

    def _initialize(
        self, turn: Mapping[int, Sequence[Component]], real: Mapping[str, torch.Tensor], scratch: Scratch
    ) -> None:
        """Run one round: each rank runs its components, and then all are delivered."""
        made: dict[str, torch.Tensor] = {}
        with self.agreement.together("initialization"):
            for component in turn.get(self.agreement.rank, ()):
                seen = {**real, **self._read(component)}
                seed, empty = self.sources.seed, scratch.empty
                made |= run_component(component, self.structure, seed, self.device, seen, empty)
        self.transport.send(
            {
                rank: [
                    cargo
                    for component in mine
                    for name in component.tensors
                    if name in self.sources.init
                    for cargo in inner_cargoes(name, self._destination(name), made.get(name))
                ]
                for rank, mine in turn.items()
            }
        )

    def _target(self, name: str) -> UnfilledPart:
        tensor = self._destination(name)
        mesh = Mesh.of(tensor) if isinstance(tensor, DTensor) else self.mesh
        return UnfilledPart(name, Layout.of(tensor), local_part(tensor).detach(), mesh)

    def _read(self, component: Component) -> dict[str, torch.Tensor]:
        """The tensors of a component that files have, whole, for its initializers to read."""
        found = {}
        for name in self.sources.disk.intersection(component.tensors):
            assert self.disk is not None
            info = self.structure.tensors[name].info
            found[name] = torch.empty(info.shape, dtype=info.dtype, device=self.device)
            self.disk.read(name, found[name])
        return found

    def _destination(self, name: str) -> torch.Tensor:
        """The tensor to fill: a shard, or a whole tensor, which may be new."""
        held = self.structure.tensors[name]
        now = held.get()
        if isinstance(now, DTensor):
            return now
        if now.device != self.device or not now.is_contiguous():
            make_anew(held, self.device)
        return held.get().detach()  # filled in place; on the source rank it may be the source as well


def deal_out(
    components: Sequence[Component], ranks: Sequence[int], real: Mapping[str, torch.Tensor]
) -> dict[int, list[Component]]:
    """Assign each component, the largest first, to the rank with the least so far.

    Components that read tensors with values run on the first rank, which has these values.
    """
    load = dict.fromkeys(ranks, 0)
    dealt: dict[int, list[Component]] = {rank: [] for rank in ranks}
    for component in sorted(components, key=lambda component: -component.nbytes):
        rank = ranks[0] if real.keys() & set(component.tensors) else min(load, key=lambda r: load[r])
        dealt[rank].append(component)
        load[rank] += component.nbytes
    return dealt


def fill_encoded(
    pretrained: Pretrained,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    agreement: Agreement,
    send: Callable[[Mapping[int, Sequence[Cargo]]], None],
) -> None:
    """Fill tensors that have codecs from files that hold their dense values; a collective.

    A shard's value may depend on the whole tensor (NF4 has a mean of all scales), so each tensor is read and
    encoded by one rank, which delivers it.

    Args:
        tensors: of the model, by first name: full or sharded, and real.
        device: where values are encoded, one tensor at a time.
        send: sends cargoes from the ranks that have them to all ranks.
    """
    names, ranks = list(tensors), agreement.ranks
    for start in range(0, len(names), len(ranks)):
        turn = dict(zip(ranks, names[start : start + len(ranks)], strict=False))
        made: dict[str, torch.Tensor] = {}
        with agreement.together("reading the weights"):
            if (name := turn.get(agreement.rank)) is not None:
                whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device=device)
                pretrained.read(name, whole)
                made[name] = encoded(whole, tensors[name])
        send({rank: inner_cargoes(name, tensors[name], made.get(name)) for rank, name in turn.items()})
