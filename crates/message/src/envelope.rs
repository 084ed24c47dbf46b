//! What travels with the bytes of a message, and what a receive asks for.

use crate::buffers::Source;

/// Where a message is matched. Messages of one lane never meet receives of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lane {
    /// By tags.
    #[default]
    Tagged,
    /// In the order of arrival: these messages have no tag.
    Plain,
}

/// What travels with the bytes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Envelope {
    /// Where it is matched.
    pub lane: Lane,
    /// Its tag; 0 for plain messages.
    pub tag: u64,
    /// A word for the receiver that plays no part in matching.
    pub data: Option<u64>,
}

impl Envelope {
    /// A tag and nothing else.
    #[inline]
    pub fn tagged(tag: u64) -> Self {
        Self { lane: Lane::Tagged, tag, data: None }
    }

    /// Not even a tag.
    #[inline]
    pub fn plain() -> Self {
        Self { lane: Lane::Plain, tag: 0, data: None }
    }
}

/// What a receive takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Which messages.
    pub lane: Lane,
    /// From whom.
    pub from: Source,
    /// The tag, in the bits of the mask.
    pub tag: u64,
    /// Which bits of the tag count.
    pub mask: u64,
}

impl Wanted {
    /// Tagged messages.
    pub fn tagged(from: impl Into<Source>, tag: u64, mask: u64) -> Self {
        Self { lane: Lane::Tagged, from: from.into(), tag, mask }
    }

    /// Plain messages.
    pub fn plain(from: impl Into<Source>) -> Self {
        Self { lane: Lane::Plain, from: from.into(), tag: 0, mask: 0 }
    }
}
