//! The memory that two connected processes share.
//!
//! Each connection has one sealed memfd with two directions. A direction has a ring of cells of one
//! cache line ([`cells`]), a bounce ring for payloads that do not fit into a cell ([`bounce`]) and
//! claim slots for messages that both sides copy ([`claims`]). Each side has its wakeup flags
//! ([`wakeup`]), its backpressure ([`backpressure`]) and a flag that names the window it accesses
//! ([`window_gate`]). A process with many peers has one more memfd, in which peers set hints that they
//! have written ([`hints`]). The peer can overwrite all of it at any time: a word is loaded once, checked,
//! then used.

pub mod backpressure;
pub mod bounce;
pub mod cells;
pub mod claims;
pub mod hint_memory;
pub mod hints;
pub mod layout;
pub mod wakeup;
pub mod window_gate;
