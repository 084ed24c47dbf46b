//! The copy engine that Intel built into its server chipsets and processors for two decades: I/OAT,
//! also called QuickData or CBDMA.
//!
//! A channel follows a chain of [descriptors](descriptor) in memory, each of which names a piece to
//! copy or to fill by addresses that the device was given for it, and writes to a word in memory how
//! far it came. [`registers`] says how a channel is spoken to, and [`model`] is a device without
//! hardware that does the same.

pub mod descriptor;
pub mod model;
pub mod registers;
