//! `memferry explain`: which path a copy or a message takes on this machine, why, and the values
//! behind the decision. It asks the planners that real copies and messages ask, and moves nothing.

pub(crate) mod copy;
pub(crate) mod message;
