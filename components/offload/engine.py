"""Boundaries go to the host as they are saved and come back one ahead of backward.

A session is one micro-batch. What is decided depends on how many boundaries were saved before in
the session and on their sizes, so ranks that run the same recipe decide the same. A tensor that
cannot go stays on the device; nothing here fails for want of room.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from components.offload.arena import Arena, Place
from components.offload.poison import Graves, spoilt
from components.offload.saved import (
    Form,
    Reason,
    Stored,
    Waiting,
    bytes_of,
    storage_key,
    why_not,
)
from components.offload.slabs import Slab
from components.offload.streams import Lanes, Mark

AWAITING_COPY = 2
"""Boundaries that may be on the device for no other reason than that their copy is under way."""


@dataclass
class Counts:
    """What happened since the counts were last reset.

    Attributes:
        offloaded: boundaries sent to the host.
        left: boundaries that stayed on the device, by reason.
        held: other tensors sent to the host.
        nbytes: bytes sent to the host.
    """

    offloaded: int = 0
    left: Counter[Reason] = field(default_factory=Counter)
    held: int = 0
    nbytes: int = 0


@dataclass(eq=False)
class _Session:
    """Boundaries so far, in forward order; each with what was held after it."""

    boundaries: list["ReferenceType[Stored] | None"] = field(default_factory=list)
    held: list[list["ReferenceType[Stored]"]] = field(default_factory=list)
    known: dict[tuple[int, int], tuple[StorageWeakRef, "ReferenceType[Stored] | None"]] = field(
        default_factory=dict
    )


class Engine:
    """A ``Store`` (components/recompute/store.py) that keeps what it is given on the host.

    Attributes:
        counts: what it did; whoever reports it resets it.
    """

    def __init__(
        self,
        slab: Slab,
        lanes: Lanes,
        device: torch.device,
        chosen: Collection[int],
        smallest: int = 0,
        graves: Graves | None = None,
    ) -> None:
        """
        Args:
            slab: where things are kept; the engine does not close it.
            lanes: how they are copied.
            device: where they come from.
            chosen: boundaries that go, by their number within a micro-batch.
            smallest: bytes below which a tensor stays.
            graves: overwrites memory when it is free, for tests.
        """
        self.counts = Counts()
        self._arena = Arena(slab)
        self._lanes = lanes
        self._device = device
        self._chosen = frozenset(chosen)
        self._smallest = smallest
        self._graves = graves
        self._session: _Session | None = None
        self._waiting: deque[tuple[int, Waiting]] = deque()
        self._orphans: list[tuple[torch.Tensor, Mark]] = []
        self._closed = False

    def begin(self) -> None:
        """A micro-batch begins. One that an error ended is forgotten first."""
        if self._session is not None:
            self._abandon(self._session)
        self._session = _Session()

    def end(self) -> None:
        """A micro-batch is over: its places are free, whoever may still refer to them."""
        self._let_go_before(None)
        self._session = None
        self._arena.clear()
        self._sweep()

    def close(self) -> None:
        """No copy is under way any more, and none will be."""
        if self._session is not None:
            self._abandon(self._session)
        self._lanes.synchronise()
        self._closed = True

    def boundary(self, tensor: torch.Tensor) -> "_Away | _Here":
        """See ``Store.boundary``. Outside a micro-batch everything stays."""
        session = self._session
        if session is None:
            return _Here(self, None, -1, tensor.detach())
        number = len(session.boundaries)
        self._let_go_before(number + 1 - AWAITING_COPY)
        session.held.append([])
        reason = why_not(tensor, self._device, self._smallest)
        if reason is None and not tensor.requires_grad:
            # Nothing before it is trained: its layer has no backward that would ask for it.
            reason = "without gradient"
        kept = reason or self._keep(session, tensor, number)
        if isinstance(kept, Stored):
            session.boundaries.append(ref(kept))
            self.counts.offloaded += 1
            return _Away(self, session, number, kept, Form.of(tensor), None)
        session.boundaries.append(None)
        self.counts.left[kept] += 1
        return _Here(self, session, number, tensor.detach())

    def hold(self, tensor: torch.Tensor) -> "_Away | _Here":
        """See ``Store.hold``. It goes where the boundary before it went."""
        session = self._session
        if session is None or not session.boundaries:
            return _Here(self, None, -1, tensor)
        number = len(session.boundaries) - 1
        reason = why_not(tensor, self._device, self._smallest)
        kept = reason or self._keep(session, tensor, number)
        if not isinstance(kept, Stored):
            return _Here(self, None, -1, tensor)
        held = session.held[number]
        held.append(ref(kept))
        self.counts.held += 1
        return _Away(self, session, number, kept, Form.of(tensor), len(held) - 1)

    def _keep(self, session: _Session, tensor: torch.Tensor, number: int) -> Stored | Reason:
        """Send a storage to the host, unless it is there already."""
        cdata, version, reference = storage_key(tensor)
        if (cdata, version) in session.known:
            _, other = session.known[cdata, version]
            if other is None:
                # Its first user left it on the device: a copy would free nothing.
                return "not chosen"
            stored = other()
            if stored is not None:
                return stored
        if number not in self._chosen:
            session.known[cdata, version] = (reference, None)
            return "not chosen"
        place = self._arena.take(tensor.untyped_storage().nbytes())
        if place is None:
            session.known[cdata, version] = (reference, None)
            return "no room"
        stored = self._send(tensor, place, number)
        session.known[cdata, version] = (reference, ref(stored))
        return stored

    def _send(self, tensor: torch.Tensor, place: Place, number: int) -> Stored:
        copied = self._lanes.offload(bytes_of(tensor), self._arena.view(place))
        self.counts.nbytes += place.nbytes
        waiting = None
        if self._lanes.beside:
            waiting = Waiting(tensor.detach(), tensor._version, copied)
            self._waiting.append((number, waiting))
        elif self._graves is not None:
            self._graves.bury(bytes_of(tensor))
        self._sweep()
        return Stored(place, copied, waiting, self._forget)

    def recall(self, away: "_Away") -> torch.Tensor:
        """Bring a tensor back, and start on the one that will be asked for next.

        Raises:
            RuntimeError: its micro-batch is over.
        """
        session, stored = away.session, away.stored
        if session is not self._session:
            raise RuntimeError(
                "backward reached a layer of a micro-batch that is over, whose input is not on the "
                "host any more: run forward and backward of a micro-batch before the next begins"
            )
        self._sweep()
        stored.recalls += 1
        memory = self._bring(stored)
        if away.place is None:
            self.reached(session, away.number)
        elif away.place + 1 < len(session.held[away.number]):
            following = session.held[away.number][away.place + 1]()
            # As often as this one: somebody has run through here already and will not again.
            if following is not None and following.recalls < stored.recalls:
                self._start(following)
        return away.form.over(memory)

    def reached(self, session: _Session, number: int) -> None:
        """Backward is at a boundary: start on what was held after it, and on the one before."""
        if session is not self._session:
            return
        soon = [*session.held[number][:1], *session.boundaries[max(number - 1, 0) : number]]
        for reference in soon:
            stored = None if reference is None else reference()
            if stored is not None:
                self._start(stored)

    def _start(self, stored: Stored) -> None:
        on_device = stored.waiting is not None and stored.waiting.tensor is not None
        if self._lanes.beside and stored.ahead is None and not on_device:
            stored.ahead = self._restore(stored)

    def _restore(self, stored: Stored) -> tuple[torch.Tensor, Mark]:
        return self._lanes.restore(self._arena.view(stored.place), stored.copied)

    def _bring(self, stored: Stored) -> torch.Tensor:
        """The bytes of a storage, on the device, ready for what is computed next."""
        if stored.waiting is not None and stored.waiting.tensor is not None:
            _refuse_changed(stored.waiting)
            return bytes_of(stored.waiting.tensor)
        memory, ready = stored.ahead or self._restore(stored)
        stored.ahead = None
        self._lanes.wait(ready)
        if self._graves is not None:
            self._graves.bury(memory)
        return memory

    def _let_go_before(self, number: int | None) -> None:
        """Free the originals of boundaries before ``number``, and of what was held after them, once
        their copies are done; None: of all."""
        while self._waiting and (number is None or self._waiting[0][0] < number):
            _, waiting = self._waiting.popleft()
            if waiting.tensor is not None:
                _refuse_changed(waiting)
                self._let_go(waiting)

    def _let_go_of_unwanted(self) -> None:
        """Free the originals that backward has used and nobody can ask for again."""
        wanted: deque[tuple[int, Waiting]] = deque()
        for number, waiting in self._waiting:
            if waiting.wanted:
                wanted.append((number, waiting))
            elif waiting.tensor is not None:
                self._let_go(waiting)
        self._waiting = wanted

    def _let_go(self, waiting: Waiting) -> None:
        self._lanes.wait(waiting.copied)
        if self._graves is not None and waiting.tensor is not None:
            self._graves.bury(bytes_of(waiting.tensor))
        waiting.tensor = None

    def _forget(self, stored: Stored) -> None:
        """Nothing refers to ``stored`` any more."""
        if self._closed:
            return
        # Called wherever the garbage collector runs, perhaps on another stream: what copies still
        # use is let go of when the engine is next called, from where computation goes on.
        if stored.waiting is not None:
            stored.waiting.wanted = False
        if stored.ahead is not None:
            self._orphans.append(stored.ahead)
        if self._graves is not None and self._arena.holds(stored.place):
            # From the device, as a step of the computation: that has waited for the copies.
            host = self._arena.view(stored.place)
            host.copy_(spoilt(host.numel(), self._device), non_blocking=True)
        self._arena.give(stored.place)

    def _abandon(self, session: _Session) -> None:
        """Forget a micro-batch that an error ended; its graph may still be alive."""
        self._lanes.synchronise()
        self._waiting.clear()
        for reference in [*session.boundaries, *(held for each in session.held for held in each)]:
            stored = None if reference is None else reference()
            if stored is not None:
                stored.waiting = stored.ahead = None
        self._session = None
        self._arena.clear()

    def _sweep(self) -> None:
        """Let go of what was brought back for nobody, and of originals that backward is past."""
        self._let_go_of_unwanted()
        while self._orphans:
            memory, ready = self._orphans.pop()
            self._lanes.wait(ready)
            if self._graves is not None:
                self._graves.bury(memory)
            del memory
        if self._graves is not None:
            self._graves.sweep()


def _refuse_changed(waiting: Waiting) -> None:
    changed = waiting.tensor is not None and waiting.tensor._version != waiting.version
    if changed and waiting.wanted:
        raise RuntimeError(
            "a layer changed its input in place while it was being copied to the host; "
            "components.selective_checkpoint_offload.streams=false makes the copy first"
        )


@dataclass(frozen=True, eq=False)
class _Away:
    """Recalls a tensor that is on the host; its copy lives as long as this.

    Attributes:
        number: of the boundary, or of the boundary before it.
        place: among what was held after that boundary; None for the boundary itself.
    """

    engine: Engine
    session: _Session
    number: int
    stored: Stored
    form: Form
    place: int | None

    def __call__(self) -> torch.Tensor:
        return self.engine.recall(self)


@dataclass(frozen=True, eq=False)
class _Here:
    """Recalls a tensor that stayed on the device.

    Attributes:
        session, number: as in ``_Away``; None and -1 for what backward does not go by.
    """

    engine: Engine
    session: _Session | None
    number: int
    tensor: torch.Tensor

    def __call__(self) -> torch.Tensor:
        if self.session is not None:
            self.engine.reached(self.session, self.number)
        return self.tensor
