//! Stand-ins for the model checker, which runs without the memory layer: no memory is pinned.

use super::Descriptor;

/// No value exists.
#[derive(Debug)]
pub enum DescriptorLeases {}

/// No value exists: no variable is pinned.
#[derive(Debug, Clone, Copy)]
pub enum NotificationWrite {}

impl Descriptor {
    /// Returns `None`.
    pub fn notification_write(&self, _before: impl FnOnce() -> u64) -> Option<NotificationWrite> {
        None
    }
}

/// No pinner exists.
pub trait Pinner: Send + Sync + std::fmt::Debug {}
