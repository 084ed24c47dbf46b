//! What a port shows to `memferry top`, besides what its connections count.

use memferry_sys::stats::Block;
use memferry_sys::stats::kinds::LookupBlock;

use super::PortState;

impl PortState {
    /// Stores what the port has now. Called where the number of peers changes, before a sleep, and every few
    /// milliseconds by a thread that polls.
    pub(super) fn publish_gauges(&self) {
        let protocol = &self.protocol;
        self.counters.peers.set(protocol.peers.connected as u64);
        self.counters.unexpected.set(protocol.matches.unexpected_len() as u64);
        self.counters.operations.set(protocol.operations.count() as u64);
    }

    /// Stores the counters of the lookup, if there is one. Called every few milliseconds by a thread that polls.
    pub(super) fn publish_lookup(&mut self) {
        let Some(lookup) = self.windows.lookup_counters() else { return };
        let (id, name) = (self.protocol.peers.port_id, &self.protocol.peers.name);
        let shown =
            self.lookup_counters.get_or_insert_with(|| Block::<LookupBlock>::open(id, name));
        shown.hits.set(lookup.hits.send + lookup.hits.receive);
        shown.misses.set(lookup.misses.send.total() + lookup.misses.receive.total());
        shown.retries.set(lookup.retries);
        shown.fills.set(lookup.fills);
        shown.evictions.set(lookup.evictions);
        shown.attached.set(lookup.attached);
        shown.attach_errors.set(lookup.attach_errors);
        shown.dropped.set(lookup.dropped);
    }
}
