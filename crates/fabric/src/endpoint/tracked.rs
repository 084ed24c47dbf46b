//! Tracked operations, which need more at completion than the program's context: they are silent,
//! have several parts, or own their memory. They are posted with an index in place of the context,
//! marked by [`TRACKED_BIT`].

use std::ffi::c_int;
use std::sync::Mutex;

/// The bit that distinguishes tracked operations from contexts. An operation whose context has the
/// bit is tracked as well.
const TRACKED_BIT: u64 = 1 << 63;

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
    #[expect(dead_code, reason = "owned until completion, and not read")]
    pub(super) bytes: Option<Box<[u8]>>,
}

impl TrackedOp {
    /// Creates an operation with one part.
    pub(super) fn new(context: u64, is_silent: bool) -> Self {
        Self { context, is_silent, is_multi_recv: false, parts: 1, code: 0, bytes: None }
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

    /// Completes a part of an operation. Returns the context of the operation, whether it is
    /// silent, and its error code; `None` if parts are left. The operation is removed, unless it is
    /// a multi-receive that continues.
    pub(super) fn finish(
        &self,
        mark: u64,
        is_last: bool,
        code: c_int,
    ) -> Option<(u64, bool, c_int)> {
        let index = (mark & !TRACKED_BIT) as usize;
        let mut slab = self.slab.lock().unwrap();
        let entry = slab.all.get_mut(index)?;
        let op = entry.as_mut()?;
        op.code = if op.code == 0 { code } else { op.code };
        op.parts -= 1;
        let TrackedOp { context, is_silent, is_multi_recv, parts, code, .. } = *op;
        if is_multi_recv {
            (op.parts, op.code) = (1, 0);
        } else if parts > 0 {
            return None;
        }
        if is_last || !is_multi_recv {
            *entry = None;
            slab.free.push(index);
        }
        Some((context, is_silent, code))
    }

    /// Removes an operation that was not started.
    pub(super) fn remove(&self, mark: u64) {
        let index = (mark & !TRACKED_BIT) as usize;
        let mut slab = self.slab.lock().unwrap();
        if slab.all.get_mut(index).and_then(Option::take).is_some() {
            slab.free.push(index);
        }
    }

    /// The posted context of an operation with this context.
    pub(super) fn find(&self, context: u64) -> Option<u64> {
        let slab = self.slab.lock().unwrap();
        let has_context = |op: &Option<TrackedOp>| matches!(op, Some(m) if m.context == context);
        slab.all.iter().position(has_context).map(|index| TRACKED_BIT | index as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracked_op(context: u64, is_multi_recv: bool) -> TrackedOp {
        TrackedOp { is_multi_recv, ..TrackedOp::new(context, true) }
    }

    #[test]
    fn marks_are_found_by_their_context_until_the_end() {
        let marks = TrackedOps::default();
        let (one, two) = (marks.add(tracked_op(7, false)), marks.add(tracked_op(8, true)));
        assert!(is_tracked(one) && is_tracked(two) && !is_tracked(7));
        assert_eq!((marks.find(7), marks.find(8), marks.find(9)), (Some(one), Some(two), None));
        assert_eq!(marks.finish(one, false, 0), Some((7, true, 0)));
        assert_eq!((marks.find(7), marks.finish(one, false, 0)), (None, None));
        assert_eq!(marks.finish(two, false, 5), Some((8, true, 5)));
        assert_eq!(marks.finish(two, true, 0), Some((8, true, 0)));
        assert_eq!(marks.finish(two, true, 0), None);
        assert!([one, two].contains(&marks.add(tracked_op(9, false))));
    }

    #[test]
    fn of_an_operation_in_parts_the_last_end_tells_what_went_wrong_first() {
        let marks = TrackedOps::default();
        let mark = marks.add(TrackedOp { parts: 3, ..TrackedOp::new(7, false) });
        assert_eq!((marks.finish(mark, false, 0), marks.finish(mark, false, 5)), (None, None));
        assert_eq!(marks.finish(mark, false, 6), Some((7, false, 5)));
        assert_eq!(marks.finish(mark, false, 0), None);
    }
}
