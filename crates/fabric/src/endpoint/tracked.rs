//! Tracked operations, which need more at completion than the program's context: they are silent,
//! have several parts, own their memory, or wait for a reply. They are posted with an index in
//! place of the context, marked by [`TRACKED_BIT`].

use std::ffi::c_int;
use std::sync::Mutex;

use memferry_message::Peer;

use super::service::WriteNotification;
use crate::atomic::AtomicKind;

/// The bit that distinguishes tracked operations from contexts. An operation whose context has the
/// bit is tracked as well.
const TRACKED_BIT: u64 = 1 << 63;

/// What else happens at the completion of a tracked operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum TrackedRole {
    /// Nothing.
    Plain,
    /// A write is complete: its target is notified.
    NotifiedWrite(WriteNotification),
    /// The reply to an atomic operation on this number of bytes has arrived.
    Atomic { kind: AtomicKind, bytes: usize, ticket: u64 },
    /// The reply to a request that a peer has sent in a connection has left.
    Reply { peer: Peer, connection: u64 },
    /// Nobody waits for the operation.
    Abandoned,
}

/// The outcome of a tracked operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct FinishedOp {
    pub(super) context: u64,
    pub(super) is_silent: bool,
    /// The error code of the first part that failed, or 0.
    pub(super) code: c_int,
    pub(super) role: TrackedRole,
}

/// The state of a tracked operation.
#[derive(Debug)]
pub(super) struct TrackedOp {
    /// The program's context.
    pub(super) context: u64,
    /// No entry is made on success.
    pub(super) is_silent: bool,
    /// The operation takes several messages.
    pub(super) is_multi_recv: bool,
    /// The number of parts; only the last completion is reported.
    pub(super) parts: usize,
    /// The error code of the first part that failed, or 0.
    pub(super) code: c_int,
    /// The memory of the message, if the operation owns it.
    pub(super) bytes: Option<Box<[u8]>>,
    pub(super) role: TrackedRole,
}

impl TrackedOp {
    /// Creates an operation with one part.
    pub(super) fn new(context: u64, is_silent: bool) -> Self {
        let role = TrackedRole::Plain;
        Self { context, is_silent, is_multi_recv: false, parts: 1, code: 0, bytes: None, role }
    }
}

#[derive(Debug, Default)]
pub(super) struct TrackedOps {
    slab: Mutex<TrackedSlab>,
}

#[derive(Debug, Default)]
struct TrackedSlab {
    all: Vec<Option<TrackedOp>>,
    free: Vec<usize>,
}

#[inline]
pub(super) fn is_tracked(context: u64) -> bool {
    context & TRACKED_BIT != 0
}

impl TrackedOps {
    /// Adds an operation, and returns its posted context.
    pub(super) fn add(&self, op: TrackedOp) -> u64 {
        let mut slab = self.slab.lock().unwrap();
        let index = slab.free.pop().unwrap_or(slab.all.len());
        if index == slab.all.len() {
            slab.all.push(Some(op));
        } else {
            slab.all[index] = Some(op);
        }
        TRACKED_BIT | index as u64
    }

    /// Completes a part of an operation. Returns the outcome of the operation; `None` if parts are
    /// left. The operation is removed, unless it is a multi-receive that continues.
    pub(super) fn finish(&self, mark: u64, is_last: bool, code: c_int) -> Option<FinishedOp> {
        let index = (mark & !TRACKED_BIT) as usize;
        let mut slab = self.slab.lock().unwrap();
        let entry = slab.all.get_mut(index)?;
        let op = entry.as_mut()?;
        op.code = if op.code == 0 { code } else { op.code };
        op.parts -= 1;
        let TrackedOp { context, is_silent, is_multi_recv, parts, code, role, .. } = *op;
        if is_multi_recv {
            (op.parts, op.code) = (1, 0);
        } else if parts > 0 {
            return None;
        }
        if is_last || !is_multi_recv {
            *entry = None;
            slab.free.push(index);
        }
        Some(FinishedOp { context, is_silent, code, role })
    }

    /// Ends the interest in the atomic operation with a ticket. Returns `false` if it is complete
    /// already.
    pub(super) fn abandon(&self, mark: u64, ticket: u64) -> bool {
        let index = (mark & !TRACKED_BIT) as usize;
        match self.slab.lock().unwrap().all.get_mut(index) {
            Some(Some(op)) if matches!(op.role, TrackedRole::Atomic { ticket: t, .. } if t == ticket) =>
            {
                op.role = TrackedRole::Abandoned;
                true
            }
            _ => false,
        }
    }

    /// Removes an operation that was not started.
    pub(super) fn remove(&self, mark: u64) {
        let index = (mark & !TRACKED_BIT) as usize;
        let mut slab = self.slab.lock().unwrap();
        if slab.all.get_mut(index).and_then(Option::take).is_some() {
            slab.free.push(index);
        }
    }

    /// The posted context of an operation with this context that can be cancelled. An atomic
    /// operation cannot: its owner executes it in any case, and replies.
    pub(super) fn find(&self, context: u64) -> Option<u64> {
        let slab = self.slab.lock().unwrap();
        let has_context = |op: &Option<TrackedOp>| {
            matches!(op, Some(op) if op.context == context
                && matches!(op.role, TrackedRole::Plain | TrackedRole::NotifiedWrite(_)))
        };
        slab.all.iter().position(has_context).map(|index| TRACKED_BIT | index as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracked_op(context: u64, is_multi_recv: bool) -> TrackedOp {
        TrackedOp { is_multi_recv, ..TrackedOp::new(context, true) }
    }

    fn finish(
        marks: &TrackedOps,
        mark: u64,
        is_last: bool,
        code: c_int,
    ) -> Option<(u64, bool, c_int)> {
        let done = marks.finish(mark, is_last, code)?;
        Some((done.context, done.is_silent, done.code))
    }

    #[test]
    fn marks_are_found_by_their_context_until_the_end() {
        let marks = TrackedOps::default();
        let (one, two) = (marks.add(tracked_op(7, false)), marks.add(tracked_op(8, true)));
        assert!(is_tracked(one) && is_tracked(two) && !is_tracked(7));
        assert_eq!((marks.find(7), marks.find(8), marks.find(9)), (Some(one), Some(two), None));
        assert_eq!(finish(&marks, one, false, 0), Some((7, true, 0)));
        assert_eq!((marks.find(7), finish(&marks, one, false, 0)), (None, None));
        assert_eq!(finish(&marks, two, false, 5), Some((8, true, 5)));
        assert_eq!(finish(&marks, two, true, 0), Some((8, true, 0)));
        assert_eq!(finish(&marks, two, true, 0), None);
        assert!([one, two].contains(&marks.add(tracked_op(9, false))));
    }

    #[test]
    fn of_an_operation_in_parts_the_last_end_tells_what_went_wrong_first() {
        let marks = TrackedOps::default();
        let mark = marks.add(TrackedOp { parts: 3, ..TrackedOp::new(7, false) });
        assert_eq!((finish(&marks, mark, false, 0), finish(&marks, mark, false, 5)), (None, None));
        assert_eq!(finish(&marks, mark, false, 6), Some((7, false, 5)));
        assert_eq!(finish(&marks, mark, false, 0), None);
    }
}
