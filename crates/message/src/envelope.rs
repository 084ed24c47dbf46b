//! The envelope of a message, and the messages that a receive matches.

use crate::buffers::Source;

/// The match space of a message. Messages of one space never match receives of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum MatchSpace {
    /// Messages with a tag, matched by tag.
    #[default]
    Tagged,
    /// Messages without a tag, matched in order of arrival.
    Untagged,
    /// Requests to the libfabric provider of the receiver. They match no receive.
    #[doc(hidden)]
    Service,
    /// Replies to these requests, matched by tag.
    #[doc(hidden)]
    Reply,
}

impl MatchSpace {
    /// The number of the space, of two bits.
    #[doc(hidden)]
    #[inline]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The space with a number, of which the lowest two bits count.
    #[doc(hidden)]
    #[inline]
    pub fn of_code(code: u8) -> Self {
        match code & 3 {
            0 => Self::Tagged,
            1 => Self::Untagged,
            2 => Self::Service,
            _ => Self::Reply,
        }
    }
}

/// The data that is sent with the bytes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Envelope {
    /// The match space.
    pub space: MatchSpace,
    /// The tag; 0 for untagged messages.
    pub tag: u64,
    /// A word for the receiver. Matching ignores it.
    pub data: Option<u64>,
}

impl Envelope {
    /// An envelope with a tag and no data.
    #[inline]
    pub fn tagged(tag: u64) -> Self {
        Self { space: MatchSpace::Tagged, tag, data: None }
    }

    /// An envelope without tag and data.
    #[inline]
    pub fn untagged() -> Self {
        Self { space: MatchSpace::Untagged, tag: 0, data: None }
    }
}

/// The messages that a receive matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatchSpec {
    /// The match space.
    pub space: MatchSpace,
    /// The sender.
    pub from: Source,
    /// The tag; only the bits in the mask are compared.
    pub tag: u64,
    /// The bits of the tag that are compared.
    pub mask: u64,
}

impl MatchSpec {
    /// Matches tagged messages.
    pub fn tagged(from: impl Into<Source>, tag: u64, mask: u64) -> Self {
        Self { space: MatchSpace::Tagged, from: from.into(), tag, mask }
    }

    /// Matches untagged messages.
    pub fn untagged(from: impl Into<Source>) -> Self {
        Self { space: MatchSpace::Untagged, from: from.into(), tag: 0, mask: 0 }
    }
}
