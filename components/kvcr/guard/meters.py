# SPDX-License-Identifier: Apache-2.0
"""The guard's metrics: gauges are looked up when scraped, all others are counted as they happen."""

from __future__ import annotations

from kvcr.metrics import Registry


class Meters:
    """One attribute a metric; may be used from any thread."""

    def __init__(self) -> None:
        self.registry = Registry()
        counter, gauge = self.registry.counter, self.registry.gauge
        self.pulled_blocks = counter(
            "kvcr_pulled_blocks_total", "Blocks copied here from peers.", ["transport"]
        )
        self.pulled_bytes = counter("kvcr_pulled_bytes_total", "Bytes copied here from peers.", ["transport"])
        self.peer_pulled_bytes = counter(
            "kvcr_peer_pulled_bytes_total", "Bytes copied here, by the guard they came from.", ["peer"]
        )
        self.pull_seconds = self.registry.histogram(
            "kvcr_pull_seconds", "Duration of pulls that moved something.", ["transport"]
        )
        self.served_blocks = counter(
            "kvcr_served_blocks_total", "Blocks peers read from here.", ["transport"]
        )
        self.served_bytes = counter("kvcr_served_bytes_total", "Bytes peers read from here.", ["transport"])
        self.deposited_blocks = counter("kvcr_deposited_blocks_total", "Blocks the engine stored.")
        self.returned_blocks = counter(
            "kvcr_returned_blocks_total",
            "Granted slots that the engine gave back, filled on no rank or on some.",
        )
        self.deposited_bytes = counter("kvcr_deposited_bytes_total", "Bytes the engine stored.")
        self.loaded_blocks = counter("kvcr_loaded_blocks_total", "Blocks the engine loaded.")
        self.loaded_bytes = counter("kvcr_loaded_bytes_total", "Bytes the engine loaded, all ranks.")
        self.corrupt_blocks = counter(
            "kvcr_corrupt_blocks_total", "Blocks that failed their checksum, by who found out.", ["where"]
        )
        self.failed_blocks = counter(
            "kvcr_failed_blocks_total", "Fetched blocks that did not arrive.", ["status"]
        )
        self.fetches = counter("kvcr_fetches_total", "Fetches that ended: ok, partial or none.", ["result"])
        self.quarantined_slots = counter(
            "kvcr_quarantined_slots_total",
            "Slots taken out of use, as a read that was given up may still land.",
        )
        self.requalified_slots = counter(
            "kvcr_requalified_slots_total", "Of those, slots in use again, as nothing can land any more."
        )
        self.nixl_restarts = gauge("kvcr_nixl_restarts", "Times the NIXL process ended or had to be ended.")
        self.gave_up = counter(
            "kvcr_pulls_given_up_total",
            "Pulls stopped, as recomputing would be done first, by whose estimate and which measured rate.",
            ["estimate", "rate", "transport"],
        )
        self.gave_up_blocks = counter("kvcr_given_up_blocks_total", "Blocks those pulls did not bring.")
        self.last_give_up = gauge(
            "kvcr_last_give_up", "What went into the last decision to stop a pull.", ["input"]
        )
        self.peer_rate = gauge(
            "kvcr_pull_bytes_per_second",
            "How fast blocks came from a peer, measured over the steps so far.",
            ["peer", "transport", "tier"],
        )
        self.transit_slots = gauge(
            "kvcr_transit_slots", "Slots with blocks for one request alone: used, and the limit.", ["kind"]
        )
        self.inventory_sequence = gauge(
            "kvcr_inventory_sequence", "Number of the last batch of changes that routers were told."
        )
        self.transit_blocks = counter(
            "kvcr_transit_blocks_total",
            "Blocks handed to one request alone: in a transit slot, or in place in the source's pool.",
            ["how"],
        )
        self.evicted_blocks = counter("kvcr_evicted_blocks_total", "Blocks evicted.", ["reason"])
        self.pool_slots = gauge("kvcr_pool_slots", "Slots of the pool.", ["state"])
        self.state = gauge("kvcr_guard_state", "1 for the state the guard is in.", ["state"])
        self.failovers = counter(
            "kvcr_failovers_total", "Engines that died: by proof, and without a word of leaving."
        )
        self.failover_seconds = self.registry.histogram(
            "kvcr_failover_seconds", "From the first sign of an engine's death to ACTIVE."
        )
        self.fences = counter("kvcr_fences_total", "Silent engines that were sent SIGKILL.")
        self.stale_messages = counter(
            "kvcr_stale_messages_total", "Messages of engines refused, as their epoch is over.", ["message"]
        )
        self.lost_grants = counter(
            "kvcr_lost_grants_total", "Grants freed, as no process of the engine knew of them."
        )
        self.self_checks = counter(
            "kvcr_self_checks_total",
            "Idle checks of the directory: ok or broken.",
            ["result"],
        )
        self.scrubbed_bytes = counter("kvcr_scrubbed_bytes_total", "Bytes hashed in the background.")
        self.actions = counter(
            "kvcr_actions_total", "Actions of hints that ended, by how.", ["action", "code"]
        )
        self.repeated_actions = counter(
            "kvcr_actions_repeated_total", "Actions that came again and were answered from memory."
        )
        self.g1_dropped_blocks = counter(
            "kvcr_g1_dropped_blocks_total", "Blocks the engine dropped from its own memory, as asked."
        )
        self.moved_blocks = counter(
            "kvcr_moved_blocks_total", "Blocks that left their source once they were copied here."
        )
        self.dead_fills = counter(
            "kvcr_dead_fills_total", "Blocks that were filled after they had been invalidated, and not kept."
        )
        self.pinned_blocks = gauge("kvcr_pinned_blocks", "Blocks that pins keep from eviction.")
        self.prefetching_blocks = gauge("kvcr_prefetching_blocks", "Blocks of prefetches under way.")
        self.epoch = gauge("kvcr_pool_epoch", "Epoch of the pool.")
        self.peer_refusals = counter(
            "kvcr_peer_refusals_total", "Requests of peers and routers that were refused.", ["code"]
        )
        self.leases = gauge("kvcr_leases", "Leases that peers hold here.")
        self.leases_ended = counter(
            "kvcr_leases_ended_total",
            "Leases of peers that ended: released, expired, hung_up, renewed, pool_replaced.",
            ["how"],
        )
        self.canaries = counter(
            "kvcr_canaries_total",
            "Canary blocks read from peers before they are used: ok or failed.",
            ["transport", "result"],
        )
        self.peer_ready = gauge(
            "kvcr_peer_ready", "1 for a peer whose canary block was read and verified.", ["peer"]
        )
        self.peer_way = gauge(
            "kvcr_peer_bytes_per_second",
            "How fast a peer's canary block was read over the transport chosen, and why that was chosen.",
            ["peer", "transport", "via", "why"],
        )
        # There from the first scrape on: an increase is only seen from a zero, and the first pull may be
        # the one after a death.
        for transport in ("shm", "nixl"):
            for moved in (self.pulled_blocks, self.pulled_bytes, self.served_blocks, self.served_bytes):
                moved.inc(0, transport=transport)
            self.pull_seconds.expect(transport=transport)
        for result in ("ok", "partial", "none"):
            self.fetches.inc(0, result=result)

    def count_pulled(self, peer: str, transport: str, blocks: int, nbytes: int) -> None:
        """Blocks that arrived from a peer."""
        self.pulled_blocks.inc(blocks, transport=transport)
        self.pulled_bytes.inc(nbytes, transport=transport)
        self.peer_pulled_bytes.inc(nbytes, peer=peer)
