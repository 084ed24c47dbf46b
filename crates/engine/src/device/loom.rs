//! The parts of engines of devices that the model checker runs: the channel, over whatever hardware.

pub mod channel;
pub mod hardware;
