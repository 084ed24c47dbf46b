//! The kinds of blocks. The order of [`ALL`] is that of the lines in the text of a page.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Block;
use super::layout::{Counter, Counters, Field, Kind, Shape, counters};

counters! {
    /// What one thread of the process did.
    ThreadCounters, "thread", 1 {
        /// Copies that the caller executed.
        copies_inline: sizes,
        /// Copies that were one descriptor of a channel.
        copies_single: sizes,
        /// Copies in chunks, which the channels of an engine and the caller claimed.
        copies_shared: sizes,
        /// Copies in chunks, which channels of two engines and the caller claimed.
        copies_hybrid: sizes,
        /// Copies in parts that were cut to the limits of an engine.
        copies_parts: sizes,
        /// Bytes of these copies.
        copy_bytes: ["inline", "single", "shared", "hybrid", "parts"],
        /// The time of blocking copies of 64 KiB or more.
        copy_latency: nanoseconds,
        /// Transfers that the caller had to execute: the channel was full or closed, or the memory could not be pinned.
        fallbacks: ["full", "unpinned"],
        /// Waits for a transfer that was not complete at once.
        waits: counter,
        /// Waits that went to sleep.
        sleeps: counter,
        /// Transfers that ended with an error.
        faults: counter,
    }
}

counters! {
    /// A channel of an engine.
    ChannelCounters, "channel", 2 {
        /// Accepted descriptors.
        submitted: counter,
        /// Finished descriptors.
        completed: counter,
        /// Failed descriptors.
        failed: counter,
        /// Bytes copied, filled or compared.
        bytes: counter,
        /// How often the channel went to sleep.
        sleeps: counter,
        /// How often a submit woke it.
        wakes: counter,
        /// Submits that the full channel did not accept completely.
        full: counter,
        /// Descriptors in the queue.
        depth: gauge,
        /// Bytes of accepted descriptors that are not finished.
        outstanding_bytes: gauge,
        /// Descriptors that the channel executed, by length. A work offer counts with the bytes that the channel claimed.
        sizes: sizes,
        /// The time of the execution of a descriptor, one in 64.
        service_time: nanoseconds,
    }
}

counters! {
    /// A pin cache.
    PinCounters, "pins", 3 {
        /// Requests that found their memory pinned.
        hits: counter,
        /// Requests that had to pin.
        misses: counter,
        /// Entries pinned as replacements of smaller ones.
        merges: counter,
        /// Entries evicted to make space.
        evictions: counter,
        /// Entries dropped because their mapping changed or they were invalidated.
        invalidations: counter,
        /// Requests that were pinned for one use.
        uncached: counter,
        /// Bytes pinned now.
        bytes_pinned: gauge,
        /// Cached entries now.
        entries: gauge,
    }
}

counters! {
    /// The lookup of an endpoint's remote addresses, stored every few milliseconds while the endpoint is polled.
    LookupBlock, "lookup", 4 {
        /// Lookups that found their line in the cache.
        hits: counter,
        /// Lookups that missed.
        misses: counter,
        /// Lookups of a line whose miss was pending.
        retries: counter,
        /// Lines filled into the cache.
        fills: counter,
        /// Lines evicted by a fill.
        evictions: counter,
        /// Lines attached.
        attached: counter,
        /// Lines that could not be attached.
        attach_errors: counter,
        /// Misses dropped because the queue was full.
        dropped: counter,
    }
}

counters! {
    /// An endpoint, a link or a job: what is not of one peer.
    EndpointCounters, "endpoint", 5 {
        /// Connected peers.
        peers: gauge,
        /// Messages that no receive has matched yet.
        unexpected: gauge,
        /// Operations in flight.
        operations: gauge,
        /// How often a thread that waited went to sleep.
        sleeps: counter,
        /// Peers that were lost.
        lost_peers: counter,
    }
}

