//! A pinner that pins nothing and writes down everything.

use std::collections::BTreeMap;
use std::sync::Mutex;

use memferry_memory::pinning::{Access, PageRange, PinError, Pinner, Token};

/// Remembers what is pinned. Memory need not exist.
#[derive(Debug)]
pub(crate) struct Recorder {
    inner: Mutex<Inner>,
    most_bytes: usize,
}

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    pinned: BTreeMap<u64, (PageRange, Access)>,
}

impl Recorder {
    /// One that refuses to have more than this pinned.
    pub(crate) fn with_most(most_bytes: usize) -> Self {
        Self { inner: Mutex::default(), most_bytes }
    }

    pub(crate) fn new() -> Self {
        Self::with_most(usize::MAX)
    }

    /// Whether a token stands for a pin now.
    #[allow(dead_code)]
    pub(crate) fn is_pinned(&self, token: Token) -> bool {
        self.inner.lock().unwrap().pinned.contains_key(&token.0)
    }

    /// All that is pinned now, by address.
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

    fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError> {
        let mut inner = self.inner.lock().unwrap();
        let bytes: usize = inner.pinned.values().map(|(range, _)| range.bytes()).sum();
        if bytes + range.bytes() > self.most_bytes {
            return Err(PinError::MemlockLimit {
                limit_bytes: self.most_bytes as u64,
                locked_bytes: bytes as u64,
                asked_bytes: range.bytes() as u64,
            });
        }
        inner.last += 1;
        let token = inner.last;
        inner.pinned.insert(token, (range, access));
        Ok(Token(token))
    }

    fn unpin(&self, range: PageRange, token: Token) {
        let (pinned, _) = self.inner.lock().unwrap().pinned.remove(&token.0).expect("pinned once");
        assert_eq!(pinned, range);
    }

    fn follows_mapping(&self) -> bool {
        false
    }
}
