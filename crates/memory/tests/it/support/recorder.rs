//! A pinner that pins nothing and records every call.

use std::collections::BTreeMap;
use std::sync::Mutex;

use memferry_memory::pinning::{Access, PageRange, PinError, PinToken, Pinner};

/// Records what is pinned. The memory need not exist.
#[derive(Debug)]
pub(crate) struct Recorder {
    inner: Mutex<RecordedPins>,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct RecordedPins {
    last: u64,
    pinned: BTreeMap<u64, (PageRange, Access)>,
}

impl Recorder {
    /// Creates a recorder that fails if more than `max_bytes` are pinned.
    pub(crate) fn with_max_bytes(max_bytes: usize) -> Self {
        Self { inner: Mutex::default(), max_bytes }
    }

    pub(crate) fn new() -> Self {
        Self::with_max_bytes(usize::MAX)
    }

    /// Whether a number is that of a current pin.
    #[allow(dead_code)]
    pub(crate) fn is_pinned(&self, number: u64) -> bool {
        self.inner.lock().unwrap().pinned.contains_key(&number)
    }

    /// All pinned ranges, sorted by address.
    pub(crate) fn pinned(&self) -> Vec<PageRange> {
        let inner = self.inner.lock().unwrap();
        let mut ranges: Vec<_> = inner.pinned.values().map(|(range, _)| *range).collect();
        ranges.sort_by_key(|range| (range.start(), range.end()));
        ranges
    }
}

impl Pinner for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        let mut inner = self.inner.lock().unwrap();
        let bytes: usize = inner.pinned.values().map(|(range, _)| range.bytes()).sum();
        if bytes + range.bytes() > self.max_bytes {
            return Err(PinError::MemlockLimit {
                limit_bytes: self.max_bytes as u64,
                locked_bytes: bytes as u64,
                requested_bytes: range.bytes() as u64,
            });
        }
        inner.last += 1;
        let token = inner.last;
        inner.pinned.insert(token, (range, access));
        Ok(PinToken::new(token))
    }

    fn unpin(&self, range: PageRange, token: &PinToken) {
        let (pinned, _) = self
            .inner
            .lock()
            .unwrap()
            .pinned
            .remove(&token.number())
            .expect("not pinned, or unpinned twice");
        assert_eq!(pinned, range);
    }

    fn tracks_mapping(&self) -> bool {
        false
    }
}
