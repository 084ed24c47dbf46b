//! The memory that two connected processes share, and what moves through it.
//!
//! One sealed memfd for each connection, with a half for each direction. A half has a ring of
//! cells of one cache line ([`cells`]), a space for payloads that do not fit a cell ([`space`]),
//! records for messages that both sides copy together ([`record`]), the words by which the
//! consumer says whether it must be woken ([`attention`]) and what it has no room for
//! ([`fullness`]), and that by which a side says whose window it copies to ([`visit`]). Everything in here can be overwritten by the other process at any time: words are
//! read once, copied out, checked, then used.

pub mod attention;
pub mod cells;
pub mod fullness;
pub mod layout;
pub mod record;
pub mod space;
pub mod visit;
