//! What a connection counts for `memferry top`. The lock of the port makes the caller the only writer.

use memferry_sys::{clock, stats};

use super::Connection;
use crate::envelope::{Envelope, MatchSpace};
use crate::path::Sending;
use crate::plan::PathKind;

impl Connection {
    /// Counts a message that was sent, unless it is one of the library itself.
    #[inline(always)]
    pub(crate) fn count_sent(&self, envelope: &Envelope, path: PathKind, length: u64) {
        if envelope.space != MatchSpace::Service {
            self.counters.count_sent(path as usize, length);
        }
    }

    /// Counts a send that has completed, and its time if it was announced.
    pub(crate) fn count_send(&self, sending: &Sending) {
        self.count_sent(&sending.envelope, sending.path, sending.length);
        if sending.started_ns != 0 {
            let time = clock::now_ns().saturating_sub(sending.started_ns);
            self.counters.send_latency[stats::class_of(time)].add(1);
        }
    }
}
