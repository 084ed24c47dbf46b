//! The driver of DSA over devices that stall, halt, fault, or are configured in a wrong way.

mod commands;
mod devices;
mod operations;
mod ordered;
mod queues;
mod rig;
mod stops;