counters! {
    /// A peer of an endpoint.
    PeerCounters, "peer", 6 {
        /// Messages sent, by the path that they took.
        sent: ["inline", "eager", "single", "cooperative", "offload", "pipeline", "remote"],
        /// Their bytes.
        sent_bytes: counter,
        /// Messages received, by the path that they took.
        received: ["inline", "eager", "single", "cooperative", "offload", "pipeline", "remote"],
        /// Their bytes.
        received_bytes: counter,
        /// Sends that could not be written to the ring at once.
        waits: counter,
        /// Messages that changed their path: the kernel refused to copy.
        fallbacks: ["refused"],
        /// Messages sent, by length.
        sent_sizes: sizes,
        /// Messages received, by length.
        received_sizes: sizes,
        /// The time from the announcement of a message to its end at the sender, of every announced message.
        send_latency: nanoseconds,
    }
}

/// All kinds.
pub const ALL: &[Kind] = &[
    kind::<ThreadCounters>(),
    kind::<ChannelCounters>(),
    kind::<PinCounters>(),
    kind::<LookupBlock>(),
    kind::<EndpointCounters>(),
    kind::<PeerCounters>(),
];

const fn kind<C: Counters>() -> Kind {
    Kind { name: C::NAME, fields: C::FIELDS }
}

const _: () = {
    assert!(ThreadCounters::KIND == 1 && ChannelCounters::KIND == 2 && PinCounters::KIND == 3);
    assert!(LookupBlock::KIND == 4 && EndpointCounters::KIND == 5 && PeerCounters::KIND == 6);
};

impl ThreadCounters {
    /// Counts a copy by its path: one of the fields `copies_…`, and its place in `copy_bytes`.
    #[inline(always)]
    pub fn count_copy(&self, path: CopyPath, bytes: u64) {
        let sizes = match path {
            CopyPath::Inline => &self.copies_inline,
            CopyPath::Single => &self.copies_single,
            CopyPath::Shared => &self.copies_shared,
            CopyPath::Hybrid => &self.copies_hybrid,
            CopyPath::Parts => &self.copies_parts,
        };
        sizes[super::class_of(bytes)].add(1);
        self.copy_bytes[path as usize].add(bytes);
    }

    /// Counts a transfer that the caller had to execute.
    #[cold]
    pub fn fall_back(&self, reason: Fallback) {
        crate::probes::fallback(reason as u64);
        self.fallbacks[reason as usize].add(1);
    }
}

/// Opens the block of a channel, which is named after its engine and its thread.
pub fn open_channel(engine: &str, label: Option<&str>) -> Block<ChannelCounters> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let label = label.map(|label| label.trim_start_matches("memferry-"));
    Block::open(number, &format!("{engine} {}", label.unwrap_or("")))
}

/// How a copy is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyPath {
    /// By the caller.
    Inline,
    /// As one descriptor.
    Single,
    /// In chunks, by the channels of an engine.
    Shared,
    /// In chunks, by the channels of two engines.
    Hybrid,
    /// In parts.
    Parts,
}

/// Why the caller had to execute a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// The channel was full or closed.
    Full,
    /// The memory could not be pinned.
    Unpinned,
}

/// The index of messages of other hosts in `sent` and `received`. Those of paths are in the order of their names.
pub const REMOTE_PATH: usize = 6;

impl PeerCounters {
    /// Counts a message that was sent.
    #[inline(always)]
    pub fn count_sent(&self, path: usize, bytes: u64) {
        crate::probes::message_end(0, path as u64, bytes);
        self.sent[path].add(1);
        self.sent_bytes.add(bytes);
        self.sent_sizes[super::class_of(bytes)].add(1);
    }

    /// Counts a message that was received.
    #[inline(always)]
    pub fn count_received(&self, path: usize, bytes: u64) {
        crate::probes::message_end(1, path as u64, bytes);
        self.received[path].add(1);
        self.received_bytes.add(bytes);
        self.received_sizes[super::class_of(bytes)].add(1);
    }
}
