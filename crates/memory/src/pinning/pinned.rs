//! A pin that is undone when it is dropped.

use std::sync::Arc;

use memferry_sys::fork;

use super::{Access, PageRange, PinError, Pinner, Token};

/// Pinned pages. Whoever holds this keeps them pinned: give it to the copy that uses them.
///
/// In a forked child a pin of the parent means nothing, and dropping it there does nothing.
#[derive(Debug)]
pub struct Pinned {
    pinner: Arc<dyn Pinner>,
    range: PageRange,
    token: Token,
    generation: u64,
}

impl Pinned {
    /// Pins a range.
    pub fn new(
        pinner: &Arc<dyn Pinner>,
        range: PageRange,
        access: Access,
    ) -> Result<Self, PinError> {
        fork::watch();
        let generation = fork::generation();
        let token = pinner.pin(range, access)?;
        Ok(Self { pinner: Arc::clone(pinner), range, token, generation })
    }

    /// What is pinned.
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// What the pinner calls it.
    pub fn token(&self) -> Token {
        self.token
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if fork::generation() == self.generation {
            self.pinner.unpin(self.range, self.token);
        }
    }
}
