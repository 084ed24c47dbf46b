//! A pin that is undone on drop.

use std::sync::Arc;

use memferry_sys::fork::OwnerProcess;

use super::{Access, PageRange, PinError, PinToken, Pinner};

/// Pinned pages, unpinned on drop: the copy that uses them owns this value.
///
/// A pin is not valid in a forked child, and dropping it there has no effect.
#[derive(Debug)]
pub struct PinnedRange {
    pinner: Arc<dyn Pinner>,
    range: PageRange,
    token: PinToken,
    owner: OwnerProcess,
}

impl PinnedRange {
    /// Pins a range.
    pub fn new(
        pinner: &Arc<dyn Pinner>,
        range: PageRange,
        access: Access,
    ) -> Result<Self, PinError> {
        let owner = OwnerProcess::current();
        let token = pinner.pin(range, access)?;
        Ok(Self { pinner: Arc::clone(pinner), range, token, owner })
    }

    /// The pinned range.
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// The pinner's token.
    pub fn token(&self) -> &PinToken {
        &self.token
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        if self.owner.is_current() {
            self.pinner.unpin(self.range, &self.token);
        }
    }
}
