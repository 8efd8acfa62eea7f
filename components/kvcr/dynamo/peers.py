# SPDX-License-Identifier: Apache-2.0
"""The other guards of the namespace, as their records tell. Pure: a watch feeds it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcr.config import PeerRecord
from kvcr.dynamo.etcd import KeyChanges, KeyValue
from kvcr.dynamo.records import BadSignature, InstanceRecord, decode, record_key
from kvcr.errors import ConfigError, KvcrError
from kvcr.guard.addresses import Place, is_loopback, split_host

log = logging.getLogger(__name__)


_REASONS = {BadSignature: "signature", ConfigError: "loopback"}


class PeerDirectory:
    """Verified records, by etcd key. One thread."""

    def __init__(
        self,
        namespace: str,
        own_name: str,
        secret: bytes | None,
        on_ignored: Callable[[str], None],
        place: Place,
    ) -> None:
        """``on_ignored`` is called for each record that is not used, with ``signature``, ``format`` or
        ``loopback``: an endpoint on the loopback interface of another host would lead back to ours."""
        self._place = place
        self._own_key = record_key(namespace, own_name)
        self._secret = secret
        self._on_ignored = on_ignored
        self._records: dict[str, InstanceRecord] = {}
        self._refused: dict[str, str] = {}

    def apply(self, changes: KeyChanges) -> bool:
        """Take in a batch of a watch. True when :meth:`peers` changed."""
        before = self.peers()
        for entry in changes.puts:
            if entry.key != self._own_key:
                self._put(entry)
        for key in changes.deletes:
            self._records.pop(key, None)
            self._refused.pop(key, None)
        return self.peers() != before

    def peers(self) -> dict[str, PeerRecord]:
        """By control endpoint."""
        return {record.control_endpoint: record.peer() for record in self._records.values()}

    def _put(self, entry: KeyValue) -> None:
        try:
            record = decode(entry.key, entry.value, self._secret)
            self._require_reachable(record)
            self._records[entry.key] = record
            self._refused.pop(entry.key, None)
        except KvcrError as error:
            # What was believed before has been overwritten, by its owner or by somebody else.
            self._records.pop(entry.key, None)
            self._on_ignored(_REASONS.get(type(error), "format"))
            if self._refused.get(entry.key) != str(error):
                log.warning("ignored: %s", error)
            self._refused[entry.key] = str(error)

    def _require_reachable(self, record: InstanceRecord) -> None:
        """Raises ConfigError when its endpoint is on a loopback interface that is not ours."""
        host, _ = split_host(record.control_endpoint)
        if is_loopback(host) and not self._place.same_loopback(record.boot_id, record.net_namespace):
            raise ConfigError(
                f"guard {record.name} on {record.host} advertises {record.control_endpoint}, which from here "
                "is this host; start it with --interface, or with --advertise"
            )
