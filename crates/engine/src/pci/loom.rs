//! The part of the device engines that the model checker runs: the channel, over any hardware.

pub mod channel;
pub mod hardware;
