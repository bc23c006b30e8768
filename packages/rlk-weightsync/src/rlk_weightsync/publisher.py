"""The producer's side: fill a slot, seal it, lease it to every consumer, and take it back."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from rlk_weightsync.arena import ALIGNMENT, Layout, copy_all, fingerprint, plan_layout, views
from rlk_weightsync.codec import MAX_INTEGER
from rlk_weightsync.device import device_id, host_id, start_time, synchronize, user_id
from rlk_weightsync.errors import DocumentInvalid, ManifestError, PeerLost, UpdateRejected, WeightSyncError
from rlk_weightsync.integrity import ALGORITHMS, LEVELS, content_digest
from rlk_weightsync.leases import Ledger, Slot, SlotState, Update
from rlk_weightsync.manifest import ArenaEntry, Counts, Manifest, Producer, Shard
from rlk_weightsync.transports.base import Transport
from rlk_weightsync.validation import validate, validate_header


class Publisher:
    """Publishes complete updates of a run's weights; a context manager.

    Args:
        transport: how the bytes travel.
        run_id: of the run; consumers may refuse another's.
        consumers: how many (ranks 0 to n-1), or the ranks themselves.
        model_id: of the model, free text.
        integrity: `off`, `sample` or `full`: how much of the bytes the digest covers.
        algorithm: `xxh3-128` (accidents) or `sha256` (untrusted storage).
        slots: snapshots that may be held at once: 2 lets a publication overlap a slow consumer.
        reuse_timeout: seconds that a publication waits for a slot.
        lifetime: seconds until an update that a consumer holds is stale and may be revoked by the next publication.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run_id: str,
        consumers: int | Sequence[int] = 1,
        model_id: str = "",
        integrity: str = "full",
        algorithm: str = "xxh3-128",
        slots: int = 2,
        reuse_timeout: float = 30.0,
        lifetime: float = 3600.0,
    ) -> None:
        if integrity not in LEVELS or algorithm not in ALGORITHMS:
            raise ValueError(f"integrity={integrity!r}, algorithm={algorithm!r}: expected {LEVELS}, {ALGORITHMS}")
        if slots < 1 or not 0 <= reuse_timeout < math.inf or not 0 < lifetime < math.inf:
            raise ValueError("expected slots >= 1, and finite reuse_timeout >= 0 and lifetime > 0")
        ranks = tuple(range(consumers)) if isinstance(consumers, int) else tuple(consumers)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise ValueError(f"consumers={consumers!r}: expected at least one, or distinct ranks of at least 0")
        self.transport, self.run_id, self.model_id, self.consumers = transport, run_id, model_id, ranks
        self._integrity, self._algorithm = integrity, algorithm
        self._reuse_timeout, self._lifetime = reuse_timeout, lifetime
        self._ledger = Ledger()
        self._publishing = threading.Lock()
        self._slots = [Slot() for _ in range(slots)]
        self._layout: tuple[object, Layout] | None = None
        self._version: int | None = None
        self._closed = False
        self._pid = os.getpid()

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        cast: torch.dtype | None = None,
        groups: Mapping[str, str] | None = None,
        shards: Mapping[str, Shard] | None = None,
        model_config_digest: str = "",
    ) -> Update:
        """Take a snapshot and seal it; later writes to the tensors do not reach it.

        Args:
            tensors: name to tensor, any strides, dtypes and devices. Tied tensors are stored once.
            version: larger than any before in this run.
            cast: floating tensors of 16 bits and more are published in this dtype, and their entries say so.
            groups: name to fuse group: members are installed together or not at all.
            shards: name to the part of a larger tensor that it is.
            model_config_digest: of the model's configuration, for the consumers to compare.

        Raises:
            ManifestError: the tensors make no valid manifest (a name, a dtype, an empty update).
            UpdateRejected: the version does not increase.
            PeerLost: every slot is held and none came free in time.
        """
        if os.getpid() != self._pid:
            raise WeightSyncError("the publisher was made in another process; make one after the fork")
        unknown = sorted((set(groups or {}) | set(shards or {})) - set(tensors))
        if unknown:
            raise ValueError(f"groups and shards: no such tensors: {', '.join(unknown)[:200]}")
        with self._publishing:
            self._check_version(version)
            layout = self._plan(tensors, cast, groups or {}, shards or {})
            slot = self._take_slot()
            try:
                manifest = self._fill(slot, layout, tensors, version, model_config_digest)
            except BaseException:
                with self._ledger.changed:
                    slot.state = SlotState.FREE
                raise
            with self._ledger.changed:
                update = Update(self.transport, slot, manifest, self._ledger)
                slot.state, slot.update, self._version = SlotState.SEALED, update, version
            return update

    def close(self) -> None:
        """Revoke what is held and free the slots; harmless when closed already.

        Raises:
            PeerLost: a consumer is still reading a slot, past `reuse_timeout`.
        """
        with self._ledger.changed:
            self._closed = True
            for update in self._held():
                update.take_back("its publisher was closed")
            idle = self._ledger.wait_for(lambda: not any(slot.pins for slot in self._slots), self._reuse_timeout)
            for slot in self._slots:
                if not slot.pins:
                    self._drop(slot)
        self.transport.close()
        if not idle:
            raise PeerLost(f"a consumer still reads a slot {self._reuse_timeout:g} s after the publisher was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counters(self) -> dict[str, int]:
        """Bytes of slot memory, slots in use, live leases: what must not grow over a run."""
        with self._ledger.changed:
            held = self._held()
            return {
                "arena_bytes": sum(slot.arena.numel() for slot in self._slots if slot.arena is not None),
                "slots_in_use": len(held),
                "leases": sum(len(update.live_ranks()) for update in held),
            }

    def _held(self) -> list[Update]:
        return [slot.update for slot in self._slots if slot.update is not None]

    def _check_version(self, version: int) -> None:
        self._check_open()
        if type(version) is not int or not 0 <= version <= MAX_INTEGER:
            raise ValueError(f"version={version!r}: expected an integer of at least 0")
        if self._version is not None and version <= self._version:
            raise UpdateRejected(f"version {version} does not follow {self._version}; versions increase strictly")

    def _check_open(self) -> None:
        if self._closed:
            raise WeightSyncError("the publisher is closed")

    def _plan(
        self,
        tensors: Mapping[str, torch.Tensor],
        cast: torch.dtype | None,
        groups: Mapping[str, str],
        shards: Mapping[str, Shard],
    ) -> Layout:
        """The layout; that of the last publication where nothing but values changed, as in most steps of a run."""
        found = fingerprint(tensors)
        key = (found, cast, tuple(groups.items()), tuple(shards.items()))
        if found is None or self._layout is None or self._layout[0] != key:
            self._layout = key, plan_layout(tensors, cast=cast, groups=groups, shards=shards)
        return self._layout[1]

    def _take_slot(self) -> Slot:
        def free() -> Slot | None:
            now = time.time_ns()
            for update in self._held():
                update.problems()
                if update.manifest.expires_at < now:
                    update.take_back("it expired")
            return next((slot for slot in self._slots if slot.state is SlotState.FREE), None)

        with self._ledger.changed:
            self._ledger.wait_for(lambda: free() is not None or self._closed, self._reuse_timeout)
            slot = free()
            self._check_open()
            if slot is None:
                held = self._held()
                ranks = tuple(sorted({rank for update in held for rank in update.live_ranks()}))
                versions = ", ".join(str(update.manifest.version) for update in held)
                raise PeerLost(
                    f"every slot is held (versions {versions}, ranks {ranks}) and none came free in "
                    f"{self._reuse_timeout:g} s; release or revoke() an update, or make more slots",
                    ranks,
                )
            slot.state = SlotState.FILLING
            return slot

    def _fill(
        self, slot: Slot, layout: Layout, tensors: Mapping[str, torch.Tensor], version: int, config_digest: str
    ) -> Manifest:
        if slot.arena is None or slot.arena.numel() != layout.nbytes:
            self._drop(slot)
            slot.arena = self.transport.allocate(layout.nbytes)
        planned_anew = slot.layout is not layout
        if planned_anew:
            slot.layout, slot.views = layout, views(layout.entries, {0: slot.arena})
        slot.generation += 1
        for device in {tensor.device for tensor in tensors.values()}:
            synchronize(device)
        names = [entry.name for entry in layout.entries if entry.span is not None and entry.alias_of is None]
        copy_all([slot.views[name] for name in names], [tensors[name] for name in names])
        synchronize(self.transport.device)
        digest = content_digest(slot.arena, self._integrity, self._algorithm)
        manifest = self._manifest(layout, slot.generation, version, config_digest, digest)
        try:
            (validate if planned_anew else validate_header)(manifest)
            _ = manifest.manifest_id  # the bytes are fixed before anyone sees them
        except ManifestError:
            slot.layout = None
            raise
        except ValueError as error:
            raise DocumentInvalid(f"the manifest has no canonical form: {str(error)[:200]}") from None
        return manifest

    def _manifest(
        self, layout: Layout, generation: int, version: int, config_digest: str, digest: str | None
    ) -> Manifest:
        now, host = time.time_ns(), host_id()
        spans = (entry.span for entry in layout.entries if entry.alias_of is None)
        groups = {entry.group for entry in layout.entries} - {None}
        device = device_id(self.transport.device)
        return Manifest(
            run_id=self.run_id,
            model_id=self.model_id,
            model_config_digest=config_digest,
            version=version,
            tensors=layout.entries,
            arenas=(ArenaEntry(0, layout.nbytes, ALIGNMENT, device, host, generation, digest),),
            counts=Counts(len(layout.entries), sum(span.nbytes for span in spans if span is not None), len(groups)),
            consumers=self.consumers,
            created_at=now,
            expires_at=now + int(self._lifetime * 1e9),
            producer=Producer(os.getpid(), start_time(os.getpid()), user_id(), host),
        )

    def _drop(self, slot: Slot) -> None:
        if slot.arena is not None:
            slot.views, slot.layout = {}, None
            self.transport.free(slot.arena)
            slot.arena = None
